"""Agents: requests that begin after several others, contexts that grow, and the formats that say so."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ridgeline.cluster.commands.inspect_trace import facts
from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.plan import ComparePlan, ReplayPlan
from ridgeline.loadtest.trace.inspection import inspect_trace
from ridgeline.loadtest.trace.prompts import PromptMaker, TextWindows
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.loadtest.trace.shape import fit_context, shape_trace
from ridgeline.loadtest.trace.trace import Trace, TraceRow
from ridgeline.loadtest.trace.windows import PairTraces

EXAMPLE = Path(__file__).parents[4] / "examples" / "agentic.dag.jsonl"
SPEC = "agentic:sessions=6,rate=0.5,turns=5,every=2,agents=3,agent_turns=2,seed=3"
FAMILY = (
    TraceRow(0.0, 100, 10, session="a"),
    TraceRow(0.0, 30, 10, session="a", after=(0,), fresh=True),
    TraceRow(0.0, 60, 10, session="a", after=(1,)),
    TraceRow(0.0, 40, 10, session="a", after=(0,), fresh=True),
    TraceRow(0.0, 150, 10, session="a", think_s=2.0, after=(0, 2, 3)),
    TraceRow(1.0, 20, 10),
)
"""An agent's turn, two sub-agents side by side, the first with two turns, and the turn that waits for both."""


def read(folder, *objects) -> Trace:
    (folder / "trace").write_text("".join(json.dumps(each) + "\n" for each in objects))
    return load_trace(str(folder / "trace"), "words")


def links(rows) -> list[tuple[tuple[int, ...], bool, float]]:
    return [(row.after, row.fresh, row.think_s) for row in rows]


def call(at_s, tokens, out, ids=None, **more) -> dict:
    return {"t": at_s, "type": "n", "in": tokens, "out": out, **({"hash_ids": ids} if ids else {}), **more}


def subagent(at_s, *calls) -> dict:
    return {"t": at_s, "type": "subagent", "requests": list(calls)}


def turn(words, out, **more) -> dict:
    return {"messages": [{"role": "user", "content": "w " * words}], "max_tokens": out, **more}


def test_wekas_agent_waits_for_its_subagents_which_work_side_by_side(tmp_path):
    calls = [
        call(0, 128, 9, [1, 2], api_time=1.5),
        call(4, 192, 5, [1, 2, 3], think_time=0.5),
        subagent(5, call(5, 64, 8, [9]), call(6, 128, 8, [9, 10], think_time=0.25)),
        subagent(5, call(5, 64, 8, [11])),
        call(9, 256, 5, [1, 2, 3, 4], think_time=0.75),
    ]
    trace = read(tmp_path, {"id": "x", "block_size": 64, "requests": calls})
    assert links(trace.rows) == [
        ((), True, 0.0),
        ((0,), True, 0.5),
        ((1,), True, 0.0),
        ((2,), True, 0.25),
        ((1,), True, 0.0),
        ((1, 3, 4), True, 0.75),
    ]
    assert [row.prefix_ids for row in trace.rows[:2]] == [(0, 1), (0, 1, 2)]
    assert trace.prefix_block_tokens == 64
    assert len({row.session for row in trace.rows}) == 1


@pytest.mark.parametrize(("more", "think_s"), [({}, 4.0), ({"api_time": 1.5}, 2.5), ({"api_time": 9}, 0.0)])
def test_a_weka_call_without_a_think_time_waits_from_the_end_of_the_call_before(tmp_path, more, think_s):
    trace = read(tmp_path, {"requests": [call(0, 100, 9, **more), call(4, 150, 5)]})
    assert links(trace.rows) == [((), True, 0.0), ((0,), False, think_s)]


def test_wekas_conversations_begin_one_after_another_and_share_no_local_hashes(tmp_path):
    one = {"id": "x", "requests": [call(0, 64, 9, [1]), call(1, 0, 9)]}
    trace = read(tmp_path, one, one, one | {"hash_id_scope": "global"})
    assert [row.prefix_ids for row in trace.rows] == [(0,), (1,), (2,)]
    assert 0.0 == trace.rows[0].arrival_s < trace.rows[1].arrival_s < trace.rows[2].arrival_s
    assert any("calls of 0 tokens" in note for note in trace.notes)
    assert shape_trace(trace, ReplayPlan(rate=4.0)).mean_rate == pytest.approx(4)


