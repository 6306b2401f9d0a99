"""The connector's scheduler side, driven by the call sequences that vLLM's scheduler was seen to make.

A prompt of 70 tokens in blocks of 32: three blocks.
"""

import re
from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from ridgeline.contracts.handoff import KvHandoff, TransferResult
from ridgeline.engine.connector import scheduler_side
from ridgeline.engine.connector.accounting import StepAccountant
from ridgeline.engine.connector.chunks import MOST_PARTIAL
from ridgeline.engine.connector.groups import CacheGroups
from ridgeline.engine.connector.kv_connector import RidgelineConnector
from ridgeline.engine.connector.messages import (
    FIRST_TOKEN_FOLLOWS,
    CounterStats,
    Endpoint,
    TransferResults,
    join_results,
)
from ridgeline.engine.connector.scheduler_side import IDLE_WAIT_S, POLL_S, STUCK_S, SchedulerSide
from ridgeline.prefill_worker.kv_source.grpc_source import MAX_CONCURRENT_FETCHES
from ridgeline.roofline.cost import StepCostModel
from ridgeline.roofline.model_shape import load_model_shape
from tests.support.clock import FakeClock
from tests.support.samples import LAYOUT, make_handoff

MODEL = StepCostModel(load_model_shape("smollm2-135m"))
HANDOFF = make_handoff()
VOCABULARY_TOKENS = 50
FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)
GROUPS = CacheGroups(KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], FULL)]))
NO_CACHED = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
IDLE = SimpleNamespace(
    scheduled_spec_decode_tokens={},
    total_num_scheduled_tokens=0,
    num_scheduled_tokens={},
    scheduled_new_reqs=[],
    scheduled_cached_reqs=NO_CACHED,
    preempted_req_ids=None,
)
OK = TransferResult(outcome="ok", num_bytes=6144, wait_s=0.01, wire_s=0.02)
TIMED_OUT = TransferResult(outcome="failed", reason="timeout")
CANCELLED = TransferResult(outcome="cancelled", reason="cancelled")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def side(clock):
    side = SchedulerSide(
        groups=GROUPS,
        lease_s=30.0,
        vocabulary_tokens=VOCABULARY_TOKENS,
        accountant=StepAccountant(MODEL),
        clock=clock,
    )
    side.set_xfer_handshake_metadata({0: Endpoint("127.0.0.1:7001", LAYOUT.compatibility_hash(), 100, 2048)})
    return side


def a_request(request_id="r", prompt=70, **params):
    if params.get("do_remote_decode"):
        params.setdefault("handoff_id", f"handoff-{request_id}")
    return SimpleNamespace(
        request_id=request_id,
        num_prompt_tokens=prompt,
        num_computed_tokens=0,
        output_token_ids=[7],
        kv_transfer_params=params or None,
        status=RequestStatus.WAITING,
        skip_reading_prefix_cache=False,
    )


def a_fetching_request(request_id="r", prompt=71, handoff=HANDOFF):
    return a_request(request_id, prompt, do_remote_prefill=True, handoff=handoff.to_params())


def blocks(*ids, cached=0):
    """A request's only block table, whose first blocks were found in the prefix cache."""
    table = [KVCacheBlock(block_id) for block_id in ids]
    for block in table[:cached]:
        block.set_block_hash(BlockHashWithGroupId(b""), 32)
    return KVCacheBlocks((table,))


def start_fetch(side, request, *ids):
    side.on_new_request(request)
    external, _ = side.get_num_new_matched_tokens(request, 0)
    side.update_state_after_alloc(request, blocks(*(ids or (1, 2, 3))), external)
    return side.build_connector_meta(IDLE)


def report(side, results=None, step=None, **ids):
    told = results is not None or step is not None
    output = KVConnectorOutput(**ids, kv_connector_worker_meta=TransferResults(results or {}, step) if told else None)
    side.update_connector_output(output)
    return output


def end(side, request, status=RequestStatus.FINISHED_ABORTED, block_ids=()):
    request.status = status
    return side.request_finished_all_groups(request, (list(block_ids),))


def recomputes(side):
    return {name.split(".")[1]: int(n) for name, n in side.counters.items() if name.startswith("recompute_total.")}


def test_the_hooks_named_in_the_order_of_calls_are_methods_under_vllms_own_names():
    _, order = scheduler_side.__doc__.split("Order of calls in one step:")
    hooks = re.findall(r"`(\w+)`", order)
    assert len(hooks) == 6
    for hook in hooks:
        assert all(hook in vars(owner) for owner in (RidgelineConnector, SchedulerSide)), hook
        assert hook in vars(KVConnectorBase_V1) or hook in vars(SupportsHMA), hook


# --- (a) the producer


