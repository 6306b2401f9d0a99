"""Who is let in: refusals by reason, what they name, and what is counted."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from ridgeline.contracts.workers import WorkerStatus
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.flow.admission import Admission
from ridgeline.router.flow.admission_rules import Ask, ListSoFar, Refused, Snapshot, WorkerTotals, decide
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.placement_events import Happened, Leaves, Wants
from ridgeline.router.placement.pool_queue import RouterRequests
from tests.components.router.dispatch.test_orchestrator import FOREVER, Bench
from tests.support.clock import FakeClock
from tests.support.samples import router_settings

IDLE = Snapshot(
    state="open",
    answer_pool="decode",
    workers=WorkerTotals(32, 2, usable_blocks=200, all_blocks=200, largest_blocks=100, largest_prompt_blocks=100),
    sequences=0,
    client_sequences=0,
    prompt_blocks=0,
    client_blocks=0,
    client_left=0,
    sequences_per_s=0.0,
    blocks_per_s=0.0,
    prompt_wait_s=None,
)
LIMITS = router_settings(max_concurrent_requests=10, max_queue_time_s=30.0).router
SHARED = LIMITS.model_copy(update={"max_client_share": 0.75})
SMALL, TWO = Ask(1, 64, 16), Ask(2, 64, 16)
HOLDS = {"sequences": 3, "client_sequences": 3, "prompt_blocks": 140, "client_blocks": 140}
OTHERS_HOLD = HOLDS | {"client_sequences": 0, "client_blocks": 0}
FULL = {"sequences": 10, "prompt_wait_s": 99.0}


def one(identity, ask, now, reason, *named, status=429, retry_after_s=1, limits=LIMITS):
    return pytest.param(ask, now, limits, (status, reason, retry_after_s), named, id=identity)


@pytest.mark.parametrize(
    ("ask", "now", "limits", "expected", "named"),
    [
        one("the server ends", SMALL, {"state": "draining"}, "draining", status=503),
        one("it begins", SMALL, {"state": "not_ready"}, "not_ready", status=503),
        one("no worker decodes", SMALL, {"workers": WorkerTotals()}, "no_worker", "decode", status=503),
        one("a long prompt", Ask(1, 3201, 1), FULL, "too_large", "kv_cache_memory_bytes", "101", "100", status=400),
        one("a long answer", Ask(1, 3000, 201), FULL, "too_large", "max_tokens", "101", status=400),
        one(
            "log-probabilities",
            Ask(1, 64, 16, logprobs=250_001),
            FULL,
            "too_large",
            "router.max_logprobs_per_request",
            status=400,
        ),
        one("n", Ask(11, 5, 5), FULL, "too_large", "n = 11", "router.max_concurrent_requests", status=400),
        one("n for one client", Ask(8, 64, 16), {}, "too_large", "router.max_client_share", status=400, limits=SHARED),
        one("n prompts", Ask(10, 1000, 16), {}, "too_large", "n = 10", "320", "workers", status=400),
        one(
            "log-probabilities of a list",
            Ask(1, 64, 16, logprobs=50_001, before=ListSoFar(2, 128, 4, 200_000)),
            {},
            "too_large",
            "router.max_logprobs_per_request",
            status=400,
        ),
        one("a list", Ask(1, 64, 16, before=ListSoFar(10, 640, 20)), {}, "too_large", "list", status=400),
        one("KV of a list", Ask(1, 3200, 0, before=ListSoFar(1, 3232, 101)), {}, "too_large", "201", status=400),
        one("requests", SMALL, {"sequences": 10}, "overload", "router.max_concurrent_requests"),
        one("requests that end", SMALL, {"sequences": 12, "sequences_per_s": 0.5}, "overload", retry_after_s=6),
        one("every sequence counts", TWO, {"sequences": 9}, "overload"),
        one("a wait", SMALL, {"prompt_wait_s": 42.3}, "prompt_wait", "42", "router.max_queue_time_s", retry_after_s=13),
        one("a wait just too long", SMALL, {"prompt_wait_s": 30.01}, "prompt_wait"),
        one("a very long one", SMALL, {"prompt_wait_s": 1e6}, "prompt_wait", retry_after_s=60),
        one("the wait of the last of n", TWO, {"prompt_wait_s": 42.3}, "prompt_wait", "n = 2", retry_after_s=13),
        one("KV", SMALL, {"prompt_blocks": 199, "blocks_per_s": 0.25}, "kv_blocks", "201", "200", retry_after_s=4),
        one("KV of every sequence", TWO, {"prompt_blocks": 197}, "kv_blocks"),
        one(
            "its share",
            SMALL,
            {"sequences": 7, "client_sequences": 7},
            "client_share",
            "router.max_client_share",
            limits=SHARED,
        ),
        one("its share of the rest", SMALL, {"sequences": 9, "client_sequences": 1}, "client_share", limits=SHARED),
        one("its share of KV", Ask(1, 352, 16), HOLDS, "client_share", "151", "150", limits=SHARED),
        one("n prompts of a newcomer", Ask(2, 960, 16), OTHERS_HOLD, "client_share", limits=SHARED),
    ],
)
def test_a_refusal_has_status_and_reason_and_names_the_setting(ask, now, limits, expected, named):
    with pytest.raises(Refused) as refused:
        decide(ask, replace(IDLE, **now), limits)
    assert (refused.value.status, refused.value.reason, refused.value.retry_after_s) == expected
    assert [word for word in named if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("ask", "now", "limits"),
    [
        pytest.param(SMALL, {}, LIMITS, id="an idle server"),
        pytest.param(Ask(10, 64, 16), {}, LIMITS, id="all places"),
        pytest.param(Ask(1, 3200 - 16, 16), {}, LIMITS, id="the largest worker"),
        pytest.param(Ask(6, 1000, 16), {}, LIMITS, id="the pool"),
        pytest.param(SMALL, {"sequences": 9, "prompt_blocks": 198, "prompt_wait_s": 30.0}, LIMITS, id="at all limits"),
        pytest.param(Ask(7, 64, 16), {}, SHARED, id="one client alone"),
        pytest.param(SMALL, {"sequences": 9, "client_sequences": 0}, SHARED, id="a newcomer"),
        pytest.param(Ask(1, 320, 16), HOLDS, SHARED, id="its share of KV"),
        pytest.param(Ask(1, 1920, 16), OTHERS_HOLD, SHARED, id="one prompt of a newcomer, whatever it takes"),
    ],
)
def test_what_fits_is_let_in(ask, now, limits):
    decide(ask, replace(IDLE, **now), limits)


# --- one client beside others


def test_what_is_held_is_told_apart_by_client_and_given_back_sequence_by_sequence():
    router = Router(share=0.5)
    flood = router.admission.admit("flood", Ask(5, 8, 8))
    refused(router.admission.check, "flood", 1, reason="client_share")
    polite = [router.admission.admit("polite", Ask(1, 8, 8)) for _ in range(2)]
    flood.sequence_ended()
    assert router.admission.sequences == 6
    refused(router.admission.admit, "flood", Ask(1, 8, 8), reason="client_share")
    polite.clear()
    router.admission.admit("flood", Ask(1, 8, 8))
    flood.release()
    flood.sequence_ended()
    assert router.admission.sequences == 0
    assert router.rejected("client_share") == 2


def test_what_a_client_leaves_before_its_end_counts_against_its_share_for_a_while():
    router = Router(share=0.5)
    left = router.admission.admit("churn", Ask(5, 8, 8))
    for _ in range(5):
        left.sequence_ended(left=True)
    after_s = refused(router.admission.admit, "churn", Ask(1, 8, 8), reason="client_share").retry_after_s
    router.admission.admit("polite", Ask(1, 8, 8)).release()
    router.clock.now_s += after_s
    router.admission.admit("churn", Ask(1, 8, 8)).sequence_ended(left=True)
    router.clock.now_s += 60
    router.admission.check("churn", 5)
    assert not router.admission._left, "nothing is kept of those who left long ago"


@pytest.mark.parametrize(
    ("share", "left"),
    [
        pytest.param(0.5, False, id="it has ended by itself"),
        pytest.param(0.5, None, id="it was forgotten before any worker heard of it"),
        pytest.param(1.0, True, id="shares are off"),
    ],
)
def test_what_does_not_count_as_left(share, left):
    router = Router(share=share)
    for _ in range(5):
        ticket = router.admission.admit("a", Ask(5, 8, 8))
        for _ in range(0 if left is None else 5):
            ticket.sequence_ended(left=left)
        del ticket


def test_a_client_that_holds_its_share_is_told_so_before_its_body_is_read():
    router = Router(share=0.5)
    router.admission.check_share("a", 4)
    refused(router.admission.check_share, "a", 5, reason="client_share")
    tickets = [router.admission.admit("a", Ask(3, 8, 8))]
    router.admission.check_share("a", 1)
    refused(router.admission.check_share, "a", 2, reason="client_share")
    router.admission.check_share("b", 0)
    assert router.rejected("client_share") == 2
    router.bench.client("prefill").connected = router.bench.client("decode").connected = False
    router.admission.check_share("a", 2)  # nobody could serve it, which it is told later
    tickets.clear()


# --- what is counted


def refused(ask, *arguments, reason):
    with pytest.raises(Refused) as error:
        ask(*arguments)
    assert error.value.reason == reason
    return error.value


class Router:
    """Admission over fake workers."""

    def __init__(self, share=1.0, look_every_s=0.0, **bench):
        self.bench = Bench(**{"prefill": [FOREVER], "decode": [FOREVER]} | bench)
        self.clock = FakeClock()
        self.registry = CollectorRegistry()
        settings = router_settings(self.bench.settings, recovery_timeout_s=60.0, max_client_share=share)
        self.state = ClusterState(self.bench.fleet, settings, clock=self.clock)
        self.queues = self.state.queues
        self.requests = RouterRequests(lambda answer: None)
        metrics = RequestMetrics(self.registry)
        self.admission = Admission(
            settings, self.queues, self.bench.fleet, metrics, self.clock, look_every_s=look_every_s
        )
        self.admission.state = "open"

    def prompt(self, number, client, tokens, computed_in_s=None):
        self.state.apply(self.requests, Wants(number, Demand(tokens, client=client)))
        if computed_in_s is not None:
            self.clock.now_s += computed_in_s
            self.state.apply(self.requests, Happened(number, "prompt_done"))
            self.state.apply(self.requests, Leaves(number))

    def rejected(self, reason):
        return self.registry.get_sample_value("ridgeline_rejected_total", {"reason": reason})


def test_tickets_count_until_they_are_released_or_forgotten():
    router = Router()
    for _ in range(30):
        router.admission.admit("a", SMALL)  # nobody keeps these
    tickets = [router.admission.admit("a", SMALL) for _ in range(10)]
    refused(router.admission.admit, "a", SMALL, reason="overload")
    refused(router.admission.check, "a", 1, reason="overload")
    tickets[0].release()
    tickets[0].release()
    router.admission.check("a", 1)
    tickets.append(router.admission.admit("a", SMALL))
    refused(router.admission.admit, "a", SMALL, reason="overload")
    assert router.rejected("overload") == 3


def test_however_many_requests_come_at_a_moment_the_workers_are_looked_at_once(monkeypatch):
    router, free, read = Router(look_every_s=0.02), Worker.kv_blocks_free, []
    monkeypatch.setattr(Worker, "kv_blocks_free", property(lambda one: read.append(one) or free.fget(one)))
    for _ in range(10):
        router.admission.check("a", 1)
        router.admission.admit("a", SMALL).release()
    assert len(read) == 1, "there is one decode worker"
    router.clock.now_s += 0.03
    router.admission.check("a", 1)
    assert len(read) == 2


@pytest.mark.parametrize("look_every_s", [0.0, 60.0])
def test_prompts_that_would_fill_the_decode_pool_are_refused_until_some_have_ended(look_every_s):
    """Also those that were accepted since the last look at the workers."""
    router = Router(look_every_s=look_every_s)
    first = router.admission.admit("a", Ask(1, 3000, 16))
    refused(router.admission.admit, "a", Ask(1, 544, 16), reason="kv_blocks")
    router.clock.now_s += 1
    first.release()
    router.admission.admit("a", Ask(1, 544, 16))
    assert router.rejected("kv_blocks") == 1


async def test_a_client_is_refused_by_the_wait_it_would_have_itself_and_others_are_not():
    router = Router()
    router.prompt(0, "flood", 4000, computed_in_s=16.0)  # 250 tokens/s
    for number in range(1, 6):
        router.prompt(number, "flood", 2000)
    assert refused(router.admission.check, "flood", 1, reason="prompt_wait").retry_after_s == 10
    refused(router.admission.admit, "flood", SMALL, reason="prompt_wait")
    router.admission.check("short", 1)
    router.admission.admit("short", SMALL)
    router.state.left(router.requests)
    router.admission.check("flood", 1)


async def test_n_sequences_or_a_list_are_refused_by_the_wait_of_the_last_of_their_prompts():
    router = Router()
    router.prompt(0, "a", 4000, computed_in_s=64.0)  # 62.5 tokens/s
    router.admission.admit("a", Ask(4, 600, 16))
    assert "n = 5" in str(refused(router.admission.admit, "a", Ask(5, 600, 16), reason="prompt_wait"))
    so_far = ListSoFar()
    for _ in range(4):
        so_far = router.admission.admit("a", Ask(1, 600, 16, before=so_far)).list_so_far
    assert "list" in str(refused(router.admission.admit, "a", Ask(1, 600, 16, before=so_far), reason="prompt_wait"))
    router.admission.admit("b", Ask(1, 600, 16))


@pytest.mark.parametrize(
    ("lost", "tokens", "waits"),
    [
        pytest.param((), 70, "decode", id="a short one is computed where it is answered"),
        pytest.param((), 71, "prefill", id="others are not"),
        pytest.param(("prefill",), 71, "decode", id="unless nobody else is there"),
        pytest.param(("decode",), 8, "prefill", id="or nobody who answers"),
    ],
)
def test_a_prompt_is_judged_by_the_pool_that_would_compute_it(lost, tokens, waits):
    router = Router(min_remote=71)
    for pool in lost:
        router.bench.client(pool).connected = False
    for pool, queue in router.queues.items():
        queue.wait_s = lambda client, tokens, before=0, pool=pool: 98.0 if pool == waits else 1.0
    refused(router.admission.admit, "a", Ask(1, tokens, 1), reason="prompt_wait")
    router.queues[waits].wait_s = lambda client, tokens, before=0: 1.0
    router.admission.admit("a", Ask(1, tokens, 1))
    router.admission.check("a", 1)


def test_blocks_of_workers_that_are_away_are_not_given_away():
    router = Router(decode=[FOREVER], **{"decode-1": [FOREVER]})
    tickets = [router.admission.admit("a", Ask(1, 2400, 16)) for _ in range(2)]
    router.bench.fleet.get("decode-1").client.connected = False
    refused(router.admission.admit, "a", Ask(1, 2400, 16), reason="kv_blocks")
    tickets.pop()
    tickets.clear()
    router.admission.admit("a", Ask(1, 2400, 16))


def test_prompts_that_share_their_blocks_are_counted_by_what_workers_report():
    router = Router()
    worker = router.bench.fleet.get("decode-0")
    tickets = [router.admission.admit("a", Ask(1, 1600, 16))]
    with worker.reserve(promised_blocks=50, held_blocks=50) as first, worker.reserve(0, 50, 50) as second:
        tickets.append(router.admission.admit("a", Ask(1, 1600, 16)))
        refused(router.admission.admit, "a", Ask(1, 320, 16), reason="kv_blocks")
        for reservation in (first, second):
            reservation.prompt_done()
        worker.status = WorkerStatus(worker_id="decode-0", kv_blocks_free=49, kv_blocks_total=100)
        router.admission.admit("a", Ask(1, 1504, 16))
        refused(router.admission.admit, "a", Ask(1, 1600, 16), reason="kv_blocks")


def test_without_any_worker_new_requests_are_refused_before_their_prompt_is_read():
    router = Router()
    router.bench.client("prefill").connected = router.bench.client("decode").connected = False
    refused(router.admission.check, "a", 1, reason="no_worker")
    assert router.rejected("no_worker") == 1
