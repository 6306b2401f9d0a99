"""The chaos run, twelve seconds of it: `make chaos` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.serve_process import words_of

Figure = Callable[[str], None]
pytestmark = pytest.mark.engines

REPOSITORY = Path(__file__).parents[2]
SECONDS = 12
SEED = 1
WITHIN_S = 900


def test_twelve_seconds_of_faults_under_load_lose_nothing(tmp_path: Path, small_model: dict[str, str], figure: Figure):
    command = [sys.executable, "-m", "tools.chaos.chaos", "--seconds", str(SECONDS), "--seed", str(SEED)]
    command += ["--mean-gap-s", "3", "--out", str(tmp_path)]
    command += ["--prefill", "1"]  # fewer engines than `make chaos`, for a machine of two cores
    command += words_of(small_model)
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert (tmp_path / "report.json").exists(), ended.stdout[-4000:] + ended.stderr[-4000:]
    found = json.loads((tmp_path / "report.json").read_text())
    figure(
        f"{found['requests']} requests {found['endings']}, errors {found['errors_by_reason']}; faults "
        f"{found['faults']}, {found['workers_replaced']} workers replaced; pause of streams alive at a kill "
        f"{found['pause_of_streams_alive_at_a_kill_s']}; {found['scores']}"
    )
    assert found["violations"] == []
    assert found["accepted"] > 0
    assert sum(found["faults"].values()) > 0
    assert ended.returncode == 0, ended.stdout[-4000:]
