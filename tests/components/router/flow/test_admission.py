"""Who is let in: refusals by reason, what they say, and what is counted."""

from dataclasses import replace
from http import HTTPStatus

import pytest
from prometheus_client import CollectorRegistry

from ridgeline.contracts.workers import WorkerStatus
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.flow.admission import Admission
from ridgeline.router.flow.admission_rules import Ask, Refused, Snapshot, decide
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.placement_events import Happened, Leaves, Wants
from ridgeline.router.placement.pool_queue import RouterRequests
from tests.components.router.dispatch.test_orchestrator import FOREVER, Bench
from tests.support.clock import FakeClock
from tests.support.samples import router_settings

IDLE = Snapshot(
    state="open",
    block_size=32,
    answer_pool="decode",
    usable_answer_workers=2,
    answer_blocks=200,
    whole_answer_blocks=200,
    prompt_worker_blocks=100,
    answer_worker_blocks=100,
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
SMALL = Ask(1, 64, 16)


def refusal(ask=SMALL, limits=LIMITS, **now):
    with pytest.raises(Refused) as refused:
        decide(ask, replace(IDLE, **now), limits)
    return refused.value


def test_what_fits_is_let_in():
    decide(SMALL, IDLE, LIMITS)
    decide(Ask(10, 64, 16), IDLE, LIMITS)
    decide(Ask(1, 3200 - 16, 16), IDLE, LIMITS)
    decide(SMALL, replace(IDLE, sequences=9, prompt_blocks=198, prompt_wait_s=30.0), LIMITS)


@pytest.mark.parametrize(("state", "says"), [("draining", "shutting down"), ("not_ready", "not ready yet")])
def test_a_server_that_is_not_open_is_unavailable(state, says):
    refused = refusal(state=state)
    assert (refused.status, refused.reason) == (HTTPStatus.SERVICE_UNAVAILABLE, state)
    assert says in str(refused)


def test_without_a_worker_that_decodes_new_requests_are_refused():
    refused = refusal(usable_answer_workers=0)
    assert (refused.status, refused.reason) == (HTTPStatus.SERVICE_UNAVAILABLE, "no_worker")
    assert "no decode worker" in str(refused)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (Ask(1, 3201, 1), "the prompt (3201 tokens) take 101 KV blocks and the largest worker has 100"),
        (Ask(1, 3000, 201), "prompt and answer (3000 + 201 tokens) take 101 KV blocks"),
        (Ask(1, 64, 16, logprobs=250_001), "the answer may have 250001 log-probabilities"),
        (Ask(11, 5, 5), "n = 11 sequences can never be served at a time, the limit is 10 (router.max_concurrent"),
    ],
)
def test_what_can_never_fit_is_a_bad_request_at_once_even_under_overload(ask, says):
    refused = refusal(ask, sequences=10, prompt_wait_s=99.0)
    assert (refused.status, refused.reason) == (HTTPStatus.BAD_REQUEST, "too_large")
    assert says in str(refused)


@pytest.mark.parametrize(
    ("now", "reason", "retry_after_s", "says"),
    [
        ({"sequences": 10}, "overload", 1, "10 requests are being served, the limit is 10 (router.max_concurrent_req"),
        ({"sequences": 12, "sequences_per_s": 0.5}, "overload", 6, "try again in 6 s"),
        ({"prompt_wait_s": 42.3}, "prompt_wait", 13, "wait about 42 s to be started, the limit is 30 s (router.max_q"),
        ({"prompt_wait_s": 30.01}, "prompt_wait", 1, "try again in 1 s"),
        ({"prompt_wait_s": 1e6}, "prompt_wait", 60, "try again in 60 s"),
        ({"prompt_blocks": 199, "blocks_per_s": 0.25}, "kv_blocks", 4, "take 201 KV blocks, the decode pool has 200"),
    ],
)
def test_what_is_too_much_now_is_told_limit_value_setting_and_when_to_come_back(now, reason, retry_after_s, says):
    refused = refusal(**now)
    assert (refused.status, refused.reason) == (HTTPStatus.TOO_MANY_REQUESTS, reason)
    assert refused.retry_after_s == retry_after_s
    assert says in str(refused)