def test_a_prefill_that_ends_at_its_one_token_publishes_its_blocks_and_keeps_them(side):
    request = a_request(do_remote_decode=True)
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    side.update_state_after_alloc(request, blocks(1, 2, 3), 0)
    keep, told = end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3])
    assert keep is True
    handoff = KvHandoff.from_params(told["handoff"])
    assert (handoff.num_blocks, handoff.num_tokens, handoff.num_bytes) == (3, 70, 3 * 2048)
    assert (handoff.addresses, handoff.lease_s) == (("127.0.0.1:7001",), 30.0)
    assert handoff.compatibility_hash == LAYOUT.compatibility_hash()
    [publish] = side.build_connector_meta(IDLE).publish
    assert (publish.request_id, publish.handoff_id) == ("r", handoff.handoff_id)
    assert (publish.block_ids, publish.num_tokens) == ([1, 2, 3], 70)


def test_only_blocks_that_hold_the_prompt_are_published(side):
    request = a_request(prompt=64, do_remote_decode=True)
    side.on_new_request(request)
    _, told = end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3])
    assert told["handoff"]["num_blocks"] == 2
    assert side.build_connector_meta(IDLE).publish[0].block_ids == [1, 2]


@pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR]
)
def test_a_prefill_that_ends_in_any_other_way_publishes_nothing(side, status):
    request = a_request(do_remote_decode=True)
    side.on_new_request(request)
    assert end(side, request, status, [1, 2, 3]) == (False, None)
    assert side.build_connector_meta(IDLE).publish == []


def test_an_ordinary_request_that_ends_at_its_length_publishes_nothing(side):
    request = a_request()
    side.on_new_request(request)
    assert end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3]) == (False, None)


# --- (b), (c) the consumer


@pytest.mark.parametrize("prompt", [70, 71], ids=["resample", "continue"])
def test_a_handed_over_prompt_is_watched_loaded_whole_and_asynchronously(side, prompt):
    request = a_fetching_request(prompt=prompt)
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 0) == (70, True)
    assert side.get_num_new_matched_tokens(request, 0) == (70, True), "vLLM asks again when it had no room"
    side.update_state_after_alloc(request, blocks(1, 2, 3), 70)
    instructions = side.build_connector_meta(IDLE)
    assert instructions.watch == [HANDOFF]
    [fetch] = instructions.fetch
    assert (fetch.request_id, fetch.handoff, fetch.targets) == ("r", HANDOFF, {0: [1, 2, 3]})
    assert instructions.release == instructions.cancel == []


def test_a_block_allocated_for_the_token_after_the_prompt_is_not_fetched(side):
    handoff = make_handoff(num_tokens=64)
    instructions = start_fetch(side, a_fetching_request(prompt=65, handoff=handoff), 1, 2, 3)
    assert instructions.fetch[0].targets == {0: [1, 2]}


def test_the_heartbeat_starts_with_the_request_not_with_its_load(side):
    side.on_new_request(a_fetching_request())
    assert side.build_connector_meta(IDLE).watch == [HANDOFF]
    assert side.counters["waiting_for_kv"] == 1


def test_the_second_allocation_call_after_a_load_is_ignored(side):
    request = a_fetching_request()
    start_fetch(side, request)
    report(side, {"r": OK}, finished_recving={"r"})
    side.update_state_after_alloc(request, blocks(), 0)
    instructions = side.build_connector_meta(IDLE)
    assert instructions.fetch == instructions.release == []
    assert recomputes(side) == {}
    assert side.counters["waiting_for_kv"] == 0


def test_each_decision_is_told_once(side):
    start_fetch(side, a_fetching_request())
    again = side.build_connector_meta(IDLE)
    assert again.watch == again.fetch == again.publish == again.cancel == again.release == []


def test_a_step_without_tokens_is_told_to_be_idle(side):
    busy = SimpleNamespace(
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=1,
        num_scheduled_tokens={"r": 1},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["r"], num_computed_tokens=[7], new_block_ids=[None], resumed_req_ids=set()
        ),
        preempted_req_ids=None,
    )
    assert side.build_connector_meta(IDLE).idle is True
    assert side.build_connector_meta(busy).idle is False


def test_a_hand_off_is_published_at_once_where_the_worker_side_is_at_hand():
    published = []
    side = SchedulerSide(
        groups=GROUPS,
        lease_s=30.0,
        vocabulary_tokens=VOCABULARY_TOKENS,
        accountant=StepAccountant(MODEL),
        publish_at_once=lambda publish: published.append(publish) or True,
    )
    side.set_xfer_handshake_metadata({0: Endpoint("127.0.0.1:7001", LAYOUT.compatibility_hash(), 100, 2048)})
    request = a_request(do_remote_decode=True)
    side.on_new_request(request)
    end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3])
    assert [(each.request_id, each.block_ids, each.first_token) for each in published] == [("r", [1, 2, 3], 7)]
    assert side.build_connector_meta(IDLE).publish == [], "not a second time"
    assert report(side, finished_sending={"r"}).finished_sending == {"r"}


