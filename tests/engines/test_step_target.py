"""A step target on a real engine: chunks of prompts become shorter, and answers stay what they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.harness import Figure

pytestmark = [pytest.mark.engines, pytest.mark.core]

REPOSITORY = Path(__file__).parents[2]


def test_a_target_shortens_chunks_and_changes_no_token(figure: Figure):
    ran = subprocess.run(
        [sys.executable, "-m", "tools.bench.step_target", "--same-tokens"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = re.search(r"(\d+) of (\d+) answers equal, (\d+) chunks shortened", ran.stdout)
    assert told is not None, ran.stdout + ran.stderr
    figure(told[0])
    equal, answers, shortened = map(int, told.groups())
    assert equal == answers == 6
    assert shortened > 10
    assert ran.returncode == 0
