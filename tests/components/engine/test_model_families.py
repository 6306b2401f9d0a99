"""Models whose layers are not a Llama's: right through the hand-over.

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
from tests.engines.tiny_model import FAMILIES

REPOSITORY = Path(__file__).parents[3]
UNSTEADY = "gpt_oss"  # once in some fifty runs vLLM's answer without any hand-off is another one, on CPUs


def results(models: Path, *families: str) -> dict[str, dict[str, Any]]:
    """What each family came to, in one process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engines.one_engine", str(models), *families],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = [json.loads(line.removeprefix(RESULT)) for line in ran.stdout.splitlines() if line.startswith(RESULT)]
    assert [line["family"] for line in lines] == list(families), ran.stdout + ran.stderr
    return {line["family"]: line for line in lines}


def right(line: dict[str, Any]) -> None:
    """Each answer is that of the engine alone, and everything came through the transfer."""
    assert "refused" not in line, line["refused"]
    answers = line["answers"]
    assert len(answers) == len(LENGTHS)
    for answer in answers:
        assert len(answer["whole"]) == NUM_OUTPUT_TOKENS
        for token_ids, transfer in (answer["split"], answer["followed"]):
            assert (answer["length"], token_ids) == (answer["length"], answer["whole"])
            assert (transfer["outcome"], transfer["num_bytes"] > 0) == ("ok", True)
    changed = [answer["length"] for answer in answers if answer["other"] != answer["whole"]]
    assert len(changed) >= 2, "attention hardly matters in this model: its answers show nothing"


@pytest.mark.slow
def test_a_handed_over_answer_is_that_of_the_engine_alone(tmp_path: Path, subtests: pytest.Subtests):
    steady = [family for family in FAMILIES if family != UNSTEADY]
    for family, line in results(tmp_path, *steady).items():
        with subtests.test(family):
            right(line)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), [("llama", "ngram"), ("llama", "draft_model"), ("gemma3", "ngram")])
def test_speculation_changes_no_token_of_a_handed_over_answer(tmp_path: Path, family: str, method: str):
    told = {}
    for name in (f"{family}+none", f"{family}+{method}"):
        told[name] = results(tmp_path, name)[name]
        assert "refused" not in told[name], told[name]["refused"]
    plain, drafts = (line["answers"] for line in told.values())
    for way in ("whole", "split", "followed"):
        assert drafts[way] == plain["whole"], way
        drafted, accepted = drafts[f"{way} drafts"]
        assert 0 < accepted <= drafted, way
        # The draft is the model itself: it is right about all, unless a part of its own KV is not there.
        assert method == "ngram" or accepted > 0.9 * drafted, (way, drafted, accepted)


@pytest.mark.long
def test_gpt_oss_is_handed_over_too(tmp_path: Path):
    right(results(tmp_path, UNSTEADY)[UNSTEADY])