def test_the_step_loop_waits_long_only_while_everything_waits_for_a_transfer(side):
    def wait_s(num_requests):
        return side.idle_wait_s(IDLE_WAIT_S, num_requests)

    start_fetch(side, a_fetching_request("fetches"))
    assert wait_s(1) == IDLE_WAIT_S
    assert wait_s(2) == POLL_S, "vLLM has another one, which it may be able to run soon"
    for _ in range(3):
        side.build_connector_meta(IDLE)
    assert wait_s(2) == 4 * POLL_S, "nothing says when, so the loop looks less and less often"
    for _ in range(40):
        side.build_connector_meta(IDLE)
    assert wait_s(2) == IDLE_WAIT_S
    ended = a_request("ended", do_remote_decode=True)
    side.on_new_request(ended)
    side.build_connector_meta(IDLE)
    end(side, ended, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3])
    assert wait_s(2) == 0.0, "its blocks are still to be published"
    side.build_connector_meta(IDLE)
    assert wait_s(2) == IDLE_WAIT_S
    report(side, {"fetches": OK}, finished_recving={"fetches"}, finished_sending={"ended"})
    assert wait_s(1) == 0.0, "it can run"
    side.build_connector_meta(IDLE)
    assert wait_s(1) > 0.0, "it did not"


def test_the_step_loop_does_not_wait_while_it_has_an_event_to_send(side):
    request = a_fetching_request("covered")
    request.kv_transfer_params[FIRST_TOKEN_FOLLOWS] = True
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 70) == (None, False), "held: the cache has its whole prompt"
    side.build_connector_meta(IDLE)
    assert side.idle_wait_s(IDLE_WAIT_S, 1) == 0.0
    assert side.take_events()
    assert side.idle_wait_s(IDLE_WAIT_S, 1) == IDLE_WAIT_S


def test_an_idle_step_may_wait_only_while_no_other_one_runs(side):
    """Asynchronous scheduling: vLLM runs an empty step before it reads the outputs of the one with the first token."""
    assert side.build_connector_meta(IDLE).quiet is True
    busy = side.build_connector_meta(a_step(cached=[("r", None, 5, 1)]))
    assert busy.quiet is False
    assert side.build_connector_meta(IDLE).quiet is False
    report(side, step=busy.step)
    assert side.build_connector_meta(IDLE).quiet is True


def test_the_result_of_a_fetch_is_told_when_the_request_ends(side):
    request = a_fetching_request()
    start_fetch(side, request)
    report(side, {"r": OK}, finished_recving={"r"})
    assert end(side, request, RequestStatus.FINISHED_STOPPED, [1, 2, 3]) == (
        False,
        {"result": msgspec.to_builtins(OK)},
    )


# --- (d) the local prefix cache


def test_a_local_prefix_hit_maps_to_the_first_block_that_is_missing(side):
    request = a_fetching_request(prompt=70)
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 64) == (6, True)
    side.update_state_after_alloc(request, blocks(1, 2, 3, cached=2), 6)
    [fetch] = side.build_connector_meta(IDLE).fetch
    assert fetch.targets == {2: [3]}


def test_a_prompt_wholly_in_the_local_prefix_cache_releases_the_source_and_is_no_recompute(side):
    handoff = make_handoff(num_tokens=64)
    request = a_fetching_request(prompt=65, handoff=handoff)
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 64) == (0, False)
    side.update_state_after_alloc(request, blocks(3), 0)  # vLLM sets num_computed_tokens only after this call
    instructions = side.build_connector_meta(IDLE)
    assert (instructions.release, instructions.fetch) == ([handoff], [])
    assert recomputes(side) == {}


def test_a_request_for_which_vllm_skips_the_transfer_releases_the_source_and_counts_as_recompute(side):
    request = a_fetching_request()
    request.skip_reading_prefix_cache = True
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 0) == (
        70,
        True,
    )  # asked, and then not used: prompt log-probabilities
    side.update_state_after_alloc(request, blocks(1, 2, 3), 0)
    assert side.build_connector_meta(IDLE).release == [HANDOFF]
    assert recomputes(side) == {"prefix_cache_skipped": 1}
    keep, told = end(side, request, RequestStatus.FINISHED_STOPPED, [1, 2, 3])
    assert keep is False
    result = msgspec.convert(told["result"], TransferResult)
    assert (result.outcome, result.reason) == ("failed", "prefix_cache_skipped"), "the router counts it as local"


# --- (e) failed loads


