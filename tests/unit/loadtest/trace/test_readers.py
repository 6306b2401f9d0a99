"""Traces: reading, malformed rows, shaping, the shipped demo; prompts made for them."""

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.plan import ComparePlan, ReplayPlan
from ridgeline.loadtest.trace.prompts import TEXT_FILE, PromptMaker, TextWindows
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.loadtest.trace.shape import fit_context, shape_trace
from ridgeline.loadtest.trace.trace import Trace, TraceRow
from tools.demo_trace import write_demo_trace

MOONCAKE = """{"timestamp": 27000, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 30000, "input_length": 600, "output_length": 20, "hash_ids": [0, 9]}
"""


def _file(folder: Path, text: str, name: str = "trace") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_missing_trace_says_what_can_be_given():
    with pytest.raises(TraceError, match="demo"):
        load_trace("/nowhere/trace.csv")


def test_poisson_is_seeded_and_has_the_rate_and_sizes_asked_for():
    spec = "poisson:rate=2,input=512,output=64,n=2000,seed=1"
    trace = load_trace(spec)
    assert trace == load_trace(spec)
    assert len(trace.rows) == 2000
    assert trace.mean_rate == pytest.approx(2, rel=0.1)
    assert {(row.input_tokens, row.output_tokens) for row in trace.rows} == {(512, 64)}


def test_the_demo_trace_is_what_its_generator_writes_and_within_bounds(tmp_path):
    written = tmp_path / "demo.jsonl"
    write_demo_trace(written)
    assert load_trace(str(written)).rows == load_trace("demo").rows
    rows = load_trace("demo").rows
    assert len(rows) == 200
    assert all(128 <= row.input_tokens <= 1024 and 32 <= row.output_tokens <= 128 for row in rows)


@pytest.mark.parametrize("count", [20, 40, 100, 200])
def test_any_beginning_of_the_demo_trace_follows_its_distribution(count):
    rows = load_trace("demo").rows[:count]
    assert statistics.median(row.input_tokens for row in rows) == pytest.approx(510, abs=15)
    assert statistics.median(row.output_tokens for row in rows) == pytest.approx(64, abs=8)
    assert statistics.fmean(row.input_tokens for row in rows) == pytest.approx(500, abs=10)


def test_quantised_arrivals_are_noted_and_jitter_spreads_them_and_is_flagged(tmp_path):
    lines = [f'{{"timestamp": {3000 * (i // 5)}, "input_length": 9, "output_length": 2}}' for i in range(20)]
    trace = load_trace(_file(tmp_path, "\n".join(lines)))
    assert any("quantised" in note for note in trace.notes)
    shaped = shape_trace(trace, ReplayPlan(jitter_s=3, seed=5))
    arrivals = [row.arrival_s for row in shaped.rows]
    assert len(set(arrivals)) == 20
    assert arrivals == sorted(arrivals)
    assert any("jittered" in note for note in shaped.notes)


def test_every_cut_is_counted_in_a_note():
    trace = Trace("t", tuple(TraceRow(float(i), 100 * (i + 1), 10) for i in range(10)))
    clipped = shape_trace(trace, ReplayPlan(max_input_tokens=500, limit=8))
    assert [row.input_tokens for row in clipped.rows] == [100, 200, 300, 400, 500, 500, 500, 500]
    assert any("2 of 10 requests dropped: limit 8" in note for note in clipped.notes)
    assert any("3 of 8 requests clipped" in note for note in clipped.notes)
    dropped = shape_trace(trace, ReplayPlan(max_input_tokens=500, too_long="drop"))
    assert len(dropped.rows) == 5
    assert any("5 of 10 requests dropped: over 500 input tokens" in note for note in dropped.notes)
    fitted = fit_context(trace, 310)
    assert [row.input_tokens for row in fitted.rows] == [100, 200, 300]


def test_rate_rescales_time_and_duration_counts_in_rescaled_seconds():
    trace = Trace("t", tuple(TraceRow(float(i), 10, 10) for i in range(11)))
    shaped = shape_trace(trace, ReplayPlan(rate=4))
    assert shaped.mean_rate == pytest.approx(4)
    assert len(shape_trace(trace, ReplayPlan(time_scale=0.5, duration_s=2)).rows) == 5
    assert [row.input_tokens for row in shape_trace(trace, ReplayPlan(length_scale=0.25)).rows] == [2] * 11


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"pairs": 0}, "greater than or equal to 1"),
        ({"rate": 0}, "above 0"),
        ({"limit": 0}, "greater than or equal to 1"),
        ({"rate": 1, "time_scale": 2}, "should be 1"),
        ({"tracee": "demo"}, "tracee"),
    ],
)
def test_a_wrong_plan_says_what_would_be_right(fields, fix):
    with pytest.raises(ValidationError, match=fix):
        ComparePlan(**fields)


def test_the_shipped_text_is_long_and_its_source_is_named():
    assert len(TEXT_FILE.read_text(encoding="utf-8").split()) > 20_000
    assert "Public domain" in (TEXT_FILE.parent / "SOURCE").read_text()


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(16, 3000))
def test_windows_have_exact_lengths_and_never_begin_alike(first, second, tokens):
    windows = TextWindows(tuple(range(1000)), seed=3)
    assert len(windows.window(first, tokens)) == tokens
    if first != second:
        assert windows.window(first, tokens)[:16] != windows.window(second, tokens)[:16]


def test_rounds_differ_and_the_same_round_repeats_in_the_other_mode():
    trace = Trace("t", tuple(TraceRow(float(i), 40, 10) for i in range(20)))
    one, other = (PromptMaker(TextWindows(tuple(range(5000)), 1), trace, 2) for _ in range(2))
    first, second = ([one.prompt(index, each) for index in range(20)] for each in (0, 1))
    warm = [one.warmup_prompt(number, each, 40) for number in (0, 1) for each in (0, 1)]
    assert second == [other.prompt(index, 1) for index in range(20)]
    assert len({tuple(prompt) for prompt in first + second + warm}) == 44


def test_mooncake_prompts_share_exactly_the_blocks_the_trace_shares(tmp_path):
    trace = load_trace(_file(tmp_path, MOONCAKE))
    maker = PromptMaker(TextWindows(tuple(range(50_000)), 1), trace, 0)
    first, second = maker.prompt(0, 0), maker.prompt(1, 0)
    assert (len(first), len(second)) == (1100, 600)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    assert maker.prompt(0, 1)[:512] != first[:512]
