"""What each pair of rounds sends: the next window of a trace, or another seed."""

import msgspec
import pytest

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.trace.windows import PairTraces


def test_pairs_take_the_next_window_of_a_file_and_begin_again_after_the_last():
    traces = PairTraces(ComparePlan(trace="demo", limit=60, pairs=6))
    rows = [traces.of_pair(pair).rows for pair in range(4)]
    assert [len(each) for each in rows] == [60] * 4
    assert [each[0].arrival_s for each in rows] == [0.0] * 4
    assert rows[0] != rows[1] != rows[2]
    assert rows[3] == rows[0]
    assert (
        traces.note
        == "each pair has the next of 3 windows of the trace, 60 requests; after the last the first comes again"
    )


def test_a_window_has_the_requests_of_a_rounds_seconds():
    assert PairTraces(ComparePlan(trace="demo", rate=0.5)).requests == 31
    assert PairTraces(ComparePlan(trace="demo", rate=2.0, round_s=30)).requests == 61
    whole = PairTraces(ComparePlan(trace="demo", rate=0.5, round_s=10_000))
    assert (whole.requests, whole.windows) == (200, 1)
    assert whole.note == "each pair has the same window of the trace, 200 requests"


@pytest.mark.parametrize(("limit", "duration_s", "requests"), [(60, 10, 6), (5, 10, 5), (60, None, 60)])
def test_of_a_number_of_requests_and_of_seconds_the_smaller_holds(limit, duration_s, requests):
    plan = ComparePlan(trace="demo", rate=0.5, limit=limit, duration_s=duration_s)
    assert PairTraces(plan).requests == requests


def test_pairs_of_a_generated_trace_have_seeds_of_their_own():
    traces = PairTraces(ComparePlan(trace="poisson:rate=2,input=30,output=4,n=9,seed=5"))
    first, second = traces.of_pair(0), traces.of_pair(1)
    assert first == PairTraces(ComparePlan(trace="poisson:rate=2,input=30,output=4,n=9,seed=5")).of_pair(0)
    assert [row.arrival_s for row in first.rows] != [row.arrival_s for row in second.rows]
    assert len(second.rows) == 9
    same = PairTraces(ComparePlan(trace="poisson:rate=2,input=30,output=4,n=9,seed=6")).of_pair(0)
    assert second.rows == same.rows
    assert traces.note == "each pair has 9 requests of a seed of its own"


def test_the_rate_is_the_one_that_was_asked_for_over_the_whole_trace():
    traces = PairTraces(ComparePlan(trace="demo", rate=4.0, limit=20))
    spans = [traces.of_pair(pair).span_s for pair in range(10)]
    assert sum(spans) == pytest.approx(10 * 19 / 4.0, rel=0.1)


def test_a_search_offers_each_window_at_the_rate_it_asks_for_however_bursty_the_trace_is(tmp_path):
    starts_ms = [*range(0, 10_000, 1000), *range(10_000, 11_000, 100), *[20_000] * 10]
    rows = ({"timestamp": at, "input_length": 30 + at % 7, "output_length": 4} for at in starts_ms)
    (tmp_path / "bursts.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    traces = PairTraces(ComparePlan(trace=str(tmp_path / "bursts.jsonl"), rate=4.0, limit=10))
    assert traces.of_pair(1).mean_rate == pytest.approx(10 * traces.of_pair(0).mean_rate)
    for pair in range(2):
        window = traces.at_rate(pair, 4.0, 10)
        assert window.mean_rate == pytest.approx(4.0)
        assert [row.input_tokens for row in window.rows] == [row.input_tokens for row in traces.of_pair(pair).rows]
    assert traces.at_rate(2, 4.0, 10) == traces.of_pair(2), "all at once: no rate can be made of that"


@pytest.mark.parametrize("least_prompt_tokens", [1, 400])
def test_what_the_model_cannot_hold_is_left_out_before_windows_are_cut(least_prompt_tokens):
    traces = PairTraces(ComparePlan(trace="demo", limit=20), 600, least_prompt_tokens)
    assert len(traces.of_pair(0).rows) == 20
    for row in traces.of_pair(0).rows:
        assert least_prompt_tokens <= row.input_tokens <= 600 - row.output_tokens


def test_windows_for_tuning_are_the_last_ones_and_pairs_begin_again_before_them():
    traces = PairTraces(ComparePlan(trace="demo", limit=40, grid="g", tuning_rounds=2))
    assert traces.windows == 3
    whole = PairTraces(ComparePlan(trace="demo", limit=40))
    assert [traces.of_tuning(number).rows for number in range(2)] == [whole.of_pair(pair).rows for pair in (3, 4)]
    assert traces.of_pair(3).rows == traces.of_pair(0).rows


def test_seeds_for_tuning_come_after_those_of_all_pairs():
    plan = ComparePlan(trace="poisson:rate=2,input=30,output=4,n=9", grid="g", pairs=6)
    traces = PairTraces(plan)
    arrivals = [tuple(row.arrival_s for row in traces.of_tuning(number).rows) for number in range(3)]
    arrivals += [tuple(row.arrival_s for row in traces.of_pair(pair).rows) for pair in range(6)]
    assert len(set(arrivals)) == 9


def test_a_trace_that_has_no_windows_to_spare_for_tuning_is_refused():
    with pytest.raises(TraceError, match="200 requests, which are too few for 3 windows for tuning and one to be"):
        PairTraces(ComparePlan(trace="demo", limit=60, grid="g"))
