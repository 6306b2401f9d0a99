"""An engine that cannot load says why in one sentence: its own root cause, and never where a log would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.engines.cannot_load import CASES
from tests.engines.one_engine import RESULT
from tests.support.symptoms import is_quoted

REPOSITORY = Path(__file__).parents[3]
WORDS = {
    "no weights": "the engine could not load: RuntimeError: Cannot find any model weights",
    "cut weights": "the engine could not load: SafetensorError: ",
    "other shape": "the engine could not load: ",
    "unknown quantization": "Unknown quantization method: made_up",
    "unknown architecture": "model type `made_up`",
    "too long": "max_model_len (100000) is greater than",
    "too little cache": "the engine could not load: ValueError: ",
    "too much cache": "the engine could not load: ValueError: Available memory on node",
    "killed": "the engine could not load: its process was ended by SIGKILL",
}


def said(models: Path) -> dict[str, str]:
    """What each of them says, in one process."""
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets, (models / "output").open("w+") as output:
        command = [sys.executable, "-m", "tests.engines.cannot_load", str(models), sockets]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        pipes = {"stdout": subprocess.PIPE, "stderr": output}
        ran = subprocess.run(command, cwd=REPOSITORY, env=env, text=True, check=False, timeout=400, **pipes)
        lines = [json.loads(line.removeprefix(RESULT)) for line in ran.stdout.splitlines() if line.startswith(RESULT)]
        output.seek(0)
        assert [line["case"] for line in lines] == list(CASES), ran.stdout + output.read()
        return {line["case"]: line["said"] for line in lines}


@pytest.mark.slow
def test_its_sentence_has_the_root_cause_and_the_place_of_its_output(tmp_path: Path, subtests: pytest.Subtests):
    told = said(tmp_path)
    for case, words in WORDS.items():
        with subtests.test(case):
            assert words in told[case]
            assert told[case].startswith("EngineFailed: ")
            assert "cause above" not in told[case]
            assert "\n" not in told[case]
            if "could not load" in told[case]:
                assert told[case].rpartition("; its output is in ")[2].endswith("/output")
                assert is_quoted(f"worker-1 could not start: {told[case]}")