def test_aiperfs_spawns_begin_anew_and_the_next_turn_waits_for_all_of_them(tmp_path):
    trace = read(
        tmp_path,
        {"session_id": "b", "turns": [turn(4, 2), turn(3, 2)]},
        {"session_id": "root", "turns": [turn(10, 5, spawns=["b", "c"]), turn(6, 5, delay=250)]},
        {"session_id": "c", "turns": [turn(7, 2)]},
    )
    assert [(row.input_tokens, row.output_tokens) for row in trace.rows] == [(10, 5), (4, 2), (9, 2), (7, 2), (21, 5)]
    assert links(trace.rows) == [
        ((), True, 0.0),
        ((0,), True, 0.0),
        ((1,), False, 0.0),
        ((0,), True, 0.0),
        ((0, 2, 3), False, 0.25),
    ]


def test_aiperfs_forks_go_on_from_the_conversation_so_far(tmp_path):
    trace = read(
        tmp_path,
        {"session_id": "root", "turns": [turn(10, 5, forks=["a", "b"])]},
        {"session_id": "a", "turns": [turn(4, 2), turn(4, 2)]},
        {"session_id": "b", "turns": [turn(6, 2)]},
    )
    assert [row.input_tokens for row in trace.rows] == [10, 19, 25, 21]
    assert links(trace.rows) == [((), True, 0.0), ((0,), False, 0.0), ((1,), False, 0.0), ((0,), False, 0.0)]


def test_a_turn_that_joins_later_lets_the_turns_between_go_on(tmp_path):
    turns = [turn(10, 5, spawns=[{"children": ["b"], "join_at": 2}]), turn(6, 5), turn(6, 5)]
    trace = read(tmp_path, {"session_id": "a", "turns": turns}, {"session_id": "b", "turns": [turn(4, 2)]})
    assert [row.after for row in trace.rows] == [(), (0,), (0,), (2, 1)]


