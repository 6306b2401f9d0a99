"""What each pair of rounds sends: the next window of a trace, or another seed."""

import msgspec
import pytest

from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.trace.trace import Trace
from ridgeline.loadtest.trace.windows import PairTraces


def _pair(traces: PairTraces, pair: int) -> Trace:
    return traces.at_rate(pair, 1.0, traces.requests)


def test_pairs_take_the_next_window_of_a_file_and_begin_again_after_the_last():
    traces = PairTraces(ComparePlan(trace="demo", limit=60, pairs=6))
    rows = [_pair(traces, pair).rows for pair in range(4)]
    assert [len(each) for each in rows] == [60] * 4
    assert [each[0].arrival_s for each in rows] == [0.0] * 4
    assert rows[0] != rows[1] != rows[2]
    assert rows[3] == rows[0]
    assert traces.note == "pairs replay 3 windows of the trace in turn, of 60 requests each"


def test_a_window_has_the_requests_of_a_rounds_seconds():
    assert PairTraces(ComparePlan(trace="demo", rate=0.5)).requests == 31
    assert PairTraces(ComparePlan(trace="demo", rate=2.0, round_s=30)).requests == 61
    assert PairTraces(ComparePlan(trace="demo", rate=0.5, limit=60)).requests == 60
    whole = PairTraces(ComparePlan(trace="demo", rate=0.5, round_s=10_000))
    assert (whole.requests, whole.windows) == (200, 1)
    assert whole.note == "each pair replays the same 200 requests of the trace"


def test_pairs_of_a_generated_trace_have_seeds_of_their_own():
    traces = PairTraces(ComparePlan(trace="poisson:rate=2,input=30,output=4,n=9,seed=5"))
    first, second = _pair(traces, 0), _pair(traces, 1)
    assert [row.arrival_s for row in first.rows] != [row.arrival_s for row in second.rows]
    assert len(second.rows) == 9
    same = PairTraces(ComparePlan(trace="poisson:rate=2,input=30,output=4,n=9,seed=6"))
    assert second.rows == _pair(same, 0).rows
    assert traces.note == "each pair replays 9 requests that are generated with another seed"


def test_each_window_has_the_rate_that_is_asked_for_however_bursty_the_trace_is(tmp_path):
    starts_ms = [*range(0, 10_000, 1000), *range(10_000, 11_000, 100), *[20_000] * 10]
    rows = ({"timestamp": at, "input_length": 30 + at % 7, "output_length": 4} for at in starts_ms)
    (tmp_path / "bursts.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    traces = PairTraces(ComparePlan(trace=str(tmp_path / "bursts.jsonl"), rate=4.0, limit=10))
    for pair in range(2):
        assert traces.at_rate(pair, 4.0, 10).mean_rate == pytest.approx(4.0)
    assert traces.at_rate(2, 4.0, 10).mean_rate is None, "all at once: no rate can be made of that"


@pytest.mark.parametrize("least_prompt_tokens", [1, 400])
def test_what_the_model_cannot_hold_is_left_out_before_windows_are_cut(least_prompt_tokens):
    traces = PairTraces(ComparePlan(trace="demo", limit=20), 600, least_prompt_tokens)
    assert len(_pair(traces, 0).rows) == 20
    for row in _pair(traces, 0).rows:
        assert least_prompt_tokens <= row.input_tokens <= 600 - row.output_tokens