def test_a_failed_fetch_is_counted_by_reason_and_not_asked_for_again(side):
    request = a_fetching_request()
    start_fetch(side, request)
    output = report(side, {"r": TIMED_OUT}, finished_recving={"r"}, failed_recving={"r"})
    assert (output.finished_recving, output.failed_recving) == ({"r"}, {"r"})
    assert recomputes(side) == {"timeout": 1}
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    side.update_state_after_alloc(request, blocks(1, 2, 3), 0)
    instructions = side.build_connector_meta(IDLE)
    assert instructions.fetch == instructions.release == []
    assert recomputes(side) == {"timeout": 1}, "counted once"


def test_a_recompute_that_the_router_decided_is_counted_by_its_reason(side):
    side.on_new_request(a_request(recompute_reason="short_prompt"))
    assert recomputes(side) == {"short_prompt": 1}


# --- (f), (g) aborts


def test_an_abort_during_the_fetch_cancels_it_and_leaves_the_blocks_to_vllm_until_it_has_ended(side):
    request = a_fetching_request()
    start_fetch(side, request)
    assert end(side, request, block_ids=[1, 2, 3]) == (False, None), "True would free the blocks twice"
    instructions = side.build_connector_meta(IDLE)
    assert (instructions.cancel, instructions.release) == (["r"], [])
    output = report(side, {"r": CANCELLED}, finished_recving={"r"}, failed_recving={"r"})
    assert output.finished_recving == {"r"}, "vLLM waits for this report"
    assert recomputes(side) == {}


@pytest.mark.parametrize("aborted", [False, True], ids=["goes on", "aborted meanwhile"])
def test_a_hand_off_that_grew_is_released_when_its_fetch_failed_and_decode_computes_the_prompt(side, aborted):
    partial = msgspec.structs.replace(HANDOFF, complete=False)
    request = a_fetching_request(prompt=70, handoff=partial)  # samples the first token itself: it waits for none
    start_fetch(side, request)
    if aborted:
        end(side, request)
    report(side, {"r": TIMED_OUT}, finished_recving={"r"}, failed_recving={"r"})
    assert side.build_connector_meta(IDLE).release == [partial]


def test_a_hand_off_that_grew_and_came_whole_was_released_by_the_fetch(side):
    start_fetch(side, a_fetching_request(prompt=70, handoff=msgspec.structs.replace(HANDOFF, complete=False)))
    report(side, {"r": OK}, finished_recving={"r"})
    assert side.build_connector_meta(IDLE).release == []


def test_an_abort_before_scheduling_releases_the_source(side):
    request = a_fetching_request()
    side.on_new_request(request)
    assert end(side, request) == (False, None)
    instructions = side.build_connector_meta(IDLE)
    assert (instructions.release, instructions.cancel) == ([HANDOFF], [])
    assert side.counters["waiting_for_kv"] == 0


def test_the_result_of_an_aborted_fetch_is_forgotten(side):
    request = a_fetching_request()
    start_fetch(side, request)
    end(side, request)
    report(side, {"r": CANCELLED}, finished_recving={"r"}, failed_recving={"r"})
    again = a_request("r")
    side.on_new_request(again)
    assert end(side, again, RequestStatus.FINISHED_STOPPED) == (False, None)


# --- what waits for blocks that wait for others


def stand_still(side, clock, steps=2):
    """Run steps that compute nothing, `STUCK_S` apart; returns the hand-offs released in each."""
    released = []
    for _ in range(steps):
        released.append(side.build_connector_meta(IDLE).release)
        clock.now_s += STUCK_S
    return released


def a_full_engine(side):
    """It keeps the blocks of a prompt that another engine is to fetch."""
    request = a_request("kept", do_remote_decode=True)
    side.on_new_request(request)
    end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3])


def test_a_request_without_room_on_an_engine_full_of_handoffs_gives_its_own_up_and_computes_the_prompt(side, clock):
    a_full_engine(side)
    first, second = (a_fetching_request(name, handoff=make_handoff(f"h-{name}")) for name in ("r1", "r2"))
    for request in (first, second):
        side.on_new_request(request)
        assert side.get_num_new_matched_tokens(request, 0) == (70, True), "vLLM finds no blocks for it"
    assert stand_still(side, clock, 3) == [[], [make_handoff("h-r1")], [make_handoff("h-r2")]], "one at a time"
    assert side.get_num_new_matched_tokens(first, 0) == (0, False)
    assert recomputes(side) == {"no_room": 2}
    _, told = end(side, first, RequestStatus.FINISHED_STOPPED)
    assert (told["result"]["outcome"], told["result"]["reason"]) == ("failed", "no_room")


