"""An engine that cannot load says why in one sentence: its own root cause, and never where a log would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.cannot_load import CASES
from tests.engines.one_engine import RESULT
from tests.support.symptoms import is_quoted

pytestmark = pytest.mark.engines

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each of them says, in one process."""
    models = tmp_path_factory.mktemp("models")
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets, (models / "output").open("w+") as output:
        command = [sys.executable, "-m", "tests.engines.cannot_load", str(models), sockets]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        pipes = {"stdout": subprocess.PIPE, "stderr": output}
        ran = subprocess.run(command, cwd=REPOSITORY, env=env, text=True, check=False, timeout=400, **pipes)
        lines = [json.loads(line.removeprefix(RESULT)) for line in ran.stdout.splitlines() if line.startswith(RESULT)]
        output.seek(0)
        assert [line["case"] for line in lines] == list(CASES), ran.stdout + output.read()
        yield {line["case"]: line["said"] for line in lines}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no weights", "the engine could not load: RuntimeError: Cannot find any model weights"),
        ("cut weights", "the engine could not load: SafetensorError: "),
        ("other shape", "the engine could not load: "),
        ("unknown quantization", "Unknown quantization method: made_up"),
        ("unknown architecture", "model type `made_up`"),
        ("too long", "max_model_len (100000) is greater than"),
        ("too little cache", "the engine could not load: ValueError: "),
        ("too much cache", "the engine could not load: ValueError: Available memory on node"),
        ("killed", "the engine could not load: its process was ended by SIGKILL"),
    ],
)
def test_its_sentence_has_the_root_cause_and_the_place_of_its_output(said: dict[str, str], case: str, words: str):
    assert words in said[case]
    assert said[case].startswith("EngineFailed: ")
    assert "cause above" not in said[case]
    assert "\n" not in said[case]
    if "could not load" in said[case]:
        assert said[case].rpartition("; its output is in ")[2].endswith("/output")
        assert is_quoted(f"worker-1 could not start: {said[case]}")