def test_n_sequences_whose_prompts_no_pool_could_hold_are_a_bad_request_on_an_idle_server_too():
    decide(Ask(6, 1000, 16), IDLE, LIMITS)
    refused = refusal(Ask(10, 1000, 16))
    assert (refused.status, refused.reason) == (HTTPStatus.BAD_REQUEST, "too_large")
    assert "n = 10 prompts take 320 KV blocks, and the decode pool has 200" in str(refused)


def test_the_first_request_of_an_idle_server_is_counted_like_any_other():
    assert (
        refusal(Ask(1, 3200 - 16, 16), whole_answer_blocks=98, answer_worker_blocks=100).status
        == HTTPStatus.BAD_REQUEST
    )


def test_every_sequence_of_a_request_counts():
    assert refusal(Ask(2, 64, 16), sequences=9).reason == "overload"
    assert refusal(Ask(2, 64, 16), prompt_blocks=197).reason == "kv_blocks"
    assert "the last of n = 2 prompts would wait about 42 s" in str(refusal(Ask(2, 64, 16), prompt_wait_s=42.3))


# --- one client beside others

SHARED = LIMITS.model_copy(update={"max_client_share": 0.75})


def test_one_client_alone_may_have_most_and_the_rest_is_for_those_who_come():
    decide(Ask(7, 64, 16), IDLE, SHARED)
    refused = refusal(SMALL, SHARED, sequences=7, client_sequences=7)
    assert (refused.status, refused.reason) == (HTTPStatus.TOO_MANY_REQUESTS, "client_share")
    assert "7 of your requests are being served and 0 of other clients; you may have 7" in str(refused)
    assert "router.max_client_share" in str(refused)
    decide(SMALL, replace(IDLE, sequences=7, client_sequences=0), SHARED)
    decide(SMALL, replace(IDLE, sequences=9, client_sequences=0), SHARED)
    assert refusal(SMALL, SHARED, sequences=9, client_sequences=1).reason == "client_share"


def test_more_sequences_than_one_client_ever_gets_are_a_bad_request():
    refused = refusal(Ask(8, 64, 16), SHARED)
    assert (refused.status, refused.reason) == (HTTPStatus.BAD_REQUEST, "too_large")
    assert "n = 8 sequences can never be served to one client at a time, 7 of the 10 can" in str(refused)


def test_kv_blocks_have_shares_too_and_whoever_has_nothing_may_take_what_is_left():
    held = {"sequences": 3, "client_sequences": 3, "prompt_blocks": 140, "client_blocks": 140}
    decide(Ask(1, 320, 16), replace(IDLE, **held), SHARED)
    refused = refusal(Ask(1, 352, 16), SHARED, **held)
    assert refused.reason == "client_share"
    assert "would take 151 KV blocks with this one; you may have 150 now, of 200" in str(refused)
    decide(Ask(1, 1920, 16), replace(IDLE, **held | {"client_sequences": 0, "client_blocks": 0}), SHARED)
    assert (
        refusal(Ask(2, 960, 16), SHARED, **held | {"client_sequences": 0, "client_blocks": 0}).reason == "client_share"
    )


def test_what_is_held_is_told_apart_by_client_and_given_back_sequence_by_sequence():
    router = Router(share=0.5)
    flood = router.admission.admit("flood", Ask(5, 8, 8))
    with pytest.raises(Refused, match="5 of your requests"):
        router.admission.check("flood", 1)
    polite = [router.admission.admit("polite", Ask(1, 8, 8)) for _ in range(2)]
    flood.sequence_ended()
    assert router.admission.sequences == 6
    with pytest.raises(Refused, match="4 of your requests are being served and 2 of other clients; you may have 4"):
        router.admission.admit("flood", Ask(1, 8, 8))
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
    with pytest.raises(Refused, match="you left 5 recently before they had ended; you may have 5 of both") as refused:
        router.admission.admit("churn", Ask(1, 8, 8))
    assert refused.value.reason == "client_share"
    router.admission.admit("polite", Ask(1, 8, 8)).release()
    router.clock.now_s += refused.value.retry_after_s
    router.admission.admit("churn", Ask(1, 8, 8)).sequence_ended(left=True)
    router.clock.now_s += 60
    router.admission.check("churn", 5)
    assert not router.admission._left, "nothing is kept of those who left long ago"