REFUSED = {
    "an unknown child": ([{"session_id": "a", "turns": [turn(1, 1, spawns=["b"])]}], "'b', which no line has"),
    "a name twice": ([{"session_id": "a", "turns": [turn(1, 1)]}] * 2, "line 2: session a is there twice"),
    "no root": ([{"session_id": "a", "turns": [turn(1, 1, spawns=["a"])]}], "no conversation is a root"),
    "a circle": (
        [
            {"session_id": "r", "turns": [turn(1, 1, spawns=["a"])]},
            {"session_id": "a", "turns": [turn(1, 1, spawns=["a"])]},
        ],
        "line 2: conversations begin one another",
    ),
    "no output": ([{"session_id": "a", "turns": [turn(1, 0)]}], "line 1: give at least one turn, max_tokens"),
    "no turns": ([{"session_id": "a", "turns": []}], "line 1: give at least one turn"),
    "a join in the past": (
        [
            {"session_id": "a", "turns": [turn(1, 1), turn(1, 1, spawns=[{"children": ["b"], "join_at": 1}])]},
            {"session_id": "b", "turns": [turn(1, 1)]},
        ],
        "turn 1 joins at 1: name a later turn",
    ),
    "a fork in the middle": (
        [
            {"session_id": "a", "turns": [turn(1, 1, forks=["b"]), turn(1, 1)]},
            {"session_id": "b", "turns": [turn(1, 1)]},
        ],
        "turn 0 forks and is not the last",
    ),
    "an orchestrator": ([{"session_id": "a", "turns": [], "orchestrator": True}], "unknown field `orchestrator`"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_conversations_that_cannot_be_sent_are_refused(tmp_path, sentence):
    objects, cause = REFUSED[sentence]
    with pytest.raises(TraceError) as caught:
        read(tmp_path, *objects)
    assert cause in str(caught.value)


def test_a_generated_agent_waits_for_its_sub_agents_and_its_context_grows():
    rows = load_trace(SPEC).rows
    assert rows == load_trace(SPEC).rows
    assert len(rows) == 6 * (5 + 2 * 3 * 2)
    assert len({row.arrival_s for row in rows}) == 6
    first = rows[: len(rows) // 6]
    joins = [row for row in first if len(row.after) > 1]
    assert [len(row.after) for row in joins] == [4, 4]
    assert all(row.think_s > 0 for row in joins)
    for place, row in enumerate(first):
        assert all(parent < place for parent in row.after)
        if row.continues is not None:
            before = first[row.continues]
            assert row.input_tokens > before.input_tokens + before.output_tokens


@pytest.mark.parametrize("change", ["turns=0", "agents=-1", "agents=1.5", "tool_s=x", "speed=1", "rate=0"])
def test_agents_that_cannot_be_are_refused(change):
    with pytest.raises(TraceError, match="not understood"):
        load_trace(f"agentic:{change}")


@pytest.mark.parametrize("changes", [{}, {"length_scale": 0.5}, {"jitter_s": 20.0}])
def test_a_prompt_begins_with_the_prompt_that_it_goes_on_from_and_with_no_other(changes):
    trace = shape_trace(load_trace(SPEC), ReplayPlan(**changes))
    maker = PromptMaker(TextWindows(tuple(range(50_000)), 1), trace, 2)
    prompts = [maker.prompt(index, 1) for index in range(len(trace.rows))]
    assert [len(prompt) for prompt in prompts] == [row.input_tokens for row in trace.rows]
    continued = [(prompt, row.continues) for prompt, row in zip(prompts, trace.rows, strict=True)]
    assert all(prompt[: len(prompts[at])] == prompts[at] for prompt, at in continued if at is not None)
    begins = [tuple(prompt[trace.prefix_block_tokens :][:16]) for prompt, at in continued if at is None]
    assert len(set(begins)) == len(begins), "beyond the system prompt, no two conversations begin alike"


def test_forks_have_their_parents_prompt_and_answer_in_common_and_no_more():
    rows = (TraceRow(0.0, 100, 10), TraceRow(0.0, 160, 10, after=(0,)), TraceRow(0.0, 160, 10, after=(0,)))
    maker = PromptMaker(TextWindows(tuple(range(5000)), 1), Trace("t", rows), 0)
    parent, one, other = (maker.prompt(index, 0) for index in range(3))
    assert one[:100] == other[:100] == parent
    assert one[:110] == other[:110]
    assert one[110:126] != other[110:126]


def test_a_session_ends_where_its_context_exceeds_the_models():
    fitted = fit_context(Trace("t", FAMILY), 155)
    assert [row.after for row in fitted.rows] == [(), (0,), (1,), (0,), ()]
    assert "1 of 6 requests dropped: longer than the model's 155 tokens" in fitted.notes[0]
    assert fitted.notes[0].endswith("1 sessions end early or are left out")
    fitted = fit_context(Trace("t", FAMILY), 105)
    assert [row.input_tokens for row in fitted.rows] == [20], "what an agent that is left out would have begun"


def test_a_turn_waits_for_what_is_left_of_a_sub_agent_that_ends_early():
    rows = (*FAMILY[:2], TraceRow(0.0, 900, 10, session="a", after=(1,)), *FAMILY[3:])
    fitted = fit_context(Trace("t", rows), 500)
    assert [row.after for row in fitted.rows] == [(), (0,), (0,), (0, 1, 2), ()]
    assert not fitted.rows[3].fresh


def test_rounds_of_agents_have_as_many_requests_though_contexts_reach_the_limit():
    traces = PairTraces(ComparePlan(trace=SPEC.replace("sessions=6", "n=60"), pairs=6), 1024)
    assert 0 < traces.requests < 60
    for pair in range(3):
        assert (
            len(traces.at_rate(pair, 1.0, traces.requests).rows)
            == len(traces.at_rate(pair, 2.0, traces.requests).rows)
            == traces.requests
        )
    assert traces.at_rate(0, 2.0, traces.requests).mean_rate == pytest.approx(2.0)


def test_a_window_that_begins_within_a_session_begins_its_conversation_there(tmp_path):
    turns = [{"session_id": name, "timestamp": 0, "input_length": 20, "output_length": 5} for name in "abc"]
    turns = [turn | {"timestamp": 1000 * at} for at, turn in enumerate(turns) for _ in range(4)]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, turns)))
    traces = PairTraces(ComparePlan(trace=str(tmp_path / "trace"), limit=6, pairs=6))
    assert [row.after for row in traces.at_rate(0, 1.0, 6).rows] == [(), (0,), (1,), (2,), (), (4,)]
    assert [row.after for row in traces.at_rate(1, 1.0, 6).rows] == [(), (0,), (), (2,), (3,), (4,)]
    assert [row.fresh for row in traces.at_rate(1, 1.0, 6).rows] == [True] + 5 * [False]


def test_the_example_is_an_agents_traffic(tmp_path):
    figures = inspect_trace(str(EXAMPLE), "words")
    said = dict(facts(figures))
    assert figures.format == "AIPerf DAG JSONL"
    assert said["sessions"].startswith("4, with 12 requests each")
    assert said["branches"].startswith("after 7 answers up to 2 requests begin at once; 6 requests wait for several")
    assert said["delays"].startswith("p50 ")
    assert said["contexts"].startswith("from ")
    assert float(said["prefix reuse"].partition("%")[0]) > 50
    rows = load_trace(str(EXAMPLE), "words").rows
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(rows))


def test_figures_of_agents_are_those_of_their_requests():
    said = dict(facts(inspect_trace(SPEC)))
    assert said["sessions"] == "6, with 17 requests each, 17 at most; arrivals are first turns"
    assert said["branches"] == "after 12 answers up to 3 requests begin at once; 12 requests wait for several answers"