def test_a_following_request_without_room_is_handed_back(side, clock):
    a_full_engine(side)
    request = a_following_request()
    side.on_new_request(request)
    assert stand_still(side, clock) == [[], []], "another leg fetches it or releases it"
    [event] = side.take_events()
    assert event["failed"] == "no_room"
    assert side.get_num_new_matched_tokens(request, 0) == (None, False)


@pytest.mark.parametrize("goes_on", ["it keeps nothing", "a step computes", "a fetch runs", "blocks were freed"])
def test_a_request_that_waits_while_anything_goes_on_keeps_its_handoff(side, clock, goes_on):
    if goes_on != "it keeps nothing":
        a_full_engine(side)
    if goes_on == "a fetch runs":
        start_fetch(side, a_fetching_request("fetching", handoff=make_handoff("h2")))
    side.on_new_request(a_fetching_request())
    stand_still(side, clock, 1)
    if goes_on == "a step computes":
        report(side, step=side.build_connector_meta(a_step(cached=[("another", [], 80, 1)])).step)
    if goes_on == "blocks were freed":
        a_full_engine(side)
        report(side, finished_sending={"kept"})
        a_full_engine(side)
    assert stand_still(side, clock, 1) == [[]]


# --- what vLLM must never hear


def test_ids_that_are_not_expected_are_taken_out_of_the_report(side):
    request = a_request("sent", do_remote_decode=True)
    side.on_new_request(request)
    end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3])
    start_fetch(side, a_fetching_request("received"))
    output = report(
        side,
        {},
        finished_sending={"sent", "ghost"},
        finished_recving={"received", "ghost"},
        failed_recving={"ghost"},
    )
    assert (output.finished_sending, output.finished_recving, output.failed_recving) == ({"sent"}, {"received"}, set())


def test_a_completion_reported_twice_reaches_vllm_once(side):
    request = a_request("sent", do_remote_decode=True)
    side.on_new_request(request)
    end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3])
    start_fetch(side, a_fetching_request("received"))
    report(side, {}, finished_sending={"sent"}, finished_recving={"received"})
    output = report(side, {}, finished_sending={"sent"}, finished_recving={"received"})
    assert (output.finished_sending, output.finished_recving) == (set(), set())


def test_a_report_with_nothing_in_it_is_fine(side):
    output = report(side)
    assert not output.finished_sending
    assert not output.finished_recving


def test_a_handoff_that_is_not_one_is_refused_at_the_door(side):
    with pytest.raises(Exception, match="handoff_id"):
        side.on_new_request(a_request(do_remote_prefill=True, handoff={"address": "x"}))


# --- counters


def test_counters_of_both_sides_are_joined():
    joined = CounterStats(data={"open_leases": 1.0}).aggregate(CounterStats(data={"a": 2.0}))
    assert joined.reduce() == {"open_leases": 1.0, "a": 2.0}
    assert CounterStats(data={}).is_empty()


# --- hand-offs that are followed


def a_step(new=(), cached=(), preempted=None):
    """`new`: (request id, block ids, tokens); `cached`: (request id, new block ids, computed before, tokens)."""
    return SimpleNamespace(
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=sum(each[-1] for each in (*new, *cached)),
        num_scheduled_tokens={each[0]: each[-1] for each in (*new, *cached)},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(ids,), num_computed_tokens=0) for name, ids, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached],
            new_block_ids=[(ids,) if ids else None for _, ids, _, _ in cached],
            num_computed_tokens=[computed for *_, computed, _ in cached],
            resumed_req_ids=set(),
        ),
        preempted_req_ids=preempted,
    )


def a_long_prefill(side, prompt=200):
    request = a_request(prompt=prompt, do_remote_decode=True)
    side.on_new_request(request)
    return request


def extended(instructions):
    return [(extend.handoff_id, extend.block_ids) for extend in instructions.extend]


def test_a_prompt_is_announced_with_no_block_and_those_of_a_chunk_are_offered_when_its_step_has_ended(side):
    request = a_long_prefill(side)
    first = side.build_connector_meta(a_step(new=[("r", [4, 5, 6], 80)]))
    assert extended(first) == [("handoff-r", [])]
    [event] = side.take_events()
    assert event["handoff_id"] == "handoff-r"
    announced = KvHandoff.from_params(event["handoff"])
    assert (announced.complete, announced.num_tokens, announced.num_blocks) == (False, 200, 7)
    report(side, step=first.step)
    second = side.build_connector_meta(a_step(cached=[("r", [7, 8], 80, 80)]))
    assert extended(second) == [("handoff-r", [4, 5])], "80 tokens fill two blocks of 32"
    report(side, step=second.step)
    assert side.take_events() == [], "one is enough"
    third = side.build_connector_meta(a_step(cached=[("r", [9, 10], 160, 40)]))
    assert extended(third) == [("handoff-r", [4, 5, 6, 7, 8])]
    report(side, step=third.step)
    _, told = end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [4, 5, 6, 7, 8, 9, 10])
    assert KvHandoff.from_params(told["handoff"]).complete
    last = side.build_connector_meta(IDLE)
    assert extended(last) == []
    assert (last.publish[0].handoff_id, last.publish[0].first_token) == ("handoff-r", 7)