def test_what_has_ended_by_itself_does_not_count_as_left():
    router = Router(share=0.5)
    for _ in range(20):
        ticket = router.admission.admit("a", Ask(1, 8, 8))
        ticket.sequence_ended()
    router.admission.admit("a", Ask(5, 8, 8))


def test_what_was_forgotten_before_any_worker_heard_of_it_does_not_count_as_left():
    router = Router(share=0.5)
    for _ in range(5):
        router.admission.admit("a", Ask(5, 8, 8))


def test_with_shares_off_whoever_leaves_may_come_again_at_once():
    router = Router()
    for _ in range(5):
        ticket = router.admission.admit("a", Ask(10, 8, 8))
        for _ in range(10):
            ticket.sequence_ended(left=True)


def test_a_client_that_holds_its_share_is_told_so_before_its_body_is_read():
    router = Router(share=0.5)
    router.admission.check_share("a", 4)
    with pytest.raises(Refused, match="0 of your requests are being served"):
        router.admission.check_share("a", 5)
    tickets = [router.admission.admit("a", Ask(3, 8, 8))]
    router.admission.check_share("a", 1)
    with pytest.raises(Refused, match="you may have 5"):
        router.admission.check_share("a", 2)
    router.admission.check_share("b", 0)
    assert router.rejected("client_share") == 2
    router.bench.client("prefill").connected = router.bench.client("decode").connected = False
    router.admission.check_share("a", 2)  # nobody could serve it, which it is told later
    tickets.clear()


# --- what is counted


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


def test_tickets_count_until_they_are_released():
    router = Router()
    tickets = [router.admission.admit("a", SMALL) for _ in range(10)]
    with pytest.raises(Refused, match="10 requests are being served"):
        router.admission.admit("a", SMALL)
    with pytest.raises(Refused, match="10 requests are being served"):
        router.admission.check("a", 1)
    tickets[0].release()
    tickets[0].release()
    router.admission.check("a", 1)
    tickets.append(router.admission.admit("a", SMALL))
    with pytest.raises(Refused):
        router.admission.admit("a", SMALL)
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


def test_a_ticket_nobody_used_is_released_when_it_is_forgotten():
    router = Router()
    for _ in range(30):
        router.admission.admit("a", SMALL)
    router.admission.check("a", 10)


@pytest.mark.parametrize("look_every_s", [0.0, 60.0])
def test_prompts_that_would_fill_the_decode_pool_are_refused_until_some_have_ended(look_every_s):
    """Also those that were accepted since the last look at the workers."""
    router = Router(look_every_s=look_every_s)
    first = router.admission.admit("a", Ask(1, 3000, 16))
    with pytest.raises(Refused, match=r"take 111 KV blocks, the decode pool has 100"):
        router.admission.admit("a", Ask(1, 544, 16))
    router.clock.now_s += 1
    first.release()
    router.admission.admit("a", Ask(1, 544, 16))
    assert router.rejected("kv_blocks") == 1


async def test_a_client_is_refused_by_the_wait_it_would_have_itself_and_others_are_not():
    router = Router()
    router.prompt(0, "flood", 4000, computed_in_s=16.0)  # 250 tokens/s
    for number in range(1, 6):
        router.prompt(number, "flood", 2000)
    with pytest.raises(Refused, match="would wait about 40 s"):
        router.admission.check("flood", 1)
    with pytest.raises(Refused, match="would wait about 40 s"):
        router.admission.admit("flood", SMALL)
    router.admission.check("short", 1)
    router.admission.admit("short", SMALL)
    router.state.left(router.requests)
    router.admission.check("flood", 1)


async def test_a_request_of_n_sequences_is_refused_by_the_wait_of_the_last_of_its_prompts():
    router = Router()
    router.prompt(0, "a", 4000, computed_in_s=64.0)  # 62.5 tokens/s
    router.admission.admit("a", Ask(4, 600, 16))
    with pytest.raises(Refused, match="the last of n = 5 prompts would wait about 38 s"):
        router.admission.admit("a", Ask(5, 600, 16))


