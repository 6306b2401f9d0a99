"""What a hostile peer may send a worker: absurd sizes, wrong ids, numbers out of range; and who listens where."""

import asyncio
import logging
import random
import struct
import subprocess
import sys
import tracemalloc
from contextlib import closing

import grpc
import msgspec
import numpy as np
import psutil
import pytest
import xxhash

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.contracts import errors
from ridgeline.contracts.handoff import WIRE_VERSION, KvHandoff, new_handoff_id
from ridgeline.kv_transfer.collective.wire import Invitation
from ridgeline.kv_transfer.control import GrpcControl, release_with_retries
from ridgeline.kv_transfer.interfaces import FetchProgress, FetchRequest
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.wire import frames, grpc_methods
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.grpc_source import GrpcKvSource
from ridgeline.prefill_worker.kv_source.lease import LeaseTable
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.fake_engine import FakeEngine
from tests.support.patience import PATIENCE_S
from tests.support.samples import LAYOUT

MIB = 1 << 20
U32, U64 = (1 << 32) - 1, (1 << 64) - 1
FIELDS = ("magic", "version", "layer", "first", "count", "end", "num_bytes")


def make_layers():
    return [np.zeros((8, LAYOUT.block_bytes), np.uint8) for _ in range(LAYOUT.num_layers)]


def make_pool():
    return HostMemory(make_layers())


def make_frame(payload=b"", **changes):
    """A frame of one block for position 0 of 4, but for these fields; its checksum is right."""
    values = dict(zip(FIELDS, (frames.MAGIC, WIRE_VERSION, 0, 0, 1, 4, len(payload)), strict=True)) | changes
    prefix = struct.pack("<IIIIIIQ", *values.values())
    checksum = xxhash.xxh3_64(prefix + payload).intdigest()
    return prefix + struct.pack("<Q", checksum) + payload


# --- frames


@pytest.mark.parametrize(
    "changes",
    [
        {"count": U32},
        {"count": 0},
        {"count": 5},
        {"num_bytes": U64},
        {"num_bytes": 1 << 40, "count": U32},
        {"end": U32},
        {"end": U32, "count": U32},
        {"end": 0},
        {"first": U32, "end": U32},
        {"first": 4, "end": 5},
        {"layer": U32},
    ],
)
def test_a_frame_that_claims_the_absurd_is_refused_before_memory_is_taken(changes):
    layers = make_layers()
    reader = frames.FrameReader(HostMemory(layers), [0, 1, 2, 3], FetchProgress(started_s=0.0))
    frame = make_frame(b"\xff" * LAYOUT.block_bytes, **changes)
    tracemalloc.start()
    try:
        with pytest.raises(errors.TransferFailed) as caught:
            reader.accept(frame)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.reason == errors.CORRUPTED
    assert peak_bytes < MIB // 4
    assert not any(layer.any() for layer in layers)


def accept_again_and_again(reader, frame):
    """More often than any stream of four blocks could be long."""
    for _ in range(16 * LAYOUT.num_layers):
        reader.accept(frame)


def test_no_header_whatsoever_makes_the_reader_fail_otherwise_or_write_outside():
    rng = random.Random(7)
    targets = [0, 1, 2, 3]
    for _ in range(3000):
        limits = dict(zip(FIELDS, (U32, U32, U32, U32, U32, U32, U64), strict=True))
        changes = {name: rng.choice([0, 1, 4, 5, limits[name]]) for name in rng.sample(FIELDS, rng.randint(0, 4))}
        payload = bytes([255]) * rng.choice([0, 1, LAYOUT.block_bytes, 4 * LAYOUT.block_bytes])
        layers = make_layers()
        reader = frames.FrameReader(HostMemory(layers), targets, FetchProgress(started_s=0.0))
        with pytest.raises(errors.TransferFailed):
            accept_again_and_again(reader, make_frame(payload, **changes))
        assert not any(layer[4:].any() for layer in layers)


@pytest.mark.parametrize("port", [0, -1, 65536, 1 << 62, "80"])
def test_an_invitation_to_a_port_that_does_not_exist_is_no_answer(port):
    message = msgspec.msgpack.encode({"incarnation": "i", "group": "g", "store_port": port})
    with pytest.raises(errors.TransferFailed, match="makes no sense"):
        grpc_methods.read_answer(msgspec.msgpack.Decoder(Invitation).decode, message, "peer")


_LISTEN = """
import sys, grpc
from concurrent.futures import ThreadPoolExecutor
from ridgeline.kv_transfer.wire import grpc_methods
def peak(): return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) >> 10
server = grpc.server(ThreadPoolExecutor(2), options=grpc_methods.server_options(2 << 20))
take = grpc.unary_stream_rpc_method_handler(lambda message, context: iter([message]))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", {"y": take}),))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
before = peak()
sys.stdin.readline()
print(peak() - before)
"""


def test_a_huge_message_is_refused_by_its_announced_length_and_takes_no_memory():
    with subprocess.Popen([sys.executable, "-c", _LISTEN], stdin=-1, stdout=-1, text=True) as server:
        port = server.stdout.readline().strip()
        unlimited = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
            call = channel.unary_stream("/x/y")(bytes(96 * MIB), timeout=PATIENCE_S)
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        grown_mib = int(server.communicate("\n", timeout=PATIENCE_S)[0])
    assert grown_mib < 16


# --- ids


@pytest.fixture
def source():
    source = GrpcKvSource(RankCache(make_pool(), LeaseTable(), LAYOUT), TransferOptions("127.0.0.1"))
    source.start()
    with closing(source):
        yield source


def ask(source, method, argument):
    with grpc.insecure_channel(source.address) as channel:
        call = channel.unary_stream(f"/{grpc_methods.SERVICE}/{method}")
        return list(call(msgspec.msgpack.encode(argument), timeout=PATIENCE_S))


