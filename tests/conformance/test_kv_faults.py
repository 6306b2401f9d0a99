"""The faulty wire over every transport: each fault is what it says, leaves nothing, and comes again by its seed."""

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from ridgeline.contracts import errors
from ridgeline.kv_transfer.faults import FaultPlan, FaultyPuller
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.service import RankLayers, TransferService
from ridgeline.kv_transfer.transports import make_transport
from tests.conformance.check_transport import LONG, Node, eventually, make_layout, make_pool, slow_copies, slow_frames
from tests.support.patience import PATIENCE_S
from tests.support.samples import handoff_at

LEASE_S = 2 * PATIENCE_S
"""None ends by itself."""
TRANSPORTS = {"grpc": slow_frames, "shm": slow_copies}
IDS, TARGETS = [7, 3, 9, 1, 12], [20, 4, 22, 5, 24]
REASON = {
    "none": "",
    "delay": "",
    "drop": errors.TIMEOUT,
    "corrupt": errors.CORRUPTED,
    "cut": errors.UNREACHABLE,
}
MIXED = FaultPlan.parse("seed=7,drop=0.05,delay=0.2,corrupt=0.1,cut=0.2,longest_delay_s=0.01,longest_drop_s=0.03")


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


def setting_of(plan):
    return plan and ",".join(f"{name}={value}" for name, value in asdict(plan).items())


class FaultyHarness:
    def __init__(self, name, plan):
        self._name = name
        self._plan = plan

    def make(self, cache, options):
        return make_transport(cache, replace(options, transport=self._name, faults=setting_of(self._plan)))


@asynccontextmanager
async def nodes(transport, plan, layout=None, num_blocks=32):
    """Prefill and decode over a faulty wire; at the end nothing may be read any more."""
    pair = [Node(FaultyHarness(transport, plan), layout or make_layout(), seed, num_blocks) for seed in (0, 1)]
    for node in pair:
        node.source.start()
    try:
        yield pair
        await eventually(lambda: all(lease.active_reads == 0 for node in pair for lease in node.leases._open.values()))
    finally:
        for node in pair:
            await node.fetcher.close()
            node.source.close()


def repair(node):
    """From here on its wire is sound."""
    for puller in node.fetcher._pullers.values():
        puller._plan = FaultPlan()


# --- each fault, over each transport


@pytest.mark.parametrize("kind", REASON)
async def test_a_fault_ends_as_it_says_touches_only_the_targets_and_leaves_nothing_pinned(transport, kind):
    certain = {} if kind == "none" else {kind: 1.0}
    plan = FaultPlan(seed=3, **certain, longest_drop_s=0.05)
    async with nodes(transport, plan) as (prefill, decode):
        before = [layer.copy() for layer in decode.layers]
        handoff = prefill.publish(IDS, owner="a")
        result = await decode.fetcher.fetch(handoff, {0: TARGETS}, decode.pool)
        assert result.outcome == ("failed" if REASON[kind] else "ok"), result
        assert result.reason == REASON[kind]
        assert result.transport == transport
        assert kind != "delay" or result.wait_s >= plan.fault(0).amount * plan.longest_delay_s
        others = [block for block in range(32) if block not in TARGETS]
        for ours, earlier in zip(decode.layers, before, strict=True):
            np.testing.assert_array_equal(ours[others], earlier[others])
        await eventually(lambda: prefill.leases._open[handoff.handoff_id].active_reads == 0)

        repair(decode)
        assert (await decode.fetcher.fetch(handoff, {0: TARGETS}, decode.pool)).outcome == "ok"
        for ours, theirs in zip(decode.layers, prefill.layers, strict=True):
            np.testing.assert_array_equal(ours[TARGETS], theirs[IDS])
        await decode.fetcher.release(handoff)
        # A pin is a stream, whose end reaches the source by itself: perhaps after the release.
        await eventually(lambda: prefill.leases.stats().open_leases == 0)
        assert prefill.leases.take_finished() == {"a"}


