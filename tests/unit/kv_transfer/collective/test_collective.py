"""Pair groups by themselves, both ends in this process, on gloo; and the tensors that the pools hand out."""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import numpy as np
import pytest
import torch

from ridgeline.contracts import errors
from ridgeline.kv_transfer.collective import group
from ridgeline.kv_transfer.collective.group import (
    FETCHER_RANK,
    SOURCE_RANK,
    PairGroup,
    host_store,
    join_store,
)
from ridgeline.kv_transfer.collective.puller import _Membership
from ridgeline.kv_transfer.collective.source import CollectiveSource
from ridgeline.kv_transfer.collective.wire import TENSOR_BYTES, TensorRequest
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.interfaces import FetchRequest
from ridgeline.kv_transfer.memory.device import DeviceMemory, weighted_sum
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.names import AUTO
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.wire import grpc_methods
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.grpc_source import GrpcKvSource
from ridgeline.prefill_worker.kv_source.lease import LeaseTable
from tests.support.patience import PATIENCE_S, in_the_end
from tests.support.samples import kv_layout

CPU = torch.device("cpu")
HOST = "127.0.0.1"
LAYOUT = kv_layout(num_layers=1, block_bytes=64)


@pytest.fixture(autouse=True)
def patient_ends(monkeypatch):
    """The ends of a group meet, however long this process stands still meanwhile."""
    monkeypatch.setattr(group, "FORM_S", PATIENCE_S)


def make_pair():
    store = host_store(HOST)
    with ThreadPoolExecutor(2) as threads:
        source = threads.submit(PairGroup.form, SOURCE_RANK, "key", store, HOST, CPU, "the fetcher")
        theirs = join_store(HOST, store.port)
        fetcher = threads.submit(PairGroup.form, FETCHER_RANK, "key", theirs, HOST, CPU, "the source")
        return source.result(), fetcher.result()


@pytest.fixture
def pair():
    source, fetcher = make_pair()
    yield source, fetcher
    source.break_off()
    fetcher.break_off()


def soon():
    return time.monotonic() + PATIENCE_S