def fetch_request(handoff_id, **changes):
    fields = {"runs": ((0, 2),), "part_start": 0, "part_bytes": LAYOUT.block_bytes, **changes}
    return FetchRequest(**{"handoff_id": handoff_id, "layout": LAYOUT, **fields})


def test_ids_have_128_random_bits_or_more_and_never_come_again():
    ids = {new_handoff_id() for _ in range(10_000)}
    assert len(ids) == 10_000
    assert min(len(each) for each in ids) * 6 >= 128  # base64url: six bits a character


@pytest.mark.parametrize("near", ["", "x", "right-id ", "right-i", "RIGHT-ID", "right-id\0", "*", "../right-id"])
def test_a_wrong_id_gets_no_block_no_pin_no_renewal_and_no_release(source, near):
    leases = source._leases
    source.server._publish_wait_s = 0.0
    leases.publish("right-id", "owner", [1, 2], 8, 30.0)
    for method in (grpc_methods.FETCH, grpc_methods.PIN):
        with pytest.raises(grpc.RpcError) as caught:
            ask(source, method, fetch_request(near))
        assert grpc_methods.reason_of(caught.value) == errors.UNKNOWN_HANDOFF
    with pytest.raises(grpc.RpcError):
        ask(source, grpc_methods.RENEW, near)
    ask(source, grpc_methods.RELEASE, grpc_methods.Release(near))
    assert leases.stats().open_leases == 1
    assert source.bytes_sent_total == 0


def test_an_id_that_is_longer_than_any_of_ours_is_refused_and_not_remembered(source):
    long = "x" * 60_000
    for method, argument in (
        (grpc_methods.FETCH, fetch_request(long)),
        (grpc_methods.RENEW, long),
        (grpc_methods.RELEASE, grpc_methods.Release(long)),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            ask(source, method, argument)
        assert grpc_methods.reason_of(caught.value) == errors.BAD_REQUEST
    assert not source._leases._endings


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": ((-(1 << 62), 2),)},
        {"runs": ((-1, 1),)},
        {"runs": ((2, 1),)},
        {"runs": ((0, 3),)},
        {"runs": (((1 << 63) - 1, (1 << 63) - 1),)},
        {"runs": ((0, (1 << 63) - 1),)},
        {"runs": ((0, -1),)},
        {"runs": ((1, 1), (0, 1))},
        {"runs": ((0, 1), (0, 1))},
        {"part_start": -1},
        {"part_bytes": 1 << 62},
        {"part_bytes": 0},
        {"part_start": LAYOUT.block_bytes, "part_bytes": 1},
        {"layout": {**msgspec.to_builtins(LAYOUT), "tensor_parallel_size": 0}},
        {"layout": {**msgspec.to_builtins(LAYOUT), "tensor_parallel_size": -1}},
        {"layout": {**msgspec.to_builtins(LAYOUT), "tensor_parallel_size": -(2**63)}},
    ],
)
def test_a_fetch_that_asks_for_the_absurd_is_a_bad_request(source, changes):
    source._leases.publish("h", "owner", [1, 2], 8, 30.0)
    request = {**msgspec.to_builtins(fetch_request("h")), **changes}
    with pytest.raises(grpc.RpcError) as caught:
        ask(source, grpc_methods.FETCH, request)
    assert grpc_methods.reason_of(caught.value) == errors.BAD_REQUEST, caught.value


async def test_logs_and_refusals_do_not_tell_an_id(source, caplog, monkeypatch):
    monkeypatch.setattr("ridgeline.kv_transfer.control.RELEASE_RETRY_DELAYS_S", (0.0,))
    caplog.set_level(logging.DEBUG)
    handoff = KvHandoff(
        handoff_id=(secret := new_handoff_id()),
        addresses=("127.0.0.1:1",),
        num_blocks=1,
        num_tokens=1,
        compatibility_hash="",
        lease_s=1.0,
        num_bytes=1,
    )

    async def unreachable(handoff):
        raise source._leases.refusal(handoff.handoff_id)

    await release_with_retries(unreachable, handoff)
    assert "could not release hand-off" in caplog.text
    assert secret not in caplog.text


# --- answers that make no sense


async def test_a_source_that_talks_nonsense_is_an_error_of_its_kind():
    server = grpc.aio.server()
    nonsense = {grpc_methods.DESCRIBE: grpc.unary_unary_rpc_method_handler(_nonsense)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(grpc_methods.SERVICE, nonsense),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    control = GrpcControl()
    with pytest.raises(errors.TransferFailed, match="makes no sense") as caught:
        await control.describe(f"127.0.0.1:{port}")
    assert caught.value.reason == errors.CORRUPTED
    await control.close()
    await server.stop(None)


async def _nonsense(message, context):
    return b"\xc1"


# --- ports


async def test_a_worker_and_its_source_listen_on_their_interface_only():
    from ridgeline.kv_transfer.collective.group import host_store

    before = listening()
    host = WorkerHost(FakeEngine(), HANDLERS)
    await host.start()
    source = GrpcKvSource(RankCache(make_pool(), LeaseTable(), LAYOUT), TransferOptions("127.0.0.1"))
    source.start()
    store = await asyncio.to_thread(host_store, "127.0.0.1")
    try:
        opened = listening() - before
        assert len(opened) >= 3
        assert {address for address, _ in opened} == {"127.0.0.1"}
    finally:
        del store
        source.close()
        await host.stop()


def listening():
    """(address, port) of every socket on which this process listens."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {
        (each.laddr.ip.removeprefix("::ffff:"), each.laddr.port)
        for each in connections
        if each.status == psutil.CONN_LISTEN
    }