def test_the_step_that_ends_a_prompt_is_told_with_all_its_blocks_and_no_other_step_is(side):
    a_long_prefill(side)
    first = side.build_connector_meta(a_step(new=[("r", [4, 5, 6], 80)]))
    second = side.build_connector_meta(a_step(cached=[("r", [7, 8], 80, 80)]))
    last = side.build_connector_meta(a_step(cached=[("r", [9, 10, 11], 160, 40)]))
    assert (first.last_step, second.last_step) == ({}, {})
    assert last.last_step == {"handoff-r": [4, 5, 6, 7, 8, 9, 10]}, "200 tokens, seven blocks"
    assert side.build_connector_meta(IDLE).last_step == {}


def test_a_step_that_still_runs_makes_nothing_final(side):
    a_long_prefill(side)
    first = side.build_connector_meta(a_step(new=[("r", [4, 5, 6], 80)]))
    second = side.build_connector_meta(a_step(cached=[("r", [7, 8], 80, 80)]))
    assert extended(second) == []
    report(side)  # an empty step between, which says nothing of these two
    assert extended(side.build_connector_meta(IDLE)) == []
    report(side, step=first.step)
    assert extended(side.build_connector_meta(IDLE)) == [("handoff-r", [4, 5])]


def a_side_that_sends_at_once(sends=True):
    sent = []

    def send_at_once(stats):
        if sends:
            sent.append(stats)
        return sends

    side = SchedulerSide(GROUPS, 30.0, VOCABULARY_TOKENS, StepAccountant(MODEL), send_at_once)
    side.set_xfer_handshake_metadata({0: Endpoint("127.0.0.1:7001", LAYOUT.compatibility_hash(), 100, 2048)})
    return side, sent


def test_a_prompt_of_one_step_is_announced_before_that_step_and_its_blocks_come_when_it_has_ended():
    side, sent = a_side_that_sends_at_once()
    request = a_long_prefill(side, prompt=70)
    step = side.build_connector_meta(a_step(new=[("r", [4, 5, 6], 70)]))
    assert [event["handoff_id"] for stats in sent for event in stats["transfer_events"]] == ["handoff-r"]
    assert (extended(step), step.last_step) == ([("handoff-r", [])], {"handoff-r": [4, 5, 6]})
    report(side, step=step.step)
    end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [4, 5, 6])
    last = side.build_connector_meta(IDLE)
    assert (extended(last), [publish.handoff_id for publish in last.publish]) == ([], ["handoff-r"])
    assert side.take_events() == [], "once is enough"
    assert len(sent) == 1


def test_what_cannot_be_sent_at_once_is_sent_with_the_steps_statistics():
    side, _ = a_side_that_sends_at_once(sends=False)
    a_long_prefill(side, prompt=70)
    side.build_connector_meta(a_step(new=[("r", [4, 5, 6], 70)]))
    assert [event["handoff_id"] for event in side.get_kv_connector_stats().data["transfer_events"]] == ["handoff-r"]


def test_a_step_that_begins_no_prompt_of_ours_sends_nothing_at_once():
    side, sent = a_side_that_sends_at_once()
    side.on_new_request(a_request("other"))
    side.build_connector_meta(a_step(new=[("other", [1, 2, 3], 70)]))
    a_long_prefill(side)
    side.build_connector_meta(IDLE)
    assert sent == [], "one is no hand-off, the other waits for a step"


@pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_STOPPED]
)
def test_a_prompt_that_ends_without_a_handoff_before_its_first_step_has_ended_is_revoked(side, status):
    request = a_long_prefill(side, prompt=70)
    side.build_connector_meta(a_step(new=[("r", [4, 5, 6], 70)]))
    end(side, request, status)
    assert side.build_connector_meta(IDLE).revoke == ["handoff-r"]


def test_a_prompt_preempted_in_its_first_step_is_revoked(side):
    a_long_prefill(side)
    side.build_connector_meta(a_step(new=[("r", [4, 5, 6], 80)]))
    assert side.build_connector_meta(a_step(preempted={"r"})).revoke == ["handoff-r"]


def test_a_prompt_that_was_never_scheduled_revokes_nothing(side):
    request = a_long_prefill(side)
    end(side, request)
    assert side.build_connector_meta(IDLE).revoke == []


