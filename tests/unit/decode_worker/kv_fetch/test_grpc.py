"""What is particular to the gRPC transport: slots, limits, hostile callers, the allocator."""

import asyncio
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import msgspec
import numpy as np
import pytest

from ridgeline.contracts import errors
from ridgeline.decode_worker.kv_fetch.fetcher import KvFetcher
from ridgeline.decode_worker.kv_fetch.grpc_puller import GrpcPuller
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.interfaces import FetchRequest
from ridgeline.kv_transfer.memory.glibc import keep_freed_memory
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.wire import grpc_methods
from ridgeline.prefill_worker.kv_source import grpc_source
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.grpc_source import GrpcKvSource
from ridgeline.prefill_worker.kv_source.lease import LeaseTable
from tests.support.patience import PATIENCE_S
from tests.support.samples import handoff_at, kv_layout

LAYOUT = kv_layout(block_size=4, num_layers=4, block_bytes=32)


@pytest.fixture
def pool():
    return HostMemory([np.full((8, 32), layer, np.uint8) for layer in range(4)])


@pytest.fixture
def source(pool):
    source = GrpcKvSource(RankCache(pool, LeaseTable(), LAYOUT), TransferOptions("127.0.0.1"), max_concurrent_fetches=1)
    source.start()
    yield source
    source.close()


def published(source, owner):
    source._leases.publish(owner, owner, [1, 2], 8, 30.0)
    return handoff_at(source.address, 2, owner)


def make_fetcher(kv_fetch_timeout_s):
    control = GrpcControl()
    options = TransferOptions("127.0.0.1", kv_fetch_timeout_s=kv_fetch_timeout_s)
    return KvFetcher(LAYOUT, control, [GrpcPuller(control)], options)


def request_for(handoff_id):
    return FetchRequest(
        handoff_id=handoff_id,
        runs=((0, 1),),
        layout=LAYOUT,
        part_start=0,
        part_bytes=LAYOUT.block_bytes,
    )


def refusal(source, method, message, **options):
    with grpc.insecure_channel(source.address) as channel:
        call = channel.unary_stream(f"/{grpc_methods.SERVICE}/{method}")(message, **options)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    return grpc_methods.error_of(caught.value, source.address)


async def test_fetches_beyond_the_slots_wait_their_turn(source, pool):
    real = source.server.frames

    def slowly(request, wanted):
        for frame in real(request, wanted):
            time.sleep(0.01)
            yield frame
        return None

    source.server.frames = slowly
    fetcher = make_fetcher(PATIENCE_S)
    layers = [np.zeros((8, 32), np.uint8) for _ in range(4)]
    target = HostMemory(layers)
    fetches = [fetcher.fetch(published(source, f"r{n}"), {0: [2 * n, 2 * n + 1]}, target) for n in range(4)]
    results = await asyncio.gather(*fetches)
    await fetcher.close()
    assert {result.outcome for result in results} == {"ok"}, results
    assert all((layer == index).all() for index, layer in enumerate(layers))


class Full:
    """No slot is free. After so many refusals a fetch has one second left, however long they took."""

    def __init__(self, refusals, silent_s=0.0):
        self.refusals, self.silent_s, self.asked = refusals, silent_s, 0

    def acquire(self, blocking):
        if self.asked >= self.refusals:
            time.sleep(self.silent_s)
        self.asked += 1
        return False

    def monotonic(self):
        return time.monotonic() + (PATIENCE_S - 1.0 if self.asked >= self.refusals else 0.0)


async def refused_by(source, pool, full, monkeypatch):
    monkeypatch.setattr("ridgeline.decode_worker.kv_fetch.stream.time", full)
    slots, source._fetch_slots = source._fetch_slots, full
    fetcher = make_fetcher(PATIENCE_S)
    result = await fetcher.fetch(published(source, "r"), {0: [1]}, pool)
    await fetcher.close()
    source._fetch_slots = slots
    return result


async def test_a_source_that_stays_busy_is_named_when_time_is_up(source, pool, monkeypatch):
    full = Full(refusals=3)
    result = await refused_by(source, pool, full, monkeypatch)
    assert (result.outcome, result.reason) == ("failed", errors.BUSY)
    assert full.asked >= 3


def test_a_call_whose_deadline_has_passed_is_not_taken_for_one_without_a_deadline(source):
    aborted = []

    class Late:
        def time_remaining(self):
            return 0.0

        def set_trailing_metadata(self, _metadata):
            pass

        def abort(self, code, details):
            aborted.append(code)
            raise RuntimeError(details)

    source._fetch_slots.acquire()
    with pytest.raises(RuntimeError, match="slots"), source._slot(Late()):
        pass
    source._fetch_slots.release()
    assert aborted == [grpc.StatusCode.RESOURCE_EXHAUSTED]


