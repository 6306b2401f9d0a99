"""What one request's record says, with a clock that stands still until told."""

import pytest

from ridgeline.contracts.handoff import TransferResult
from ridgeline.contracts.tasks import LegTiming
from ridgeline.router.observe.timeline import LegWorker, RequestTimeline
from tests.support.clock import FakeClock
from tests.support.ended_requests import DECODE, PREFILL, handed_over


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def seen():
    """(latency, pool, seconds) of all that was observed."""
    return []


def timeline_of(clock, *gaps_and_counts, path="fallback", seen=None, pool="decode", head_read_s=None):
    """A request whose deltas of `count` tokens come `gap` seconds after what came before."""
    observe = (lambda *latency: None) if seen is None else (lambda *latency: seen.append(latency))
    timeline = RequestTimeline(clock, "r", 70, path=path, observe=observe, head_read_s=head_read_s)
    for gap_s, count in gaps_and_counts:
        clock.now_s += gap_s
        timeline.tokens(count, pool)
    return timeline


def test_latencies_follow_vllms_definitions(clock, seen):
    timeline = timeline_of(clock, (0.5, 1), (0.25, 1), (0.125, 1), (0.125, 1), seen=seen)
    assert seen == [
        ("ttft", "decode", 0.5),
        ("second_token", "decode", 0.25),
        ("itl", "decode", 0.25),
        ("itl", "decode", 0.125),
        ("itl", "decode", 0.125),
    ]
    assert timeline.tpot_s == 0.5 / 3  # (latency - TTFT) / (output tokens - 1)


def test_each_latency_is_told_in_the_moment_it_is_known(clock, seen):
    timeline = timeline_of(clock, (0.5, 1), seen=seen)
    assert [latency for latency, _, _ in seen] == ["ttft"]
    timeline.tokens(1, "decode")
    assert [latency for latency, _, _ in seen] == ["ttft", "second_token", "itl"]
    timeline.tokens(1, "decode")
    assert [latency for latency, _, _ in seen] == ["ttft", "second_token", "itl", "itl"]


def test_tpot_counts_tokens_and_itl_deltas(clock, seen):
    timeline = timeline_of(clock, (1, 1), (1, 4), seen=seen)
    assert timeline.tpot_s == 1 / 4
    assert [seconds for latency, _, seconds in seen if latency == "itl"] == [1]


def test_a_delta_without_tokens_is_no_first_token(clock, seen):
    timeline = timeline_of(clock, (0.5, 0), (0.5, 1), (0.25, 1), seen=seen)
    assert seen[0] == ("ttft", "decode", 1.0)
    assert timeline.num_output_tokens == 2


def test_what_did_not_happen_is_absent(clock, seen):
    assert timeline_of(clock, seen=seen).tpot_s is None
    assert seen == []
    assert timeline_of(clock, (0.5, 1), seen=seen).tpot_s is None
    assert seen == [("ttft", "decode", 0.5)]


def test_a_request_arrives_when_its_head_was_read_and_not_when_it_is_tokenised(clock, seen):
    timeline_of(clock, (0.5, 1), (1, 1), seen=seen, head_read_s=clock.now_s - 2.0)
    assert seen[0] == ("ttft", "decode", 2.5)


def test_tokens_are_credited_to_the_pool_that_made_them(clock, seen):
    timeline = timeline_of(clock, (1, 1), seen=seen, pool="prefill", path="disaggregated")
    timeline.tokens(1, "decode")
    timeline.path = "fallback"  # what it becomes later changes nothing
    assert [(latency, pool) for latency, pool, _ in seen] == [
        ("ttft", "prefill"),
        ("second_token", "decode"),
        ("itl", "decode"),
    ]
    assert timeline.last_pool == "decode"


# --- the stages on the router's clock


def laid_out(stages):
    """(name, duration) of the stages, after a look that each begins where the one before it ends."""
    ends_s = [stage.start_s + stage.duration_s for stage in stages]
    assert [stage.start_s for stage in stages] == pytest.approx([0.0, *ends_s[:-1]])
    return [(stage.name, stage.duration_s) for stage in stages]


def test_the_stages_of_both_legs_add_up_to_the_latency_and_what_no_worker_counts_is_transit():
    assert laid_out(handed_over().ended("finished")) == [
        ("preprocess", 0.125),
        ("queue", 0.25),
        ("dispatch", 0.125),
        ("engine_queue", 0.25),
        ("prefill", 0.5),
        ("dispatch", 0.125),
        ("handoff_wait", 0.125),
        ("wire", 0.25),
        ("decode_queue", 0.375),
        ("decode", 1.25),
    ]


