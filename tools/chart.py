"""Writes deploy/kuberay.yaml, the chart of deploy/helm/ as `kubectl apply` takes it: python -m tools.chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
CHART = DEPLOY / "helm" / "ridgeline"
MANIFEST = DEPLOY / "kuberay.yaml"
HEAD = """\
# A Ridgeline cluster on Kubernetes, by the KubeRay operator 1.6 or newer (docs/how-to/deploy.md), for those without
# Helm: replace REGISTRY, make the Secret `ridgeline-keys`, and `kubectl apply -f` this file. `python -m tools.chart`
# writes it from deploy/helm/ridgeline/ with values-two-pools.yaml: change that.
"""


def rendered(values_file: str, release: str = "ridgeline", **more: Any) -> str:
    """Return the manifests of a release with this file's values; `more` are values at the top."""
    values = yaml.safe_load((CHART / values_file).read_text()) | more
    values.setdefault("image", {"head": "REGISTRY/ridgeline:cpu", "workers": "REGISTRY/ridgeline:gpu"})
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        parts = chart.render(values, name=release)
    return "---\n".join(text.strip() + "\n" for path, text in sorted(parts.items()) if path.endswith(".yaml"))


def written() -> str:
    """Return the text of deploy/kuberay.yaml."""
    return HEAD + rendered("values-two-pools.yaml")


if __name__ == "__main__":
    MANIFEST.write_text(written(), encoding="utf-8")