async def test_a_source_that_was_busy_and_is_silent_until_time_is_up_is_named_busy(source, pool, monkeypatch):
    # Silent, as a busy machine makes it at the last attempt.
    result = await refused_by(source, pool, Full(refusals=1, silent_s=1.5), monkeypatch)
    assert (result.outcome, result.reason) == ("failed", errors.BUSY)


async def test_a_silent_source_is_a_timeout(source, pool):
    fetcher = make_fetcher(0.2)
    result = await fetcher.fetch(handoff_at(source.address, 2, "never published"), {0: [1]}, pool)
    await fetcher.close()
    assert (result.outcome, result.reason) == ("failed", errors.TIMEOUT)
    assert result.wait_s >= 0.15


def test_a_pin_whose_reader_left_before_it_began_holds_nothing(source, monkeypatch):
    monkeypatch.setattr(grpc_source, "LONGEST_FETCH_S", 2 * PATIENCE_S)
    published(source, "r")
    leases, slot, begun = source._leases, source._slot, threading.Event()

    @contextmanager
    def late(context):
        with slot(context):
            begun.set()
            while context.add_callback(lambda: None):  # which gRPC refuses once the call has ended
                time.sleep(0.01)
            yield

    source._slot = late
    with grpc.insecure_channel(source.address) as channel:
        pin = channel.unary_stream(f"/{grpc_methods.SERVICE}/{grpc_methods.PIN}")
        call = pin(msgspec.msgpack.encode(request_for("r")), timeout=PATIENCE_S)
        assert begun.wait(PATIENCE_S)
        call.cancel()
        assert source._fetch_slots.acquire(timeout=PATIENCE_S), "the pin kept its slot"
    source._fetch_slots.release()
    assert leases._open["r"].active_reads == 0


def test_a_fetch_without_a_deadline_is_refused(source):
    request = request_for("h")
    error = refusal(source, grpc_methods.FETCH, msgspec.msgpack.encode(request))
    assert (error.reason, "deadline" in error.message) == (errors.BAD_REQUEST, True)


INVALID_UTF_8 = b"\x81\xaahandoff_id\xa2\xff\xfe"
NESTED = b"\x81\xa1a" + b"\x91" * 5000 + b"\x01"


@pytest.mark.parametrize("message", [b"", b"\xc1", msgspec.msgpack.encode({"handoff_id": 7}), INVALID_UTF_8, NESTED])
def test_an_unreadable_request_is_refused(source, message):
    assert refusal(source, grpc_methods.FETCH, message, timeout=PATIENCE_S).reason == errors.BAD_REQUEST
    assert refusal(source, grpc_methods.RENEW, message, timeout=PATIENCE_S).reason == errors.BAD_REQUEST


@pytest.mark.parametrize("told", [["x" * 129], ["r", -1], ["r", 0, 0], ["r", 0, 1 << 40], ["r", 1 << 20, 2]])
def test_a_release_that_would_fill_the_sources_memory_is_refused(source, told):
    published(source, "r")
    assert (
        refusal(source, grpc_methods.RELEASE, msgspec.msgpack.encode(told), timeout=PATIENCE_S).reason
        == errors.BAD_REQUEST
    )
    assert source._leases.stats().open_leases == 1


@pytest.mark.parametrize("answer", [b"", b"\xc1", INVALID_UTF_8, NESTED])
def test_a_sources_answer_that_makes_no_sense_is_corrupted(answer):
    with pytest.raises(errors.TransferFailed, match=errors.CORRUPTED):
        grpc_methods.read_answer(msgspec.msgpack.Decoder(grpc_methods.PinnedBlocks).decode, answer, "h:1")


@pytest.mark.parametrize("told", ["", "x", "-1", "1e9", b"1"])
def test_a_first_token_that_is_none_is_corrupted(told):
    call = SimpleNamespace(trailing_metadata=lambda: [("kv-first-token", told)])
    with pytest.raises(errors.TransferFailed, match=errors.CORRUPTED):
        grpc_methods.first_token_of(call)


def test_a_huge_request_is_refused_unread(source):
    assert refusal(source, grpc_methods.RELEASE, bytes(1 << 20), timeout=PATIENCE_S).reason != ""
    assert source._leases.stats().open_leases == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_the_allocator_settings_take():
    assert keep_freed_memory()


async def test_a_source_that_was_asked_and_never_paired_is_forgotten_with_the_others():
    control = GrpcControl()
    fetcher = KvFetcher.__new__(KvFetcher)
    fetcher._control, fetcher._pairings = control, {}
    for port in (7001, 7002):
        control.channel(f"127.0.0.1:{port}")
    fetcher.forget_all_but(["127.0.0.1:7002"])
    assert control.known() == {"127.0.0.1:7002"}
    await control.close()