COLOCATED = LegWorker("colocated", "worker-0")
TIMING = LegTiming(queue_s=0.25, first_token_s=0.5, compute_s=1.0)


def fetched(queue_s, **result):
    return LegTiming(queue_s=queue_s, first_token_s=0.5, compute_s=1.0, transfer_result=TransferResult(**result))


@pytest.mark.parametrize(
    ("workers", "prefill", "decode", "expected"),
    [
        pytest.param(
            (COLOCATED,),
            None,
            TIMING,
            [("dispatch", 1.75), ("engine_queue", 0.25), ("prefill", 0.5), ("decode", 0.5)],
            id="one worker for all",
        ),
        pytest.param((COLOCATED,), None, None, [("unreported", 3.0)], id="cut off before it told its times"),
        pytest.param((PREFILL, DECODE), None, None, [("unreported", 3.0)], id="cut off during prefill"),
        pytest.param(
            (PREFILL, DECODE),
            TIMING,
            None,
            [("prefill", 1.0), ("unreported", 2.0)],
            id="cut off during decode; a worker that counts more than its leg took is cut at the front",
        ),
        pytest.param(
            (PREFILL, DECODE),
            LegTiming(queue_s=0.0, first_token_s=1.0, compute_s=1.0),
            fetched(1.75, outcome="ok", wait_s=1.5, wire_s=0.25),
            [("prefill", 1.0), ("handoff_wait", 0.75), ("wire", 0.25), ("decode", 1.0)],
            id="fetched during prefill",
        ),
        pytest.param(
            (PREFILL, DECODE),
            LegTiming(queue_s=0.0, first_token_s=1.0, compute_s=1.0),
            fetched(0.75, outcome="failed", reason="timeout", wait_s=0.75),
            [("prefill", 1.0), ("dispatch", 0.25), ("handoff_wait", 0.75), ("prefill", 0.5), ("decode", 0.5)],
            id="decode computed the prompt after a failed fetch",
        ),
    ],
)
def test_each_leg_is_laid_out_so_that_it_ends_when_the_router_saw_it_end(clock, workers, prefill, decode, expected):
    timeline = RequestTimeline(clock, "r", 70, path="disaggregated")
    timeline.placed(*workers)
    clock.now_s += 1.0
    if prefill is not None:
        timeline.prompt_reported(prefill)
        timeline.link = "worker-0", "worker-1"
    timeline.tokens(1, "decode")
    clock.now_s += 2.0
    timeline.tokens(1, "decode")
    timeline.decode_reported(decode)
    if decode is not None:
        clock.now_s += 5.0  # what follows its last token is not its client's wait
    assert laid_out(timeline.ended("finished" if decode else "cancelled")) == expected


def test_an_answer_of_one_token_ends_with_its_prefill(clock):
    timeline = RequestTimeline(clock, "r", 70, path="disaggregated")
    timeline.placed(PREFILL, DECODE)
    clock.now_s += 1.0
    timeline.prompt_reported(LegTiming(queue_s=0.25, first_token_s=0.5, compute_s=0.5))
    clock.now_s += 0.25
    timeline.tokens(1, "prefill")
    assert laid_out(timeline.ended("finished")) == [("dispatch", 0.5), ("engine_queue", 0.25), ("prefill", 0.5)]


def test_what_was_lost_with_a_worker_and_the_next_wait_are_stages(clock):
    timeline = RequestTimeline(clock, "r", 70, path="disaggregated")
    clock.now_s += 1.0
    timeline.interrupted("queued")  # no worker was there
    clock.now_s += 1.0
    timeline.placed(PREFILL, DECODE)
    clock.now_s += 2.0
    timeline.interrupted("prefilling")
    clock.now_s += 3.0
    timeline.placed(PREFILL, DECODE)
    clock.now_s += 1.0
    timeline.prompt_reported(TIMING)
    timeline.link = "worker-0", "worker-1"
    clock.now_s += 0.5
    timeline.interrupted("handoff")
    clock.now_s += 1.0
    stages = timeline.ended("cancelled")
    lost = [("queue", 2.0), ("lost", 2.0), ("queue", 3.0), ("prefill", 1.0), ("lost", 0.5), ("queue", 1.0)]
    assert laid_out(stages) == lost
    assert [stage.worker for stage in stages if stage.name == "lost"] == ["worker-0", "worker-1"]
