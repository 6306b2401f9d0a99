"""What every transport must do. Subclass `TransportConformance`, give it a `TransportHarness`, and pytest runs it all.

The tests use only the public interface, plus `source.server`, the transport-independent half, to look on or to damage
what is sent.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any, Protocol

import msgspec
import numpy as np
import pytest
import torch

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvHandoff, KvLayout, new_handoff_id
from ridgeline.decode_worker.kv_fetch.fetcher import KvFetcher
from ridgeline.decode_worker.kv_fetch.stream import SourceStream
from ridgeline.kv_transfer.memory.device import DeviceMemory, pool_of
from ridgeline.kv_transfer.memory.ipc import export
from ridgeline.kv_transfer.memory.shared import KvCacheAllocation
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.transports import exports
from ridgeline.kv_transfer.wire import frames
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.grpc_source import GrpcKvSource
from ridgeline.prefill_worker.kv_source.lease import LeaseTable
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import kv_layout

NUM_LAYERS = 3
BLOCK_BYTES = 96
LEASE_S = 30.0


def make_layout(**changes) -> KvLayout:
    fields = {
        "kv_dtype": "auto",
        "block_size": 4,
        "num_layers": NUM_LAYERS,
        "num_kv_heads": 4,
        "block_bytes": BLOCK_BYTES,
    }
    return kv_layout(**fields | changes)


def make_pool(num_blocks: int = 32, num_layers: int = NUM_LAYERS, block_bytes: int = BLOCK_BYTES, seed: int = 0):
    """A pool in memory that other processes can map, how they find it, and its layers."""
    random = np.random.default_rng(seed)
    allocation = KvCacheAllocation()
    size = num_layers * num_blocks * block_bytes
    with allocation.serving_torch_zeros():
        buffer = torch.zeros(max(size, 1 << 20), dtype=torch.int8, device="cpu")
    tensors = buffer[:size].view(torch.uint8).view(num_layers, num_blocks, block_bytes)
    layers = list(tensors.numpy())
    for layer in layers:
        layer[:] = random.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    return pool_of(list(tensors)), allocation.offer(list(tensors)), layers


class TransportHarness(Protocol):
    """How to build a transport's two ends, and how to make it slow enough to look at."""

    def make(self, cache: RankCache, options: TransferOptions) -> tuple[GrpcKvSource, KvFetcher]: ...

    def slow_down(self, source: "Node", target: "Node") -> threading.Event:
        """A fetch of `LONG` then takes 0.4 s.

        It does not go on after its first bytes while the event that this returns, set at first, is cleared.
        """


class Node:
    """One engine's worth: pool, leases, source, fetcher."""

    def __init__(
        self,
        harness: TransportHarness,
        layout: KvLayout,
        seed: int,
        num_blocks: int = 32,
        rank: int = 0,
        port: int = 0,
    ) -> None:
        self.layout = layout
        self.pool, shared, self.layers = make_pool(num_blocks, layout.num_layers, layout.block_bytes, seed)
        self.leases = LeaseTable()
        tensors = [torch.from_numpy(layer) for layer in self.layers]
        offers, _ = exports(tensors, shared, "auto")
        if getattr(harness, "exports_as_a_gpu", False):
            self.pool, self.exported = DeviceMemory(tensors), export(tensors)
            offers["cuda-ipc"] = msgspec.to_builtins(self.exported.offer)
        self.source, self.fetcher = harness.make(
            RankCache(self.pool, self.leases, layout, rank, offers),
            # No fetch ends by its deadline, but in the tests of deadlines.
            TransferOptions("127.0.0.1", port, kv_fetch_timeout_s=2 * PATIENCE_S),
        )

    def publish(self, block_ids: list[int], owner: str = "request", lease_s: float = LEASE_S) -> KvHandoff:
        handoff = self.announce(block_ids, lease_s)
        self.leases.publish(handoff.handoff_id, owner, block_ids, len(block_ids) * 4, lease_s)
        return handoff

    def announce(self, block_ids: list[int], lease_s: float = LEASE_S) -> KvHandoff:
        return KvHandoff(
            handoff_id=new_handoff_id(),
            addresses=(self.source.address,),
            num_blocks=len(block_ids),
            num_tokens=len(block_ids) * 4,
            compatibility_hash=self.layout.compatibility_hash(),
            lease_s=lease_s,
            num_bytes=len(block_ids) * self.layout.num_layers * self.layout.block_bytes,
        )