async def test_a_prompt_of_a_list_is_refused_by_the_wait_that_it_would_have_behind_the_list():
    router = Router()
    router.prompt(0, "a", 4000, computed_in_s=64.0)  # 62.5 tokens/s
    ask = Ask(1, 600, 16)
    for _ in range(4):
        ask = replace(ask, before=router.admission.admit("a", ask).accepted)
    with pytest.raises(Refused, match="the last of the first 5 prompts of the list would wait about 38 s"):
        router.admission.admit("a", ask)
    router.admission.admit("b", Ask(1, 600, 16))


def test_short_prompts_of_a_split_deployment_are_judged_by_the_pool_that_computes_them():
    router = Router(min_remote=71)
    router.queues["prefill"].wait_s = lambda client, tokens, prompts=1: 99.0
    router.queues["decode"].wait_s = lambda client, tokens, prompts=1: 1.0
    router.admission.check("a", 1)
    router.admission.admit("a", Ask(1, 70, 1))
    with pytest.raises(Refused, match="would wait about 99 s"):
        router.admission.admit("a", Ask(1, 71, 1))


def test_blocks_of_workers_that_are_away_are_not_given_away():
    router = Router(decode=[FOREVER], **{"decode-1": [FOREVER]})
    tickets = [router.admission.admit("a", Ask(1, 2400, 16)) for _ in range(2)]
    router.bench.fleet.get("decode-1").client.connected = False
    with pytest.raises(Refused, match="the decode pool has 100"):
        router.admission.admit("a", Ask(1, 2400, 16))
    tickets.pop()
    tickets.clear()
    router.admission.admit("a", Ask(1, 2400, 16))


def test_prompts_that_share_their_blocks_are_counted_by_what_workers_report():
    router = Router()
    worker = router.bench.fleet.get("decode-0")
    tickets = [router.admission.admit("a", Ask(1, 1600, 16))]
    with worker.reserve(promised_blocks=50, held_blocks=50) as first, worker.reserve(0, 50, 50) as second:
        tickets.append(router.admission.admit("a", Ask(1, 1600, 16)))
        with pytest.raises(Refused, match="take 110 KV blocks, the decode pool has 100"):
            router.admission.admit("a", Ask(1, 320, 16))
        for reservation in (first, second):
            reservation.prompt_done()
        worker.status = WorkerStatus(worker_id="decode-0", kv_blocks_free=49, kv_blocks_total=100)
        router.admission.admit("a", Ask(1, 1504, 16))
        with pytest.raises(Refused, match="take 101 KV blocks"):
            router.admission.admit("a", Ask(1, 1600, 16))


def test_without_a_decode_worker_new_requests_are_judged_by_the_prefill_workers_that_serve_them_whole():
    router = Router()
    router.bench.client("decode").connected = False
    router.admission.check("a", 1)
    router.queues["prefill"].wait_s = lambda client, tokens, prompts=1: 98.0
    with pytest.raises(Refused, match="would wait about 98 s"):
        router.admission.admit("a", Ask(1, 8, 8))


def test_without_any_worker_new_requests_are_refused_before_their_prompt_is_read():
    router = Router()
    router.bench.client("prefill").connected = router.bench.client("decode").connected = False
    with pytest.raises(Refused, match="no decode worker"):
        router.admission.check("a", 1)
    assert router.rejected("no_worker") == 1


def test_without_a_prefill_worker_prompts_are_judged_by_the_pool_that_computes_them_then():
    router = Router(min_remote=71)
    router.queues["prefill"].wait_s = lambda client, tokens, prompts=1: 99.0
    router.queues["decode"].wait_s = lambda client, tokens, prompts=1: 1.0
    router.bench.client("prefill").connected = False
    router.admission.admit("a", Ask(1, 71, 1))
    router.queues["decode"].wait_s = lambda client, tokens, prompts=1: 98.0
    with pytest.raises(Refused, match="would wait about 98 s"):
        router.admission.admit("a", Ask(1, 71, 1))


def test_without_a_prefill_worker_requests_are_taken_in_and_wait():
    router = Router()
    router.bench.client("prefill").connected = False
    router.admission.admit("a", SMALL)
