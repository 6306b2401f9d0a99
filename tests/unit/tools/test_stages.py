"""The timeline of a request, from marks that several processes made."""

import os
import subprocess
import sys
from typing import get_args

import pytest

from ridgeline.contracts.stages import FILE_VARIABLE, Stage
from tools.bench.stages import CLIENT, PARTS, Seen, Server, timeline

ONE_REQUEST = (
    "router has prompt",
    "prefill worker has it",
    "prefill engine has it",
    "scheduled",
    "announcement at router",
    "decode worker has it",
    "decode engine has it",
    "fetch issued",
    "fetch asked",
    "step ended",
    "published",
    "token leaves worker",
    "last bytes in place",
    "token at router",
    "fetch ended",
    "decode engine knows",
    "scheduled",
    "step ended",
    "token leaves worker",
    "token at router",
)
MARKS = [(10.0 + number / 1000, stage) for number, stage in enumerate(ONE_REQUEST, start=1)]
SENT_S, TOKENS_S = 10.0, (10.0145, 10.0215, 10.0235, 10.0255)


def test_each_stage_is_timed_from_the_one_before_it_on_its_own_part_of_the_way():
    parts = timeline(SENT_S, TOKENS_S, MARKS)
    assert {part: tuple(stages) for part, stages in parts.items()} == PARTS
    in_ms = {part: [round(1e3 * took_s, 3) for took_s in stages.values()] for part, stages in parts.items()}
    assert in_ms == {
        "first token": [1, 1, 1, 1, 6, 2, 2, 0.5],
        "fetch": [1, 1, 1, 1, 1],
        "second token": [1, 2, 2, 1, 1, 1, 1, 1, 1.5],
    }
    assert sum(in_ms["first token"]) == pytest.approx(1e3 * (TOKENS_S[0] - SENT_S))


def test_of_a_prompt_of_several_steps_the_last_one_counts():
    marks = sorted([*MARKS, (10.0042, "step ended"), (10.0044, "step ended")])
    assert timeline(SENT_S, TOKENS_S, marks) == timeline(SENT_S, TOKENS_S, MARKS)


@pytest.mark.parametrize("missing", ["published", "announcement at router", "decode engine knows"])
def test_a_request_with_a_stage_missing_is_counted_and_in_no_stage(missing):
    seen = Seen()
    seen.add(SENT_S, TOKENS_S, [(at_s, stage) for at_s, stage in MARKS if stage != missing])
    assert (seen.incomplete, dict(seen.stages_ms)) == (1, {})
    assert (seen.second_ms, seen.beside_a_step_ms) == ([pytest.approx(7.0)], [pytest.approx(5.0)])


def test_every_stage_that_is_marked_is_shown_and_no_other():
    shown = {stage for stages in PARTS.values() for stage in stages}
    assert shown - {CLIENT} == set(get_args(Stage))


def test_processes_append_to_one_file_and_the_reader_gets_what_is_new(tmp_path):
    file = tmp_path / "stages"
    file.touch()
    server = Server("http://127.0.0.1:1", file)
    code = "from ridgeline.contracts.stages import mark; mark('published'); mark('fetch ended')"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], env={**os.environ, FILE_VARIABLE: str(file)}, check=True)
        first, second = server.new_marks()
        assert (first[1], second[1]) == ("published", "fetch ended")
        assert first[0] <= second[0]
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, FILE_VARIABLE: ""}, check=True
    )  # without the variable nothing is written
    assert server.new_marks() == []