def alter_frames(node: Node, alter: Callable[[int, bytes], Iterator[bytes]]) -> None:
    """Replace each frame the node's source sends by what `alter(index, frame)` yields."""
    real = node.source.server.frames

    def altered(request, wanted=lambda: True):
        with closing(real(request, wanted)) as stream:
            for index in itertools.count():
                try:
                    frame = next(stream)
                except StopIteration as end:
                    return end.value
                yield from alter(index, frame)

    node.source.server.frames = altered


LONG = make_layout(num_layers=40)


def going_on() -> threading.Event:
    go_on = threading.Event()
    go_on.set()
    return go_on


def slow_frames(source: Node, _target: Node) -> threading.Event:
    """For transports that send frames."""
    go_on = going_on()

    def slowly(_index: int, frame: bytes) -> Iterator[bytes]:
        yield frame
        go_on.wait(PATIENCE_S)
        time.sleep(0.01)

    alter_frames(source, slowly)
    return go_on


def slow_copies(_source: Node, target: Node) -> threading.Event:
    """For transports that copy from mapped memory."""
    go_on, real = going_on(), target.pool.copies_from

    def slowly(*args):
        for copied in real(*args):
            go_on.wait(PATIENCE_S)
            time.sleep(0.4)
            yield copied

    target.pool.copies_from = slowly
    return go_on


def slow_gathers(source: Node, _target: Node) -> threading.Event:
    """For transports that send tensors: a fetch is under way when the first one is gathered, not when it has a pin."""
    go_on, gather, server = going_on(), source.pool.gather, source.source.server
    count_sent, server.count_sent = server.count_sent, lambda _num_bytes: None

    def slowly(layers, block_ids):
        count_sent(1)
        go_on.wait(PATIENCE_S)
        time.sleep(0.004)
        return gather(layers, block_ids)

    source.pool.gather = slowly
    return go_on


def slow_pieces(_source: Node, target: Node) -> threading.Event:
    """For transports that read piece by piece into staging memory."""
    puller = target.fetcher._pullers["nixl"]
    go_on, real = going_on(), puller._move

    def slowly(*args):
        moved = real(*args)
        go_on.wait(PATIENCE_S)
        time.sleep(0.4)
        return moved

    puller._move = slowly
    return go_on


def kept(node: Node) -> list[Any]:
    """Everything that its fetcher has open for later fetches."""
    fetcher = node.fetcher
    parts = [fetcher._pairings, getattr(fetcher._control, "_channels", {})]
    parts += [getattr(puller, name, {}) for puller in fetcher._pullers.values() for name in ("_opened",)]
    return [one for part in parts for one in part]


