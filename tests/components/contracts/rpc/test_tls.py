"""Mutual TLS between router, workers and KV sources: real gRPC, real certificates. A fetch: tests/conformance."""

import asyncio
import dataclasses
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest

from ridgeline.cluster.config.loader import ConfigError, load_config
from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.contracts import errors
from ridgeline.contracts.errors import WorkerLost
from ridgeline.contracts.rpc.tls import TlsFileError, TlsFiles
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.grpc_source import GrpcKvSource
from ridgeline.prefill_worker.kv_source.lease import LeaseTable
from ridgeline.worker_runtime.client import WorkerClient
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.certificates import Authority
from tests.support.fake_engine import FakeEngine, make_task
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT
from tests.support.task_deltas import task_deltas


@pytest.fixture
def ours(tmp_path):
    return Authority(tmp_path, "ours")


@pytest.fixture
def strangers(tmp_path, ours):
    """Every wrong way to come, by name; None is plain text."""
    theirs = Authority(tmp_path, "theirs").issue()
    return {
        "of another authority": theirs,
        "that trusts us and shows another's certificate": TlsFiles(ours.ca_file, theirs.cert_file, theirs.key_file),
        "in plain text": None,
    }


@asynccontextmanager
async def worker(tls):
    engine = FakeEngine()
    engine.config = dataclasses.replace(engine.config, transfer=TransferOptions("127.0.0.1", tls=tls))
    host = WorkerHost(engine, HANDLERS)
    await host.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield host
    finally:
        await host.stop()


@asynccontextmanager
async def router_client(address, tls):
    client = WorkerClient(address, "router", tls=tls)
    running = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.wait([running])
        await client.close()


async def test_router_and_worker_with_certificates_of_one_authority_serve(ours):
    async with worker(ours.issue("worker")) as host, router_client(host.address, ours.issue("router")) as client:
        await client.wait_connected(PATIENCE_S)
        async with aclosing(task_deltas(client, make_task(max_tokens=3))) as deltas:
            assert [len(delta.token_ids) async for delta in deltas] == [1, 1, 1]


async def test_a_worker_refuses_every_other_router_and_the_router_says_why(ours, strangers):
    async with worker(ours.issue()) as host:
        for name, tls in strangers.items():
            async with router_client(host.address, tls) as client:
                with pytest.raises(WorkerLost, match=r"security\.tls"):
                    await client.describe()
                await eventually(lambda client=client: client._why_lost)
                with pytest.raises(WorkerLost, match=r"security\.tls"):
                    await client.wait_connected(0.0)
                assert not client.connected, name


async def test_a_router_with_certificates_refuses_a_worker_in_plain_text(ours):
    async with worker(None) as host, router_client(host.address, ours.issue()) as client:
        with pytest.raises(WorkerLost, match=r"handshake.*security\.tls"):
            await client.describe()


async def test_a_source_answers_its_own_and_refuses_every_other_peer(ours, strangers):
    pool = HostMemory([np.zeros((8, LAYOUT.block_bytes), np.uint8)] * LAYOUT.num_layers)
    source = GrpcKvSource(RankCache(pool, LeaseTable(), LAYOUT), TransferOptions("127.0.0.1", tls=ours.issue()))
    source.start()
    try:
        for tls in strangers.values():
            control = GrpcControl(tls=tls)
            with pytest.raises(errors.TransferFailed, match=r"security\.tls"):
                await control.describe(source.address)
            await control.close()
        control = GrpcControl(tls=ours.issue("decode"))
        assert (await control.describe(source.address)).offers == {}, "torch.distributed is not offered beside TLS"
        await control.close()
    finally:
        source.close()


# --- files and configuration


def test_files_that_two_peers_would_accept_pass(ours):
    ours.issue().check()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda a, b: dataclasses.replace(a.issue(), ca_file=b.ca_file), "would be refused"),
        (lambda a, b: a.issue("elsewhere", server_name="example.org"), "DNS:ridgeline"),
        (lambda a, b: a.issue("old", valid_days=-1), "expired"),
        (lambda a, b: dataclasses.replace(a.issue(), key_file=b.issue().key_file), "not a certificate and its key"),
        (lambda a, b: dataclasses.replace(a.issue(), ca_file=a.issue().key_file), "holds no certificate"),
        (
            lambda a, b: dataclasses.replace(a.issue(), key_file="/absent"),
            r"key_file /absent cannot be read.*every node",
        ),
    ],
)
def test_a_file_that_will_not_do_is_named_before_anything_starts(ours, tmp_path, spoil, sentence):
    with pytest.raises(TlsFileError, match=sentence):
        spoil(ours, Authority(tmp_path, "theirs")).check()


def test_tls_needs_all_three_files_and_rules_out_what_has_no_tls():
    with pytest.raises(ConfigError, match=r"security\.tls\.key_file must be set as well"):
        load_config(overrides={"security.tls.ca_file": "a", "security.tls.cert_file": "b"})
    files = {f"security.tls.{name}_file": name for name in ("ca", "cert", "key")}
    for transport, library in (("collective", "torch.distributed"), ("nixl", "UCX")):
        with pytest.raises(ConfigError, match=f"plain text \\({library} has no TLS\\)"):
            load_config(overrides={**files, "transfer.transport": transport})
    for transport in ("auto", "shm", "grpc"):
        config = load_config(overrides={**files, "transfer.transport": transport}).config
        assert config.security.tls.files() == TlsFiles("ca", "cert", "key")
