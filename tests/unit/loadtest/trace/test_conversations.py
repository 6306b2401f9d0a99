"""ShareGPT and sessions: lengths, prompts that grow, ticks that are spread."""

import json
from types import SimpleNamespace

import pytest

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.run.replay import completions
from ridgeline.loadtest.trace.prompts import PromptMaker, TextWindows
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.loadtest.trace.shape import shape_trace

SESSIONS = """{"session_id": "a", "timestamp": 1000, "input_length": 30, "output_length": 5}
{"session_id": "b", "timestamp": 1500, "input_length": 40, "output_length": 6}
{"session_id": "a", "delay": 2500, "input_length": 10, "output_length": 7}
{"session_id": "a", "delay": 0, "input_length": 20, "output_length": 8}
"""
SHAREGPT = [{"conversations": [{"from": "user", "value": "a b c d"}, {"from": "assistant", "value": "1 2 3 4 5 6"}]}]


def _file(folder, text):
    path = folder / "trace"
    path.write_text(text)
    return str(path)


def test_sharegpt_without_a_tokenizer_says_what_to_pass(tmp_path):
    with pytest.raises(TraceError, match="pass --tokenizer PATH"):
        load_trace(_file(tmp_path, json.dumps(SHAREGPT, indent=1)))


def test_a_turn_is_sent_after_the_answer_before_it_and_its_prompt_begins_with_the_one_before(tmp_path):
    trace = load_trace(_file(tmp_path, SESSIONS))
    maker = PromptMaker(TextWindows(tuple(range(500)), seed=3), trace, 0)
    bodies = SimpleNamespace(body=lambda _, index, round_index: b"")
    made = list(completions(trace, bodies, 0))
    assert [(each.after, each.think_s) for each in made] == [((), 0.0), ((0,), 2.5), ((1,), 0.0), ((), 0.0)]
    first, second, third, other = (maker.prompt(index, 0) for index in range(4))
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert [len(prompt) for prompt in (first, second, third, other)] == [30, 45, 72, 40]
    assert other[:16] != first[:16]


def test_the_turns_of_a_session_are_jittered_together(tmp_path):
    shaped = shape_trace(load_trace(_file(tmp_path, SESSIONS)), ReplayPlan(jitter_s=10.0, seed=1))
    starts = {
        row.session: {each.arrival_s for each in shaped.rows if each.session == row.session} for row in shaped.rows
    }
    assert {session: len(found) for session, found in starts.items()} == {"a": 1, "b": 1}
    assert [row.input_tokens for row in shaped.rows if row.session == "a"] == [30, 45, 72]


def test_ticks_are_spread_over_the_time_to_the_next_one_on_request(tmp_path):
    lines = [{"timestamp": 3000 * (index // 8), "input_length": 10, "output_length": 2} for index in range(40)]
    trace = load_trace(_file(tmp_path, "\n".join(map(json.dumps, lines))))
    assert "--spread-ticks" in trace.notes[0]
    spread = shape_trace(trace, ReplayPlan(spread_ticks=True))
    assert len({row.arrival_s for row in spread.rows}) == 40
    assert 12.0 < spread.span_s < 15.0
    assert "each tick of 3 s spread" in spread.notes[-1]
    with pytest.raises(TraceError, match="not quantised: leave out --spread-ticks"):
        shape_trace(load_trace("demo"), ReplayPlan(spread_ticks=True))
