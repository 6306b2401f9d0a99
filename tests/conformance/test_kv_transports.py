"""Each transport against the conformance suite."""

import asyncio
import dataclasses
import threading

import msgspec
import numpy as np
import pytest

from ridgeline.contracts import errors
from ridgeline.decode_worker.kv_fetch.threads import MAX_CONCURRENT_FETCHES
from ridgeline.kv_transfer.collective.group import PairGroup
from ridgeline.kv_transfer.collective.wire import TENSOR_BYTES, WINDOW
from ridgeline.kv_transfer.transports import make_transport
from tests.conformance.check_transport import (
    LONG,
    ControlConformance,
    FrameConformance,
    LayerConformance,
    TransportConformance,
    eventually,
    slow_copies,
    slow_frames,
    slow_gathers,
    slow_pieces,
)
from tests.support.certificates import Authority
from tests.support.cuda_handles import made_up_handles
from tests.support.nixl import needs_nixl
from tests.support.patience import PATIENCE_S


class Harness:
    def __init__(self, name, slow_down):
        self._name = name
        self.slow_down = slow_down

    def make(self, cache, options):
        return make_transport(cache, dataclasses.replace(options, transport=self._name))


class FollowingConformance:
    """For transports that borrow from `FetchThreads`."""

    async def test_a_complete_handoff_never_waits_behind_those_that_follow_a_prefill(self, harness):
        async with self.nodes(harness) as (prefill, decode):
            partial = []
            for number in range(MAX_CONCURRENT_FETCHES):
                handoff = msgspec.structs.replace(prefill.announce([number, 16 + number]), complete=False)
                prefill.leases.extend(handoff.handoff_id, f"partial {number}", [number])
                partial.append(decode.fetcher.fetch(handoff, {0: [2 * number, 2 * number + 1]}, decode.pool))
            following = [asyncio.create_task(fetch) for fetch in partial]
            await eventually(
                lambda: sum(lease.active_reads for lease in prefill.leases._open.values()) == len(following)
            )
            result = await asyncio.wait_for(
                decode.fetcher.fetch(prefill.publish([30]), {0: [30]}, decode.pool), PATIENCE_S
            )
            assert result.outcome == "ok", result
            assert not any(task.done() for task in following)
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)


class TestGrpc(ControlConformance, FollowingConformance, FrameConformance, TransportConformance):
    @pytest.fixture
    def harness(self):
        return Harness("grpc", slow_frames)


class TestGrpcOverTls(TransportConformance):
    @pytest.fixture
    def harness(self, tmp_path):
        tls = Authority(tmp_path).issue()

        class TlsHarness(Harness):
            def make(self, cache, options):
                return super().make(cache, dataclasses.replace(options, tls=tls))

        return TlsHarness("grpc", slow_frames)


class TestShm(FollowingConformance, LayerConformance, TransportConformance):
    @pytest.fixture
    def harness(self):
        return Harness("shm", slow_copies)


class TestCudaIpc(FollowingConformance, LayerConformance, TransportConformance):
    """On host memory: all of it but the handles and the streams; `test_kv_cuda_ipc` has those, where there is a GPU."""

    @pytest.fixture
    def harness(self):
        harness = Harness("cuda-ipc", slow_copies)
        harness.exports_as_a_gpu = True
        with made_up_handles():
            yield harness