def numbers(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


def test_tensors_arrive_in_the_order_they_were_sent(pair):
    source, fetcher = pair
    sent = [numbers(size, size) for size in (1, 5, 3 << 20)]
    with ThreadPoolExecutor(1) as threads:
        sendings = [threads.submit(source.send, tensor, soon()) for tensor in sent]
        for tensor, sending in zip(sent, sendings, strict=True):
            got = torch.empty_like(tensor)
            fetcher.receive(got, soon())
            assert torch.equal(got, tensor)
            sending.result(PATIENCE_S)


def test_a_tensor_that_never_comes_is_a_timeout_and_breaks_the_group(pair):
    _, fetcher = pair
    with pytest.raises(errors.TransferFailed) as caught:
        fetcher.receive(torch.empty(4, dtype=torch.uint8), time.monotonic() + 0.1)
    assert caught.value.reason == errors.TIMEOUT
    assert fetcher.broken


class NothingComes:
    """As gloo's own: waits for so many whole milliseconds, and not a moment longer."""

    def wait(self, patience: timedelta) -> None:
        until_s = time.monotonic() + (patience // timedelta(milliseconds=1)) / 1e3
        while time.monotonic() < until_s:
            pass
        raise RuntimeError("timed out")


def test_a_wait_that_ends_on_time_is_told_as_a_timeout_however_soon_after(pair, monkeypatch):
    _, fetcher = pair
    end = fetcher._end
    monkeypatch.setattr(end, "post_receive", lambda _: NothingComes())
    monkeypatch.setattr(end, "close", lambda: None)  # closing takes a while, in which the time may run out after all
    with pytest.raises(errors.TransferFailed) as caught:
        fetcher.receive(torch.empty(4, dtype=torch.uint8), time.monotonic() + 0.0309)
    assert caught.value.reason == errors.TIMEOUT


@pytest.mark.parametrize("who", [SOURCE_RANK, FETCHER_RANK])
def test_breaking_off_releases_who_waits_at_either_end(pair, who):
    source, fetcher = pair
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(fetcher.receive, torch.empty(4, dtype=torch.uint8), soon())
        time.sleep(0.1)
        pair[who].break_off()
        with pytest.raises(errors.TransferFailed) as caught:
            waiting.result(PATIENCE_S)
    assert caught.value.reason == errors.UNREACHABLE, "and not a timeout"
    with pytest.raises(errors.TransferFailed):
        source.send(numbers(4), soon())


def test_an_end_that_nobody_meets_says_so_in_time(monkeypatch):
    monkeypatch.setattr(group, "FORM_S", 0.3)
    store = host_store(HOST)
    with pytest.raises(errors.TransferFailed) as caught:
        PairGroup.form(SOURCE_RANK, "key", store, HOST, CPU, "the fetcher")
    assert caught.value.reason == errors.UNREACHABLE


def test_a_store_that_is_not_there_is_unreachable(monkeypatch):
    monkeypatch.setattr(group, "FORM_S", 0.2)
    with pytest.raises(errors.TransferFailed) as caught:
        join_store(HOST, 1)
    assert caught.value.reason == errors.UNREACHABLE


def test_a_group_leaves_no_thread_of_the_operating_system_behind():
    make_pair()[0].break_off()  # what the first one loads stays
    before = native_threads()
    for _ in range(3):
        source, fetcher = make_pair()
        source.break_off()
        fetcher.break_off()
        del source, fetcher
    in_the_end(lambda: native_threads() <= before)


def native_threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()


def test_auto_does_not_pick_the_collective():
    assert "collective" not in AUTO, "with nccl it has not run anywhere yet"


BOTH = range(2)


def pools(seed, num_blocks=8, block_bytes=101):
    """The same blocks three times: in host memory, on a device, and there with layers that are apart."""
    layers = np.random.default_rng(seed).integers(0, 256, (2, num_blocks, block_bytes), dtype=np.uint8)
    together, apart = torch.from_numpy(layers.copy()), [torch.from_numpy(layer.copy()) for layer in layers]
    return (
        (layers, HostMemory(list(layers))),
        (together.numpy(), DeviceMemory(list(together))),
        ([layer.numpy() for layer in apart], DeviceMemory(apart)),
    )


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("chosen", [BOTH, range(1, 2)])
def test_gathered_blocks_are_a_copy_and_scattered_ones_touch_nothing_else(kind, chosen):
    layers, pool = pools(1)[kind]
    before, part = np.array(layers), pool.part(3, 40)
    gathered = part.gather(chosen, [5, 0, 2])
    assert gathered.is_contiguous()
    np.testing.assert_array_equal(gathered.numpy(), before[chosen.start : chosen.stop, [5, 0, 2], 3:43])
    staged = part.staging(len(chosen), 3)
    staged.copy_(gathered)
    gathered.zero_()
    np.testing.assert_array_equal(np.array(layers), before)
    part.scatter(chosen, [7, 1, 3], staged)
    for layer in chosen:
        before[layer, [7, 1, 3], 3:43] = before[layer, [5, 0, 2], 3:43]
    np.testing.assert_array_equal(np.array(layers), before)


def test_ids_layers_and_shapes_that_do_not_fit_are_refused():
    layers, pool = pools(1)[0]
    before = np.array(layers)
    with pytest.raises(ValueError, match="outside the pool"):
        pool.gather(BOTH, [8])
    with pytest.raises(ValueError, match="outside the pool"):
        pool.scatter(BOTH, [-1], pool.staging(2, 1))
    with pytest.raises(ValueError, match="does not fill"):
        pool.scatter(BOTH, [1, 2], pool.staging(2, 1))
    with pytest.raises(ValueError, match="does not fill"):
        pool.scatter(range(1), [1], pool.staging(2, 1))
    with pytest.raises(ValueError, match="of 2 layers"):
        pool.gather(range(1, 3), [1])
    np.testing.assert_array_equal(np.array(layers), before)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_checksum_tells_every_changed_byte(kind):
    _, pool = pools(1)[kind]
    blocks = pool.gather(BOTH, [3, 4])
    [right] = pool.on_host([pool.checksum(blocks)])
    for position in range(blocks.numel()):
        for bit in (1, 0x80, 0xFF):
            blocks.view(-1)[position] ^= bit
            assert pool.on_host([pool.checksum(blocks)]) != [right]
            blocks.view(-1)[position] ^= bit
    assert pool.on_host([pool.checksum(blocks)] * 2) == [right, right]
    assert pool.on_host([]) == []


def test_the_weighted_sum_tells_words_that_changed_places():
    words = torch.tensor([0, 1, -(1 << 31), (1 << 31) - 1, 1 << 30, -1], dtype=torch.int32)
    right = weighted_sum(words.view(torch.uint8))
    for first in range(len(words)):
        for second in range(first):
            swapped = words.clone()
            swapped[first], swapped[second] = words[second].item(), words[first].item()
            assert weighted_sum(swapped.view(torch.uint8)) != right, (first, second)


def test_the_weighted_sum_of_no_more_than_a_few_bytes_is_defined():
    assert len({int(weighted_sum(numbers(size, seed=3))) for size in (1, 2, 3, 4, 5)}) == 5
    assert weighted_sum(torch.empty(0, dtype=torch.uint8)) == 0


@contextlib.asynccontextmanager
async def joining(**options):
    """A source, and a function by which another fetching rank joins a group with it."""
    pool = HostMemory([np.zeros((8, 64), np.uint8)])
    extension = CollectiveSource(pool, HOST)
    source = GrpcKvSource(
        RankCache(pool, LeaseTable(), LAYOUT),
        TransferOptions(HOST),
        [extension],
        **options,
    )
    source.start()
    control, members = GrpcControl(), []

    def join():
        channel = control.channel(source.address)
        members.append(_Membership.join(channel, source.address, source.server.incarnation, HOST, CPU))

        return members[-1]

    try:
        yield control, source, join
    finally:
        for member in members:
            member.leave()
        source.close()
        await control.close()


async def test_a_source_joins_a_group_with_each_of_more_fetching_ranks_than_it_serves_at_a_time():
    async with joining(max_concurrent_fetches=1) as (control, source, join):
        for _ in range(24):
            join()
        assert (await control.describe(source.address)).incarnation == source.server.incarnation, "it answers others"


async def test_a_group_beyond_those_that_a_source_can_have_is_refused_in_words(monkeypatch):
    monkeypatch.setattr("ridgeline.kv_transfer.collective.source.MAX_GROUPS", 1)
    async with joining() as (_, _, join):
        join()
        with pytest.raises(errors.TransferFailed, match="is in 1 pair groups already"):
            join()


@pytest.mark.parametrize(
    ("changes", "pinned", "reason"),
    [
        pytest.param({}, True, None, id="what is pinned"),
        pytest.param({}, False, errors.UNKNOWN_HANDOFF, id="what is not"),
        pytest.param({"first_layer": -1}, True, errors.BAD_REQUEST, id="a layer before the first"),
        pytest.param({"end_layer": 2}, True, errors.BAD_REQUEST, id="a layer after the last"),
        pytest.param({"end_layer": 0}, True, errors.BAD_REQUEST, id="no layer"),
        pytest.param({"num_blocks": 3}, True, errors.BAD_REQUEST, id="more blocks than there are"),
        pytest.param({"first_block": 2}, True, errors.BAD_REQUEST, id="a block after the last"),
        pytest.param({"num_blocks": 1 << 62}, True, errors.BAD_REQUEST, id="an absurd number"),
        pytest.param({"num_blocks": 2, "largest_bytes": 1}, True, errors.BAD_REQUEST, id="a tensor that is too large"),
    ],
)
async def test_a_source_sends_only_what_its_fetcher_has_pinned(changes, pinned, reason, monkeypatch):
    asked = {"first_layer": 0, "end_layer": 1, "first_block": 0, "num_blocks": 1} | changes
    monkeypatch.setitem(TENSOR_BYTES, "cpu", asked.pop("largest_bytes", 1 << 20))
    async with joining() as (_, source, join):
        member, leases = join(), source._leases
        leases.publish("h", "r", [1, 2], 8, 30.0)
        request = FetchRequest(
            handoff_id="h",
            runs=((0, 2),),
            layout=LAYOUT,
            part_start=0,
            part_bytes=64,
        )
        ask = TensorRequest(group=member._name, number=0, request=request, **asked)
        with leases.reading("h") if pinned else contextlib.nullcontext():
            call = member._ask.future(msgspec.msgpack.encode(ask), timeout=PATIENCE_S)
            if reason is None:
                member.group.receive(torch.empty(64, dtype=torch.uint8), soon())
                assert isinstance(msgspec.msgpack.decode(call.result()), int)
            else:
                assert grpc_methods.reason_of(call.exception()) == reason