class TransportConformance:
    """Inherited by one class per transport."""

    @pytest.fixture
    def harness(self) -> TransportHarness:
        raise NotImplementedError

    @asynccontextmanager
    async def nodes(self, harness, layouts=(None, None), num_blocks: int = 32) -> AsyncIterator[tuple[Node, Node]]:
        pair = [Node(harness, layout or make_layout(), seed, num_blocks) for seed, layout in enumerate(layouts)]
        for node in pair:
            node.source.start()
        try:
            yield pair[0], pair[1]
        finally:
            for node in pair:
                await node.fetcher.close()
                node.source.close()
        for node in pair:
            await eventually(lambda node=node: all(lease.active_reads == 0 for lease in node.leases._open.values()))

    @pytest.mark.parametrize(
        ("source_ids", "targets"),
        [
            ([], {0: []}),
            ([5], {0: [9]}),
            ([5, 6], {1: []}),
            (list(range(32)), {0: list(range(32))}),
            ([31, 0, 7, 8, 3], {0: [2, 30, 4, 5, 0]}),
            ([31, 0, 7, 8, 3], {2: [1, 0, 31]}),
            ([31, 0, 7, 8, 3, 9], {0: [2], 2: [30, 4], 5: [0]}),
        ],
    )
    async def test_blocks_arrive_whole_and_nothing_else_is_touched(self, harness, source_ids, targets):
        async with self.nodes(harness) as (prefill, decode):
            before = [layer.copy() for layer in decode.layers]
            handoff = prefill.publish(source_ids)
            result = await decode.fetcher.fetch(handoff, targets, decode.pool)
            assert result.outcome == "ok", result
            assert result.num_bytes == sum(map(len, targets.values())) * NUM_LAYERS * BLOCK_BYTES
            assert result.wait_s >= 0
            assert result.wire_s >= 0
            for layer in range(NUM_LAYERS):
                expected = before[layer]
                for first, blocks in targets.items():
                    expected[blocks] = prefill.layers[layer][source_ids[first : first + len(blocks)]]
                np.testing.assert_array_equal(decode.layers[layer], expected)

    @pytest.mark.parametrize(
        ("num_layers", "block_bytes", "ids"),
        [(NUM_LAYERS, 300_001, [9, 1, 2, 3, 17, 4, 8, 30, 31]), (1, frames.TARGET_FRAME_BYTES + 7, [1, 0])],
        ids=["a layer", "a block"],
    )
    async def test_what_is_larger_than_one_frame_arrives_whole(self, harness, num_layers, block_bytes, ids):
        layout = make_layout(num_layers=num_layers, block_bytes=block_bytes)
        async with self.nodes(harness, (layout, layout), num_blocks=max(ids) + 1) as (prefill, decode):
            result = await decode.fetcher.fetch(prefill.publish(ids), {0: ids[::-1]}, decode.pool)
            assert result.outcome == "ok", result
            for ours, theirs in zip(decode.layers, prefill.layers, strict=True):
                np.testing.assert_array_equal(ours[ids[::-1]], theirs[ids])

    async def test_concurrent_handoffs_in_both_directions(self, harness):
        async with self.nodes(harness, num_blocks=64) as (left, right):
            # The upper half is published and read, the lower half is written, on both sides at once.
            halves = [list(range(start, start + 4)) for start in range(32, 64, 4)]
            offers = [(left.publish(ids, f"l{i}"), right.publish(ids, f"r{i}")) for i, ids in enumerate(halves)]
            targets = [list(range(start, start + 4)) for start in range(0, 32, 4)]
            results = await asyncio.gather(
                *(right.fetcher.fetch(offers[i][0], {0: target}, right.pool) for i, target in enumerate(targets)),
                *(left.fetcher.fetch(offers[i][1], {0: target}, left.pool) for i, target in enumerate(targets)),
            )
            assert {result.outcome for result in results} == {"ok"}, results
            for layer in range(NUM_LAYERS):
                np.testing.assert_array_equal(right.layers[layer][:32], left.layers[layer][32:])
                np.testing.assert_array_equal(left.layers[layer][:32], right.layers[layer][32:])

    async def test_cancel_in_mid_fetch_stops_writing_and_ends_the_read(self, harness):
        async with self.nodes(harness, (LONG, LONG)) as (prefill, decode):
            go_on = harness.slow_down(prefill, decode)
            go_on.clear()
            ids = [1, 2, 3]
            handoff = prefill.publish(ids)
            task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [4, 5, 6]}, decode.pool))
            await eventually(lambda: prefill.source.bytes_sent_total > 0)
            task.cancel()
            go_on.set()  # some transports wait for what they have begun
            with pytest.raises(asyncio.CancelledError):
                await task
            after_cancel = [layer.copy() for layer in decode.layers]
            await asyncio.sleep(0.05)
            np.testing.assert_array_equal(decode.layers, after_cancel)
            await eventually(lambda: prefill.leases._open[handoff.handoff_id].active_reads == 0)
            assert await self._fetch_ok(prefill, decode, handoff, ids)

    async def test_cancel_before_it_began(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            ids = [1, 2, 3]
            handoff = prefill.publish(ids)
            task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [4, 5, 6]}, decode.pool))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await self._fetch_ok(prefill, decode, handoff, ids)

    async def test_release_is_idempotent_and_silent_for_unknown_ids(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            handoff = prefill.publish([1, 2], owner="a")
            await decode.fetcher.release(handoff)
            await decode.fetcher.release(handoff)
            await decode.fetcher.release(prefill.announce([1]))
            assert prefill.leases.take_finished() == {"a"}
            assert prefill.leases.take_finished() == set()
            result = await decode.fetcher.fetch(handoff, {0: [1, 2]}, decode.pool)
            assert (result.outcome, result.reason) == ("failed", errors.UNKNOWN_HANDOFF)

    async def test_release_while_reading_takes_effect_when_the_read_ends(self, harness):
        async with self.nodes(harness, (LONG, LONG)) as (prefill, decode):
            go_on = harness.slow_down(prefill, decode)
            go_on.clear()
            handoff = prefill.publish([1, 2, 3], owner="a")
            task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [4, 5, 6]}, decode.pool))
            await eventually(lambda: prefill.source.bytes_sent_total > 0)
            await decode.fetcher.release(handoff)
            assert prefill.leases.take_finished() == set()
            go_on.set()
            assert (await task).outcome == "ok"
            await eventually(lambda: prefill.leases.stats().open_leases == 0)
            assert prefill.leases.take_finished() == {"a"}

    async def test_an_expired_lease_is_named_and_cannot_be_renewed(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            handoff = prefill.publish([1], owner="a", lease_s=0.01)
            await asyncio.sleep(0.02)
            result = await decode.fetcher.fetch(handoff, {0: [1]}, decode.pool)
            assert (result.outcome, result.reason) == ("failed", errors.LEASE_EXPIRED)
            with pytest.raises(errors.LeaseExpired):
                await decode.fetcher.renew(handoff)
            assert prefill.leases.take_finished() == {"a"}

    async def test_an_unknown_handoff_is_refused(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            prefill.source.server._publish_wait_s = 0.02
            handoff = prefill.announce([1])
            result = await decode.fetcher.fetch(handoff, {0: [1]}, decode.pool)
            assert (result.outcome, result.reason) == ("failed", errors.UNKNOWN_HANDOFF)
            with pytest.raises(errors.UnknownHandoff):
                await decode.fetcher.renew(handoff)

    async def test_more_blocks_than_were_published_are_refused(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            short = prefill.announce([1, 2, 3])
            prefill.leases.publish(short.handoff_id, "a", [1], 4, LEASE_S)
            result = await decode.fetcher.fetch(short, {0: [1, 2, 3]}, decode.pool)
            assert (result.outcome, result.reason) == ("failed", errors.BAD_REQUEST)

    async def test_a_source_that_is_gone_is_unreachable(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            handoff = prefill.publish([1])
            prefill.source.close()
            result = await decode.fetcher.fetch(handoff, {0: [1]}, decode.pool)
            assert (result.outcome, result.reason) == ("failed", errors.UNREACHABLE)
            with pytest.raises(errors.TransferFailed):
                await decode.fetcher.release(handoff)

    async def test_a_source_closed_in_mid_fetch_is_a_failure_not_a_hang(self, harness):
        async with self.nodes(harness, (LONG, LONG)) as (prefill, decode):
            harness.slow_down(prefill, decode)
            handoff = prefill.publish([1, 2, 3])
            task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [4, 5, 6]}, decode.pool))
            await eventually(lambda: prefill.source.bytes_sent_total > 0)
            await asyncio.to_thread(prefill.source.close)
            result = await asyncio.wait_for(task, PATIENCE_S)
            if result.outcome == "ok":  # what was mapped outlives its owner
                assert np.array_equal(decode.layers, [self._moved(prefill, decode, n) for n in range(LONG.num_layers)])
            else:
                assert (result.outcome, result.reason) == ("failed", errors.UNREACHABLE)

    def _moved(self, prefill: Node, decode: Node, layer: int) -> np.ndarray:
        expected = decode.layers[layer].copy()
        expected[[4, 5, 6]] = prefill.layers[layer][[1, 2, 3]]
        return expected

    @pytest.mark.parametrize(
        ("final_at_first", "told"), [(2, False), (0, True)], ids=["the step is not told", "before any block is final"]
    )
    async def test_a_partial_handoff_is_followed_to_its_end(self, harness, final_at_first, told):
        async with self.nodes(harness) as (prefill, decode):
            ids, targets = [7, 3, 9, 1, 12], [20, 4, 22, 5, 24]
            handoff = msgspec.structs.replace(prefill.announce(ids), complete=False)
            prefill.leases.extend(handoff.handoff_id, "a", ids[:final_at_first])
            task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: targets}, decode.pool))
            await eventually(lambda: prefill.leases._open[handoff.handoff_id].active_reads == 1)
            for final in (2, 3):
                prefill.leases.extend(handoff.handoff_id, "a", ids[:final])
                await eventually(
                    lambda final=final: np.array_equal(
                        decode.layers[-1][targets[:final]], prefill.layers[-1][ids[:final]]
                    )
                )
            assert not task.done()
            if told:
                prefill.leases.begin_last_step({handoff.handoff_id: ids, "nobody-follows": [11]})
                for layer in range(NUM_LAYERS):
                    prefill.leases.end_layer(layer + 1)
                prefill.leases.begin_last_step({})
            prefill.leases.publish(handoff.handoff_id, "a", ids, 20, LEASE_S, first_token=77)
            result = await asyncio.wait_for(task, PATIENCE_S)
            assert (result.outcome, result.first_token) == ("ok", 77), result
            assert result.num_bytes == 5 * NUM_LAYERS * BLOCK_BYTES
            for ours, theirs in zip(decode.layers, prefill.layers, strict=True):
                np.testing.assert_array_equal(ours[targets], theirs[ids])

    @pytest.mark.parametrize("final", [0, 2])
    async def test_a_revoked_handoff_fails_whoever_follows_it(self, harness, final):
        async with self.nodes(harness) as (prefill, decode):
            handoff = msgspec.structs.replace(prefill.announce([1, 2, 3]), complete=False)
            prefill.leases.extend(handoff.handoff_id, "a", [1, 2][:final])
            task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [4, 5, 6]}, decode.pool))
            await eventually(lambda: prefill.leases._open[handoff.handoff_id].active_reads == 1)
            await eventually(lambda: prefill.source.bytes_sent_total > 0 or not final)
            prefill.leases.revoke(handoff.handoff_id)
            result = await asyncio.wait_for(task, PATIENCE_S)
            assert (result.outcome, result.reason) == ("failed", errors.REVOKED), result
            assert final or result.num_bytes == 0

    async def test_cancelling_while_nothing_is_ready_ends_the_read(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            handoff = msgspec.structs.replace(prefill.announce([1, 2]), complete=False)
            prefill.leases.extend(handoff.handoff_id, "a", [])
            task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [4, 5]}, decode.pool))
            await eventually(lambda: prefill.leases._open[handoff.handoff_id].active_reads == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, PATIENCE_S)
            await eventually(lambda: prefill.leases._open[handoff.handoff_id].active_reads == 0)

    @pytest.mark.parametrize(("their_ranks", "our_ranks"), [(2, 1), (1, 2), (4, 2), (2, 2)])
    async def test_heads_are_joined_or_split_between_unequal_ranks(self, harness, their_ranks, our_ranks):
        whole = np.random.default_rng(5).integers(0, 256, (NUM_LAYERS, 32, 2400), dtype=np.uint8)

        def nodes_of(ranks: int) -> list[Node]:
            layout = make_layout(tensor_parallel_size=ranks, block_bytes=2400 // ranks)
            return [Node(harness, layout, seed, rank=seed) for seed in range(ranks)]

        prefill, decode = nodes_of(their_ranks), nodes_of(our_ranks)
        for rank, node in enumerate(prefill):
            node.source.start()
            for layer, rows in zip(whole, node.layers, strict=True):
                rows[:] = layer[:, rank * 2400 // their_ranks :][:, : 2400 // their_ranks]
        ids, targets = [9, 2, 3, 30], [1, 2, 8, 5]
        handoff = msgspec.structs.replace(
            prefill[0].announce(ids), addresses=tuple(node.source.address for node in prefill)
        )
        for node in prefill:
            node.leases.publish(handoff.handoff_id, "a", ids, 16, LEASE_S)
        try:
            for rank, node in enumerate(decode):
                result = await node.fetcher.fetch(handoff, {0: targets}, node.pool)
                assert result.outcome == "ok", result
                for layer, rows in zip(whole, node.layers, strict=True):
                    expected = layer[:, rank * 2400 // our_ranks :][:, : 2400 // our_ranks]
                    np.testing.assert_array_equal(rows[targets], expected[ids])
            for node in decode:
                assert all(source.leases.stats().open_leases == 1 for source in prefill[-1:])
                await node.fetcher.release(handoff)
            await eventually(lambda: all(node.leases.stats().open_leases == 0 for node in prefill))
            assert all(node.leases.take_finished() == {"a"} for node in prefill)
        finally:
            for node in (*prefill, *decode):
                await node.fetcher.close()
                node.source.close()

    async def test_a_source_restarted_under_the_same_address_is_met_anew(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            ids = [1, 2, 3]
            assert await self._fetch_ok(prefill, decode, prefill.publish(ids), ids)
            again = self.restarted(harness, prefill)
            try:
                assert await self._fetch_ok(again, decode, again.publish(ids), ids)
            finally:
                await again.fetcher.close()
                again.source.close()

    async def test_nothing_is_kept_of_a_source_that_is_forgotten_and_it_can_be_met_anew(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            ids = [1, 2, 3]
            handoff = prefill.publish(ids)
            for _ in range(2):
                assert await self._fetch_ok(prefill, decode, handoff, ids)
                assert kept(decode)
                decode.fetcher.forget_all_but(())
                assert not kept(decode)

    async def test_no_stream_leaves_anything_in_its_channel(self, harness, monkeypatch):
        calls, begin = [], SourceStream._begin
        monkeypatch.setattr(SourceStream, "_begin", lambda stream: calls.append(begin(stream)) or calls[-1])
        async with self.nodes(harness, (LONG, LONG)) as (prefill, decode):
            assert await self._fetch_ok(prefill, decode, prefill.publish([1], "whole"), [1])
            go_on = harness.slow_down(prefill, decode)
            go_on.clear()
            handoff = prefill.publish([1, 2, 3], "cut")
            task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [4, 5, 6]}, decode.pool))
            before = prefill.source.bytes_sent_total
            await eventually(lambda: prefill.source.bytes_sent_total > before)
            task.cancel()
            go_on.set()
            await asyncio.gather(task, return_exceptions=True)
            assert [call for call in calls if call._state.due] == []

    async def test_a_source_forgotten_in_mid_fetch_is_read_to_the_end(self, harness):
        async with self.nodes(harness, (LONG, LONG)) as (prefill, decode):
            go_on = harness.slow_down(prefill, decode)
            go_on.clear()
            handoff = prefill.publish([1, 2, 3])
            task = asyncio.create_task(self._fetch_ok(prefill, decode, handoff, [1, 2, 3]))
            await eventually(lambda: prefill.source.bytes_sent_total > 0)
            decode.fetcher.forget_all_but(())
            assert not task.done()
            go_on.set()
            assert await task
            assert not kept(decode)
            assert await self._fetch_ok(prefill, decode, handoff, [1, 2, 3])

    def restarted(self, harness: TransportHarness, node: Node) -> Node:
        """Another node, with other bytes, at the address of this one, which is closed."""
        port = int(node.source.address.rpartition(":")[2])
        node.source.close()
        again = Node(harness, node.layout, seed=99, port=port)
        again.source.start()
        assert again.source.address == node.source.address
        return again

    async def _fetch_ok(self, prefill: Node, decode: Node, handoff: KvHandoff, ids: list[int]) -> bool:
        targets = list(range(len(ids)))
        result = await decode.fetcher.fetch(handoff, {0: targets}, decode.pool)
        equal = all(
            np.array_equal(ours[targets], theirs[ids])
            for ours, theirs in zip(decode.layers, prefill.layers, strict=True)
        )
        return result.outcome == "ok" and equal


class ControlConformance:
    """What fetcher and control do alike for every transport: one of them inherits it."""

    async def test_release_that_overtakes_the_publication_frees_at_once(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            handoff = prefill.announce([1, 2])
            await decode.fetcher.release(handoff)
            prefill.leases.publish(handoff.handoff_id, "a", [1, 2], 8, LEASE_S)
            assert prefill.leases.take_finished() == {"a"}

    async def test_renewal_keeps_a_lease_alive(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            ids = [1]
            now_s = 0.0
            prefill.leases._clock = lambda: now_s
            handoff = prefill.publish(ids, lease_s=1.0)
            for _ in range(4):
                now_s += 0.9
                await decode.fetcher.renew(handoff)
            assert await self._fetch_ok(prefill, decode, handoff, ids)

    @pytest.mark.parametrize("targets", [[1, 1], [32, 0], [-1, 0], [1, 2, 3]])
    async def test_bad_targets_are_refused_before_anything_is_written(self, harness, targets):
        async with self.nodes(harness) as (prefill, decode):
            before = [layer.copy() for layer in decode.layers]
            result = await decode.fetcher.fetch(prefill.publish([1, 2]), {0: targets}, decode.pool)
            assert (result.outcome, result.reason) == ("failed", errors.BAD_REQUEST)
            np.testing.assert_array_equal(decode.layers, before)

    @pytest.mark.parametrize(("field", "value"), [("isa", "vec"), ("block_size", 8), ("wire_version", 99)])
    async def test_a_layout_mismatch_names_the_field_before_any_byte(self, harness, field, value):
        async with self.nodes(harness, (make_layout(**{field: value}), None)) as (prefill, decode):
            result = await decode.fetcher.fetch(prefill.publish([1]), {0: [1]}, decode.pool)
            assert (result.outcome, result.reason) == ("failed", errors.LAYOUT_MISMATCH)
            assert field in result.message
            assert repr(value) in result.message
            assert (result.num_bytes, prefill.source.bytes_sent_total) == (0, 0)
            assert (await decode.fetcher._control.describe(prefill.source.address)).layout == prefill.layout


class LayerConformance:
    """For transports that take the blocks of a prompt's last step layer by layer, as they are computed."""

    async def in_last_step(self, prefill: Node, decode: Node) -> tuple[KvHandoff, asyncio.Task[Any]]:
        """A fetch of blocks 7, 3, 9 and 1, of which two are there and the others computed, one layer so far."""
        handoff = msgspec.structs.replace(prefill.announce([7, 3, 9, 1]), complete=False)
        prefill.leases.extend(handoff.handoff_id, "a", [7, 3])
        task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [20, 4, 22, 5]}, decode.pool))
        await eventually(lambda: np.array_equal(decode.layers[-1][[20, 4]], prefill.layers[-1][[7, 3]]))
        prefill.leases.begin_last_step({handoff.handoff_id: [7, 3, 9, 1]})
        await asyncio.sleep(0.05)
        assert not np.array_equal(decode.layers[0][[22, 5]], prefill.layers[0][[9, 1]])
        prefill.leases.end_layer(1)
        await eventually(lambda: np.array_equal(decode.layers[0][[22, 5]], prefill.layers[0][[9, 1]]))
        return handoff, task

    async def test_a_prompt_of_one_step_travels_layer_by_layer_from_its_first_block(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            handoff = msgspec.structs.replace(prefill.announce([7, 3]), complete=False)
            prefill.leases.extend(handoff.handoff_id, "a", [])
            prefill.leases.begin_last_step({handoff.handoff_id: [7, 3]})
            prefill.leases.end_layer(1)
            task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [20, 4]}, decode.pool))
            await eventually(lambda: np.array_equal(decode.layers[0][[20, 4]], prefill.layers[0][[7, 3]]))
            assert not np.array_equal(decode.layers[1][[20, 4]], prefill.layers[1][[7, 3]])
            prefill.leases.end_layer(NUM_LAYERS)
            prefill.leases.publish(handoff.handoff_id, "a", [7, 3], 8, LEASE_S, first_token=77)
            result = await asyncio.wait_for(task, PATIENCE_S)
            assert (result.outcome, result.first_token) == ("ok", 77), result

    async def test_blocks_of_the_last_step_travel_layer_by_layer_as_they_are_computed(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            handoff, task = await self.in_last_step(prefill, decode)
            await asyncio.sleep(0.05)
            assert not np.array_equal(decode.layers[1][[22, 5]], prefill.layers[1][[9, 1]])
            prefill.leases.end_layer(NUM_LAYERS)
            await eventually(lambda: np.array_equal(decode.layers[-1][[22, 5]], prefill.layers[-1][[9, 1]]))
            assert not task.done()
            prefill.leases.publish(handoff.handoff_id, "a", [7, 3, 9, 1], 16, LEASE_S, first_token=77)
            result = await asyncio.wait_for(task, PATIENCE_S)
            assert (result.outcome, result.first_token) == ("ok", 77), result
            assert result.wire_s <= result.wait_s, "the wire's time is that of the last layer"

    async def test_what_is_published_in_the_middle_of_its_last_step_travels_whole(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            handoff, task = await self.in_last_step(prefill, decode)
            prefill.leases.publish(handoff.handoff_id, "a", [7, 3, 9, 1], 16, LEASE_S)
            assert (await asyncio.wait_for(task, PATIENCE_S)).outcome == "ok"
            for ours, theirs in zip(decode.layers, prefill.layers, strict=True):
                np.testing.assert_array_equal(ours[[20, 4, 22, 5]], theirs[[7, 3, 9, 1]])

    async def test_a_prefill_that_is_given_up_in_its_last_step_fails_whoever_follows_it(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            handoff, task = await self.in_last_step(prefill, decode)
            prefill.leases.revoke(handoff.handoff_id)
            result = await asyncio.wait_for(task, PATIENCE_S)
            assert (result.outcome, result.reason) == ("failed", errors.REVOKED), result

    async def test_cancelling_between_two_layers_ends_the_read(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            handoff, task = await self.in_last_step(prefill, decode)
            lease = prefill.leases._open[handoff.handoff_id]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually(lambda: lease.active_reads == 0)


class FrameConformance(LayerConformance):
    """For transports that send frames: what is damaged on the way is noticed."""

    @pytest.mark.parametrize("position", [0, 4, 9, 13, 17, 21, frames.HEADER_BYTES - 1, frames.HEADER_BYTES, -1])
    async def test_a_flipped_bit_anywhere_is_detected(self, harness, position):
        def flip(index: int, frame: bytes) -> Iterator[bytes]:
            damaged = bytearray(frame)
            if index == 1:
                damaged[position] ^= 0x10
            yield bytes(damaged)

        await self._expect_corrupted(harness, flip)

    @pytest.mark.parametrize("fault", ["drop", "double", "cut", "lengthen", "end_early"])
    async def test_lost_doubled_or_cut_frames_are_detected(self, harness, fault):
        def spoil(index: int, frame: bytes) -> Iterator[bytes]:
            faults = {
                "drop": [],
                "double": [frame, frame],
                "cut": [frame[:-1]],
                "lengthen": [frame + b"x"],
                "end_early": [],
            }
            if index != (NUM_LAYERS - 1 if fault == "end_early" else 1):
                yield frame
            else:
                yield from faults[fault]

        await self._expect_corrupted(harness, spoil)

    async def test_a_slow_reader_holds_the_source_back(self, harness):
        layout = make_layout(num_layers=48, block_bytes=1 << 20)
        async with self.nodes(harness, (layout, layout), num_blocks=2) as (prefill, decode):
            gate = threading.Event()
            write = decode.pool.write

            def slow_write(layer, block_ids, payload):
                gate.wait(PATIENCE_S)
                write(layer, block_ids, payload)

            decode.pool.write = slow_write
            handoff = prefill.publish([0, 1])
            task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [0, 1]}, decode.pool))
            await eventually(lambda: prefill.source.bytes_sent_total > 0)
            await asyncio.sleep(0.3)
            ahead_bytes = prefill.source.bytes_sent_total
            gate.set()
            assert (await task).outcome == "ok"
            assert ahead_bytes <= 24 << 20, f"{ahead_bytes >> 20} of 96 MiB left the source though nothing was read"

    async def _expect_corrupted(self, harness, alter) -> None:
        async with self.nodes(harness) as (prefill, decode):
            before = [layer.copy() for layer in decode.layers]
            alter_frames(prefill, alter)
            handoff = prefill.publish([1, 2])
            result = await decode.fetcher.fetch(handoff, {0: [8, 3]}, decode.pool)
            assert (result.outcome, result.reason) == ("failed", errors.CORRUPTED), result
            untouched = [block for block in range(32) if block not in (8, 3)]
            for layer, seen in zip(decode.layers, before, strict=True):
                np.testing.assert_array_equal(layer[untouched], seen[untouched])