def test_no_more_prompts_are_announced_at_a_time_than_leave_room_for_complete_handoffs(side):
    names = [f"r{number}" for number in range(MOST_PARTIAL + 2)]
    requests = [a_request(name, do_remote_decode=True) for name in names]
    for request in requests:
        side.on_new_request(request)
    step = side.build_connector_meta(a_step(new=[(name, [1, 2, 3], 70) for name in names]))
    assert len(side.take_events()) == len(extended(step)) == MOST_PARTIAL < MAX_CONCURRENT_FETCHES
    report(side, step=step.step)
    for request in requests:
        end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3])
    last = side.build_connector_meta(IDLE)
    assert len(last.publish) == MOST_PARTIAL + 2, "the others are handed over when they are complete"
    side.on_new_request(a_request("next", do_remote_decode=True))
    assert extended(side.build_connector_meta(a_step(new=[("next", [1, 2, 3], 70)]))) == [("handoff-next", [])]


def test_a_preempted_prefill_is_revoked_before_its_blocks_are_used_again_and_published_at_its_end(side):
    request = a_long_prefill(side)
    first = side.build_connector_meta(a_step(new=[("r", [4, 5, 6], 80)]))
    report(side, step=first.step)
    side.build_connector_meta(a_step(cached=[("r", [7, 8], 80, 80)]))
    preempting = side.build_connector_meta(a_step(preempted={"r"}))
    assert (preempting.revoke, extended(preempting)) == (["handoff-r"], [])
    again = side.build_connector_meta(a_step(cached=[("r", [1, 2, 3], 0, 80)]))
    report(side, step=again.step)
    assert extended(side.build_connector_meta(IDLE)) == [], "nobody follows the second attempt"
    _, told = end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3, 4, 5, 6, 7])
    assert told["handoff"]["handoff_id"] == "handoff-r"


def test_a_prefill_that_ends_without_a_handoff_revokes_what_it_offered(side):
    request = a_long_prefill(side)
    report(side, step=side.build_connector_meta(a_step(new=[("r", [4, 5, 6], 80)])).step)
    side.build_connector_meta(IDLE)
    end(side, request, RequestStatus.FINISHED_ABORTED)
    assert side.build_connector_meta(IDLE).revoke == ["handoff-r"]


def a_following_request(prompt=71):
    partial = msgspec.structs.replace(HANDOFF, complete=False)
    request = a_request(prompt=prompt, do_remote_prefill=True, handoff=partial.to_params(), first_token_follows=True)
    request.prompt_token_ids = [3] * prompt
    request._all_token_ids = [3] * prompt
    request.num_tokens = prompt
    request.block_hashes = ["h"] * (prompt // 32)
    request.update_block_hashes = lambda: request.block_hashes.append("again")
    return request


FOLLOWED = msgspec.structs.replace(OK, first_token=42)


def test_the_first_token_takes_the_placeholders_place_when_the_kv_is_here(side):
    request = a_following_request()
    start_fetch(side, request)
    report(side, {"r": FOLLOWED}, finished_recving={"r"})
    assert request.prompt_token_ids == [3] * 70 + [42]
    assert request._all_token_ids == [3] * 70 + [42]
    assert request.block_hashes == ["h", "h"]
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_block_hash_that_covered_the_placeholder_is_made_again(side):
    handoff = msgspec.structs.replace(make_handoff(num_tokens=63), complete=False)
    request = a_following_request(64)
    request.kv_transfer_params["handoff"] = handoff.to_params()
    start_fetch(side, request, 1, 2)
    report(side, {"r": FOLLOWED}, finished_recving={"r"})
    assert request.block_hashes == ["h", "again"]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (TIMED_OUT, "timeout"),
        (OK, "internal"),
        (msgspec.structs.replace(OK, first_token=VOCABULARY_TOKENS), "corrupted"),
        (msgspec.structs.replace(OK, first_token=-1), "corrupted"),
    ],
)
def test_without_its_first_token_a_following_request_never_runs_and_its_handler_is_told(side, result, reason):
    request = a_following_request()
    start_fetch(side, request)
    request.num_computed_tokens = 70
    report(side, {"r": result}, finished_recving={"r"})
    assert request.num_computed_tokens == 0, "else vLLM would run it without asking"
    assert request.prompt_token_ids[-1] == 3
    [event] = side.take_events()
    assert (event["handoff_id"], event["failed"]) == (HANDOFF.handoff_id, reason)
    assert side.get_num_new_matched_tokens(request, 0) == (None, False)
    assert recomputes(side) == {}, "the router decides what comes next"
    end(side, request)
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_following_request_that_the_local_cache_covers_is_handed_back(side):
    handoff = msgspec.structs.replace(make_handoff(num_tokens=64), complete=False)
    request = a_following_request(65)
    request.kv_transfer_params["handoff"] = handoff.to_params()
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 64) == (None, False)
    assert side.take_events()[0]["failed"] == "already_cached"
    told = side.build_connector_meta(IDLE)
    assert (told.watch, told.unwatch, told.release) == ([handoff], [handoff], [])
    complete = msgspec.structs.replace(handoff, complete=True)
    side.on_new_request(a_fetching_request("second", 65, complete))
    assert side.build_connector_meta(IDLE).watch == [complete]


