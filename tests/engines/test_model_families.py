"""Models whose attention is not a Llama's: right through the hand-over, or refused with the property that stands there.

Each is tiny and random; one engine hands over to itself (`one_engine.py`), so all of them take half a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.one_engine import LENGTHS, NUM_OUTPUT_TOKENS, RESULT
from tests.engines.tiny_model import WINDOW_TOKENS

pytestmark = pytest.mark.engines

REPOSITORY = Path(__file__).parents[2]
SHORT = f"mistral:{WINDOW_TOKENS}"
FAMILIES = ("gemma3", "gpt_oss", "deepseek_mla", "mistral", SHORT)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each family came to, in one process of its own."""
    command = [sys.executable, "-m", "tests.engines.one_engine", str(tmp_path_factory.mktemp("models")), *FAMILIES]
    path = os.pathsep.join(str(REPOSITORY / folder) for folder in (".", "tests/fakes", "tests/engines"))
    ran = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    lines = [json.loads(line.removeprefix(RESULT)) for line in ran.stdout.splitlines() if line.startswith(RESULT)]
    assert [line["family"] for line in lines] == list(FAMILIES), ran.stdout + ran.stderr
    return {line["family"]: line for line in lines}


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_mla", SHORT])
def test_a_handed_over_answer_is_that_of_the_engine_alone(results: dict[str, dict[str, Any]], family: str):
    result = results[family]
    assert "refused" not in result, result["refused"]
    assert len(result["answers"]) == (2 if family == SHORT else len(LENGTHS))
    for answer in result["answers"]:
        assert len(answer["whole"]) == NUM_OUTPUT_TOKENS
        for token_ids, transfer in (answer["split"], answer["followed"]):
            assert (answer["length"], token_ids) == (answer["length"], answer["whole"])
            assert (transfer["outcome"], transfer["num_bytes"] > 0) == ("ok", True)
    changed = [answer["length"] for answer in result["answers"] if answer["other"] != answer["whole"]]
    assert len(changed) >= 2, "attention hardly matters in this model: its answers show nothing"


def test_a_window_in_every_layer_is_refused_by_its_name(results: dict[str, dict[str, Any]]):
    assert results["mistral"]["refused"] == (
        "UnsupportedModel: no layer of this model keeps the KV of every token (SlidingWindowSpec, "
        f"{WINDOW_TOKENS} tokens), and what is given back cannot be handed over: serve it with mode colocated, where "
        "nothing is handed over"
    )