async def test_a_corrupted_fetch_has_one_wrong_block_and_no_first_token(transport):
    async with nodes(transport, FaultPlan(corrupt=1.0)) as (prefill, decode):
        handoff = prefill.announce(IDS)
        prefill.leases.publish(handoff.handoff_id, "a", IDS, 20, 30.0, first_token=77)
        result = await decode.fetcher.fetch(handoff, {0: TARGETS}, decode.pool)
        assert (result.reason, result.first_token) == (errors.CORRUPTED, None)
        wrong = [
            (layer, target)
            for layer, (ours, theirs) in enumerate(zip(decode.layers, prefill.layers, strict=True))
            for target, source in zip(TARGETS, IDS, strict=True)
            if not np.array_equal(ours[target], theirs[source])
        ]
        assert len(wrong) == 1


async def test_a_cut_comes_midway_and_stops_the_writing(transport):
    async with nodes(transport, FaultPlan(seed=2, cut=1.0), LONG) as (prefill, decode):
        TRANSPORTS[transport](prefill, decode)
        result = await decode.fetcher.fetch(prefill.publish([1, 2, 3]), {0: [4, 5, 6]}, decode.pool)
        assert result.reason == errors.UNREACHABLE
        whole_bytes = 3 * LONG.num_layers * LONG.block_bytes
        assert result.num_bytes <= whole_bytes if transport == "shm" else 0 < result.num_bytes < whole_bytes
        afterwards = [layer.copy() for layer in decode.layers]
        await asyncio.sleep(0.05)
        np.testing.assert_array_equal(decode.layers, afterwards)


async def test_a_dropped_fetch_ends_at_its_own_deadline_if_that_comes_first(transport):
    async with nodes(transport, FaultPlan(drop=1.0, longest_drop_s=30.0)) as (prefill, decode):
        decode.fetcher._options = replace(decode.fetcher._options, kv_fetch_timeout_s=0.1)
        started_s = time.monotonic()
        result = await decode.fetcher.fetch(prefill.publish(IDS), {0: TARGETS}, decode.pool)
        assert result.reason == errors.TIMEOUT
        assert 0.1 <= time.monotonic() - started_s < 30


@pytest.mark.parametrize("kind", ["delay", "drop", "cut"])
async def test_a_fetch_cancelled_during_a_fault_is_cancelled_and_reads_nothing_any_more(transport, kind):
    plan = FaultPlan(seed=2, **{kind: 1.0}, longest_delay_s=5.0, longest_drop_s=5.0)
    async with nodes(transport, plan, LONG) as (prefill, decode):
        TRANSPORTS[transport](prefill, decode)
        handoff = prefill.publish([1, 2, 3])
        task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [4, 5, 6]}, decode.pool))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE_S)
        await eventually(lambda: prefill.leases._open[handoff.handoff_id].active_reads == 0)


async def test_what_fails_by_itself_keeps_its_own_reason_when_it_was_to_be_cut(transport):
    async with nodes(transport, FaultPlan(cut=1.0)) as (prefill, decode):
        handoff = prefill.publish([1], owner="a")
        prefill.leases.release(handoff.handoff_id)
        result = await decode.fetcher.fetch(handoff, {0: [1]}, decode.pool)
        assert result.reason in (errors.UNKNOWN_HANDOFF, errors.UNREACHABLE)  # or the cut came first
        assert prefill.leases.stats().open_leases == 0


# --- many


async def test_300_fetches_end_in_a_result_each_as_planned_and_no_lease_is_left(transport):
    async with nodes(transport, MIXED, num_blocks=64) as (prefill, decode):
        free = asyncio.Queue()
        for first in range(0, 64, 8):
            free.put_nowait(list(range(first, first + 8)))

        async def one(index):
            targets = await free.get()
            ids = [(index + 11 * step) % 64 for step in range(8)]
            handoff = prefill.publish(ids, f"request-{index}")
            try:
                result = await decode.fetcher.fetch(handoff, {0: targets}, decode.pool)
                if result.outcome == "ok":
                    for ours, theirs in zip(decode.layers, prefill.layers, strict=True):
                        np.testing.assert_array_equal(ours[targets], theirs[ids])
                await decode.fetcher.release(handoff)
            finally:
                free.put_nowait(targets)
            return result

        results = await asyncio.wait_for(asyncio.gather(*(one(index) for index in range(300))), PATIENCE_S)
        planned = Counter(REASON[MIXED.fault(index).kind] for index in range(300))
        assert len(planned) == 4
        assert Counter(result.reason for result in results) == planned
        await eventually(lambda: prefill.leases.stats().open_leases == 0)
        assert prefill.leases.take_finished() == {f"request-{index}" for index in range(300)}
        assert prefill.leases.stats().expired_leases_total == 0