def test_a_placeholder_is_never_computed_on(side):
    request = a_following_request()
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 0) == (70, True)
    side.update_state_after_alloc(
        request, blocks(1, 2, 3), 0
    )  # vLLM will not load it after all, and runs it in this step
    with pytest.raises(RuntimeError, match="first token is not known"):
        side.build_connector_meta(a_step(new=[("r", [1, 2, 3], 71)]))


@pytest.mark.parametrize("result", [TIMED_OUT, OK])
def test_nor_after_its_fetch_has_failed(side, result):
    request = a_following_request()
    start_fetch(side, request)
    report(side, {"r": result}, finished_recving={"r"})
    side.build_connector_meta(a_step(new=[("another", [4], 20)]))
    with pytest.raises(RuntimeError, match="first token is not known"):
        side.build_connector_meta(a_step(new=[("r", [1, 2, 3], 71)]))


# --- several ranks; their ends of one fetch may come in different steps


SLOW = msgspec.structs.replace(OK, wire_s=0.5)


@pytest.mark.parametrize("results", [(OK, SLOW), (SLOW, OK)])
def test_the_slowest_rank_is_what_a_request_waited_for_and_the_bytes_are_those_of_all(results):
    one, other = (TransferResults({"r": result}, step=5) for result in results)
    joined = one.aggregate(other)
    assert joined.step == 5
    assert joined.by_request == {"r": msgspec.structs.replace(SLOW, num_bytes=2 * 6144)}


@pytest.mark.parametrize("results", [(OK, TIMED_OUT), (TIMED_OUT, OK), (TIMED_OUT, SLOW)])
def test_one_rank_that_failed_fails_the_request(results):
    joined = join_results(*results)
    assert (joined.outcome, joined.reason) == ("failed", "timeout")


def test_a_rank_that_has_nothing_to_say_does_not_hide_the_step_of_the_others():
    assert TransferResults({"r": OK}, None).aggregate(TransferResults({}, 7)).step == 7


@pytest.mark.parametrize("results", [(OK, TIMED_OUT), (TIMED_OUT, OK)])
def test_a_failure_on_one_rank_counts_though_another_rank_ended_in_an_earlier_step(side, results):
    request = a_fetching_request()
    start_fetch(side, request)
    first, second = results
    report(side, {"r": first})
    report(side, {"r": second}, finished_recving={"r"}, failed_recving={"r"})
    assert recomputes(side) == {"timeout": 1}


def test_a_following_request_waits_for_its_last_rank_and_fails_with_its_first_failure(side):
    request = a_following_request()
    start_fetch(side, request)
    report(side, {"r": TIMED_OUT})
    assert side.take_events() == []
    report(side, {"r": FOLLOWED}, finished_recving={"r"}, failed_recving={"r"})
    assert side.take_events()[0]["failed"] == "timeout"
    assert request.prompt_token_ids[-1] == 3, "the placeholder must not be replaced"


def test_a_hand_off_of_several_ranks_names_all_their_addresses_and_counts_all_their_bytes(side):
    ranks = [Endpoint(f"127.0.0.1:{port}", LAYOUT.compatibility_hash(), 100, 1024) for port in (7001, 7002)]
    side.set_xfer_handshake_metadata(dict(enumerate(ranks)))
    request = a_request(do_remote_decode=True)
    side.on_new_request(request)
    _, told = end(side, request, RequestStatus.FINISHED_LENGTH_CAPPED, [1, 2, 3])
    handoff = KvHandoff.from_params(told["handoff"])
    assert handoff.addresses == ("127.0.0.1:7001", "127.0.0.1:7002")
    assert handoff.num_bytes == 3 * 2048


def test_one_hand_off_counts_once_however_many_ranks_carry_it_and_bytes_are_summed():
    first = CounterStats(data={"open_leases": 1, "kv_bytes_total.sent": 100, "fetches_total.ok": 4})
    second = CounterStats(
        data={"open_leases": 2, "kv_bytes_total.sent": 100, "fetches_total.ok": 4, "pinned_blocks": 3}
    )
    assert first.aggregate(second).reduce() == {
        "open_leases": 2,
        "kv_bytes_total.sent": 200,
        "fetches_total.ok": 4,
        "pinned_blocks": 3,
    }
