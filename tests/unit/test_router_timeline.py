"""What one request's record says, with a clock that stands still until told."""

import pytest
from fake_engine import FakeClock

from engine.messages import LegTiming
from kv_transfer.handoff import FetchReceipt
from router.timeline import RequestTimeline, token_pool


@pytest.fixture
def clock():
    return FakeClock()


def timeline_of(clock, *gaps_and_counts, path="local"):
    """A request whose deltas of `count` tokens come `gap` seconds after what came before."""
    timeline = RequestTimeline(clock, "r", 70, path=path)
    for gap_s, count in gaps_and_counts:
        clock.now_s += gap_s
        timeline.tokens(count)
    return timeline


def test_latencies_follow_vllms_definitions(clock):
    timeline = timeline_of(clock, (0.5, 1), (0.25, 1), (0.125, 1), (0.125, 1))
    assert timeline.ttft_s == 0.5
    assert timeline.second_token_s == 0.25
    assert timeline.itls_s == [0.25, 0.125, 0.125]
    assert timeline.tpot_s == 0.5 / 3  # (latency - TTFT) / (output tokens - 1)


def test_tpot_counts_tokens_and_not_deltas(clock):
    timeline = timeline_of(clock, (1, 1), (1, 4))
    assert timeline.tpot_s == 1 / 4
    assert timeline.itls_s == [1]


def test_a_delta_without_tokens_is_no_first_token(clock):
    timeline = timeline_of(clock, (0.5, 0), (0.5, 1), (0.25, 1))
    assert timeline.ttft_s == 1.0
    assert timeline.num_output_tokens == 2


def test_what_did_not_happen_is_absent(clock):
    none, one = timeline_of(clock), timeline_of(clock, (0.5, 1))
    assert (none.ttft_s, none.second_token_s, none.tpot_s, none.itls_s) == (None, None, None, [])
    assert (one.ttft_s, one.second_token_s, one.tpot_s, one.itls_s) == (0.5, None, None, [])


def test_the_stages_of_both_legs_are_joined(clock):
    timeline = timeline_of(clock, (1, 1), (1, 1), path="disaggregated")
    timeline.prefill_timing = LegTiming(queue_s=0.25, first_token_s=0.5, compute_s=0.5)
    receipt = FetchReceipt(outcome="ok", wait_s=0.0625, wire_s=0.125)
    timeline.decode_timing = LegTiming(queue_s=0.5, first_token_s=0.5, compute_s=1.0, receipt=receipt)
    assert timeline.stages_s() == {
        "queue": 0.25,
        "prefill": 0.5,
        "handoff_wait": 0.0625,
        "wire": 0.125,
        "decode_queue": 0.5 - 0.0625 - 0.125,
        "decode": 1.0,
    }


def test_a_request_that_ended_at_prefill_has_no_decode_stages(clock):
    timeline = timeline_of(clock, (1, 1), path="disaggregated")
    timeline.prefill_timing = LegTiming(queue_s=0.25, first_token_s=0.5, compute_s=0.5)
    assert set(timeline.stages_s()) == {"queue", "prefill"}
    assert timeline_of(clock, path="disaggregated").stages_s() == {}


def test_the_decode_queue_is_never_negative(clock):
    timeline = timeline_of(clock, (1, 1), path="disaggregated")
    receipt = FetchReceipt(outcome="ok", wait_s=0.25, wire_s=0.25)
    timeline.decode_timing = LegTiming(queue_s=0.25, first_token_s=0.5, compute_s=1.0, receipt=receipt)
    assert timeline.stages_s()["decode_queue"] == 0.0


@pytest.mark.parametrize("path", ["local", "ineligible"])
def test_a_replicas_stages_are_split_at_the_first_token(clock, path):
    timeline = timeline_of(clock, (1.0, 1), (2.0, 1), path=path)
    timeline.decode_timing = LegTiming(queue_s=0.25, first_token_s=0.75, compute_s=2.75)
    assert timeline.stages_s() == {"queue": 0.25, "prefill": 0.75, "decode": 2.0}
    assert sum(timeline.stages_s().values()) == 3.0


def test_a_replica_that_reported_no_times_has_no_stages(clock):
    assert timeline_of(clock, (1, 1)).stages_s() == {}


@pytest.mark.parametrize(
    ("path", "mode", "pools"),
    [
        ("disaggregated", "disaggregated", ("prefill", "decode")),
        ("local", "disaggregated", ("decode", "decode")),
        ("ineligible", "disaggregated", ("decode", "decode")),
        ("local", "colocated", ("colocated", "colocated")),
    ],
)
def test_tokens_are_credited_to_the_pool_that_made_them(path, mode, pools):
    assert token_pool(path, mode) == pools


@pytest.mark.parametrize("path", ["disaggregated", "local"])
def test_the_wait_in_the_router_belongs_to_the_queue_and_not_to_prefill(clock, path):
    timeline = timeline_of(clock, (10.0, 1), (1, 1), path=path)
    timeline.router_queue_s = 9.0
    timeline.prefill_timing = LegTiming(queue_s=0.25, first_token_s=0.75, compute_s=0.75)
    timeline.decode_timing = LegTiming(queue_s=0.25, first_token_s=0.75, compute_s=1.75)
    stages = timeline.stages_s()
    assert (stages["queue"], stages["prefill"]) == (9.25, 0.75)