class TestCollective(FollowingConformance, LayerConformance, TransportConformance):
    """Over gloo: the pool is in host memory."""

    @pytest.fixture
    def harness(self):
        return Harness("collective", slow_gathers)

    @pytest.fixture(autouse=True)
    def a_tensor_for_each_block_of_each_layer(self, monkeypatch):
        monkeypatch.setitem(TENSOR_BYTES, "cpu", 1)

    @pytest.mark.parametrize("position", [0, 7, -1])
    @pytest.mark.parametrize("damaged", [0, 1])
    async def test_a_byte_that_changes_on_the_way_is_noticed(self, harness, position, damaged):
        async with self.nodes(harness) as (prefill, decode):
            before = [layer.copy() for layer in decode.layers]
            real, sums = prefill.pool.checksum, []

            def damaging(blocks):
                checksum = real(blocks)
                if len(sums) == damaged:
                    blocks.view(-1)[position] ^= 0x10
                sums.append(checksum)
                return checksum

            prefill.pool.checksum = damaging
            handoff = prefill.publish([1, 2])
            result = await decode.fetcher.fetch(handoff, {0: [8, 3]}, decode.pool)
            assert (result.outcome, result.reason) == ("failed", errors.CORRUPTED), result
            untouched = [block for block in range(32) if block not in (8, 3)]
            for layer, seen in zip(decode.layers, before, strict=True):
                np.testing.assert_array_equal(layer[untouched], seen[untouched])
            assert await self._fetch_ok(prefill, decode, handoff, [1, 2])

    async def test_a_slow_reader_holds_the_source_back(self, harness):
        async with self.nodes(harness, (LONG, LONG)) as (prefill, decode):
            gate, scatter, gather, gathered = threading.Event(), decode.pool.scatter, prefill.pool.gather, []

            def slow_scatter(*args):
                gate.wait(PATIENCE_S)
                scatter(*args)

            decode.pool.scatter = slow_scatter
            prefill.pool.gather = lambda *args: gathered.append(args) or gather(*args)
            task = asyncio.create_task(decode.fetcher.fetch(prefill.publish([1]), {0: [1]}, decode.pool))
            await eventually(lambda: gathered)
            await asyncio.sleep(0.3)
            ahead = len(gathered)
            gate.set()
            assert (await task).outcome == "ok"
            assert ahead <= 1 + WINDOW, f"{ahead} of 40 tensors were gathered though nothing was read"

    async def test_after_a_fetch_that_was_cancelled_the_next_one_forms_a_new_group(self, harness):
        async with self.nodes(harness, (LONG, LONG)) as (prefill, decode):
            go_on = harness.slow_down(prefill, decode)
            handoff, groups = prefill.publish([1, 2, 3]), set()
            for _ in range(4):
                go_on.clear()
                task = asyncio.create_task(decode.fetcher.fetch(handoff, {0: [4, 5, 6]}, decode.pool))
                await eventually(lambda: self.served(prefill))
                groups.update(self.served(prefill))
                task.cancel()
                go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await eventually(lambda: not self.served(prefill))
            assert await self._fetch_ok(prefill, decode, handoff, [1, 2, 3])
            assert len(groups) == 4
            assert len(self.served(prefill)) == 1

    async def test_a_fetch_that_waits_its_turn_can_be_cancelled_at_once(self, harness):
        async with self.nodes(harness, (LONG, LONG)) as (prefill, decode):
            go_on = harness.slow_down(prefill, decode)
            go_on.clear()
            first, second = prefill.publish([1, 2, 3], "a"), prefill.publish([7, 8, 9], "b")
            running = asyncio.create_task(decode.fetcher.fetch(first, {0: [4, 5, 6]}, decode.pool))
            await eventually(lambda: self.served(prefill))
            waiting = asyncio.create_task(decode.fetcher.fetch(second, {0: [7, 8, 9]}, decode.pool))
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not running.done()
            go_on.set()
            assert (await running).outcome == "ok"

    async def test_the_tensor_that_never_comes_is_a_timeout_and_the_next_fetch_forms_a_new_group(
        self, harness, monkeypatch
    ):
        async with self.nodes(harness) as (prefill, decode):
            ids = [1, 2]
            handoff = prefill.publish(ids)
            assert await self._fetch_ok(prefill, decode, handoff, ids)
            group = self.group(decode)
            decode.fetcher._options = dataclasses.replace(decode.fetcher._options, kv_fetch_timeout_s=0.4)
            with monkeypatch.context() as patched:
                patched.setattr(PairGroup, "send", lambda self, tensor, deadline_s: None)
                result = await decode.fetcher.fetch(handoff, {0: ids}, decode.pool)
            assert (result.outcome, result.reason) == ("failed", errors.TIMEOUT), result
            decode.fetcher._options = dataclasses.replace(decode.fetcher._options, kv_fetch_timeout_s=PATIENCE_S)
            assert await self._fetch_ok(prefill, decode, handoff, ids)
            assert self.group(decode) is not group

    async def test_a_fetch_that_is_cancelled_waits_no_longer_for_a_source_that_stands_still(self, harness, monkeypatch):
        monkeypatch.setattr("ridgeline.kv_transfer.collective.puller.STALLED_S", 0.2)
        monkeypatch.setattr("ridgeline.kv_transfer.collective.puller.REFUSAL_S", 0.1)
        async with self.nodes(harness) as (prefill, decode):
            go_on = harness.slow_down(prefill, decode)
            go_on.clear()
            task = asyncio.create_task(decode.fetcher.fetch(prefill.publish([1]), {0: [1]}, decode.pool))
            await eventually(lambda: prefill.source.bytes_sent_total > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, PATIENCE_S / 2)
            go_on.set()

    @pytest.mark.parametrize("end", ["source's", "fetcher's"])
    async def test_a_group_that_broke_while_idle_is_replaced(self, harness, end):
        async with self.nodes(harness) as (prefill, decode):
            ids = [1, 2]
            handoff = prefill.publish(ids)
            assert await self._fetch_ok(prefill, decode, handoff, ids)
            (served,) = self.served(prefill)
            (served.group if end == "source's" else self.group(decode)).break_off()
            assert await self._fetch_ok(prefill, decode, handoff, ids)
            await eventually(lambda: len(self.served(prefill)) == 1)

    async def test_both_ends_leave_when_either_closes_and_no_thread_stays(self, harness):
        others = set(threading.enumerate())
        async with self.nodes(harness) as (prefill, decode):
            assert await self._fetch_ok(prefill, decode, prefill.publish([1]), [1])
            assert len(self.served(prefill)) == 1
            await decode.fetcher.close()
            await eventually(lambda: not self.served(prefill))
        ours = ("kv-collect", "kv-serve")
        await eventually(
            lambda: not [each for each in set(threading.enumerate()) - others if each.name.startswith(ours)]
        )

    def group(self, decode):
        """The fetcher's end of its only group."""
        (peer,) = decode.fetcher._pullers["collective"]._opened.values()
        return peer.membership.group

    def served(self, prefill):
        """The source's ends of its groups."""
        return list(prefill.source._extensions[0]._groups.values())


@needs_nixl
class TestNixl(FollowingConformance, LayerConformance, TransportConformance):
    """Over UCX's shared memory: both ends are one process."""

    @pytest.fixture
    def harness(self):
        return Harness("nixl", slow_pieces)


@needs_nixl
class TestNixlOverTcp(FollowingConformance, LayerConformance, TransportConformance):
    """As between hosts without RDMA."""

    @pytest.fixture
    def harness(self, monkeypatch):
        monkeypatch.setenv("UCX_TLS", "tcp")
        return Harness("nixl", slow_pieces)