def test_a_service_with_faults_completes_every_fetch_once_and_every_lease_ends(transport):
    plan = FaultPlan(seed=5, delay=0.2, drop=0.1, corrupt=0.2, cut=0.3, longest_delay_s=0.01, longest_drop_s=0.05)
    services = []
    for faults in (None, plan):
        _, shared, layers = make_pool(num_blocks=80)
        tensors = {f"layer{index}": torch.from_numpy(layer) for index, layer in enumerate(layers)}
        options = TransferOptions("127.0.0.1", lease_s=LEASE_S, transport=transport, faults=setting_of(faults))
        services.append(TransferService(RankLayers(tensors, make_layout(), shared), options))
    prefill, decode = services
    try:
        for service in services:
            service.start()
        results, sent = {}, set()
        for index in range(40):
            handoff = _offer(prefill, f"p{index}", [index % 32, (index + 5) % 32])
            decode.start_fetch(f"d{index}", handoff, {0: [2 * index, 2 * index + 1]})
        deadline_s = time.monotonic() + PATIENCE_S
        while len(results) < 40 or len(sent) < 40:
            assert time.monotonic() < deadline_s, (len(results), len(sent))
            decode.wait(0.05)
            new = decode.poll().results
            assert not new.keys() & results.keys()
            results |= new
            sent |= prefill.poll().sent
        planned = Counter(REASON[plan.fault(index).kind] for index in range(40))
        assert Counter(result.reason for result in results.values()) == planned
        assert (prefill.stats().open_leases, prefill.stats().pinned_blocks) == (0, 0)
        assert (decode.stats().active_fetches, decode.stats().watched_handoffs) == (0, 0)
    finally:
        for service in (decode, prefill):
            service.close()


def _offer(service, request_id, block_ids):
    handoff = handoff_at(service.address, len(block_ids), lease_s=LEASE_S)
    service.publish(request_id, handoff.handoff_id, block_ids, handoff.num_tokens)
    return handoff


# --- the plan


def test_a_plan_is_a_function_of_seed_and_number():
    plan = FaultPlan(seed=4, cut=0.5)
    faults = [plan.fault(index) for index in range(100)]
    assert [plan.fault(index) for index in reversed(range(100))] == faults[::-1]
    assert [FaultPlan(seed=4, cut=0.5).fault(index) for index in range(100)] == faults
    assert [FaultPlan(seed=5, cut=0.5).fault(index) for index in range(100)] != faults
    assert {fault.kind for fault in faults} == {"none", "cut"}


@pytest.mark.parametrize("kind", ["delay", "drop", "corrupt", "cut"])
def test_certain_is_always_and_nothing_planned_is_never(kind):
    assert {FaultPlan(1, **{kind: 1.0}).fault(index).kind for index in range(500)} == {kind}
    assert {FaultPlan(1).fault(index).kind for index in range(500)} == {"none"}


def test_a_plan_is_read_from_a_setting():
    assert FaultPlan.parse("seed=7,drop=0.05,delay=0.2,corrupt=0.05,cut=0.05") == FaultPlan(
        seed=7, drop=0.05, delay=0.2, corrupt=0.05, cut=0.05
    )
    assert FaultPlan.parse(" drop = 0.5 , longest_drop_s=2, ") == FaultPlan(drop=0.5, longest_drop_s=2.0)
    assert FaultPlan.parse("") == FaultPlan()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("drop", "drop"),
        ("dorp=0.1", "dorp"),
        ("drop=often", "drop"),
        ("seed=0.5", "seed"),
        ("drop=1.5", "drop"),
        ("cut=-0.1", "cut"),
        ("cut=nan", "cut"),
        ("cut=0.6,drop=0.6", "add up to 1.2"),
        ("drop=0.1,drop=0.2", "twice"),
        ("longest_drop_s=-1", "longest_drop_s"),
        ("longest_delay_s=inf", "longest_delay_s"),
    ],
)
def test_a_bad_plan_is_refused_by_name(text, named):
    with pytest.raises(ValueError, match=f"fault plan: .*{named}"):
        FaultPlan.parse(text)


def test_without_a_plan_nothing_is_wrapped():
    node = Node(FaultyHarness("grpc", None), make_layout(), 0)
    assert not any(isinstance(puller, FaultyPuller) for puller in node.fetcher._pullers.values())
    node.source.close()
