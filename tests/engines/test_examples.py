"""The two scripts in examples/ that start engines: each ends with what it promises, and leaves no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars
import pytest

from tests.engines.serve_process import REPOSITORY

pytestmark = pytest.mark.engines

WITHIN_S = 240


def example(name: str, *arguments: object) -> str:
    """What the script prints."""
    environment = os.environ | {"COLUMNS": "200"}
    command = [sys.executable, str(REPOSITORY / "examples" / name), *map(str, arguments)]
    ran = subprocess.run(
        command, cwd=REPOSITORY, env=environment, text=True, capture_output=True, check=False, timeout=WITHIN_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_a_deployment_is_served_from_python_and_ends():
    *_, answer = example("serve.py").strip().splitlines()
    assert answer.strip()


@pytest.mark.long
def test_all_modes_are_compared_over_rates_and_the_result_is_a_table(tmp_path: Path):
    run = tmp_path / "run"
    trace = ("--trace", "poisson:rate=4,input=64,output=8,n=12,seed=1", "--budget-s", "30", "--settle-s", "0.3")
    said = example("compare_modes.py", "--out", run, *trace)
    summary = json.loads((run / "summary.json").read_text())
    assert said.splitlines()[-1] == summary["verdict"]["sentences"][0]
    requests = polars.read_parquet(run / "records.parquet").filter("valid")
    assert set(requests["mode"]) == {"colocated", "disaggregated", "adaptive"}
    assert all(len(of_pair) % 3 == 0 for _, of_pair in requests.group_by("pair"))
    assert requests["rate"].n_unique() >= 1
