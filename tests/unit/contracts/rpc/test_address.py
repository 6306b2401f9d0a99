"""Hosts, ports and URLs as text, and that every port of ours can be had on IPv6."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch

from ridgeline.contracts.rpc.address import http_url, ip_address, is_loopback, join_host_port, split_host_port
from ridgeline.contracts.rpc.channel import add_port, open_channel
from ridgeline.kv_transfer.collective.group import FETCHER_RANK, SOURCE_RANK, PairGroup, host_store, join_store
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.grpc_source import GrpcKvSource
from ridgeline.prefill_worker.kv_source.lease import LeaseTable
from tests.support import ipv6
from tests.support.samples import kv_layout

on_ipv6 = pytest.mark.skipif(not ipv6.HERE, reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "port", "written"),
    [
        ("127.0.0.1", 8000, "127.0.0.1:8000"),
        ("node-3", 1, "node-3:1"),
        ("::1", 8000, "[::1]:8000"),
        ("::", 0, "[::]:0"),
        ("2001:db8::1", 80, "[2001:db8::1]:80"),
        ("fe80::1%eth0", 80, "[fe80::1%eth0]:80"),
    ],
)
def test_what_is_joined_is_split_into_the_same(host, port, written):
    assert join_host_port(host, port) == written
    assert split_host_port(written) == (host, port)
    assert http_url(host, port) == f"http://{written}"


@pytest.mark.parametrize(
    "text", ["::1:8000", "::1", "127.0.0.1", ":80", "", "[::1]", "[::1]:", "x:-1", "x:y", "x:\u00b2"]
)
def test_what_is_no_host_and_port_is_refused(text):
    with pytest.raises(ValueError, match="is not host:port"):
        split_host_port(text)


def test_ipv4_within_ipv6_is_ipv4_and_this_machine_is_known_by_all_of_its_names():
    assert str(ip_address("::ffff:192.0.2.1")) == "192.0.2.1"
    assert ip_address("localhost") is None
    here = ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "localhost", "LOCALHOST"]
    assert all(is_loopback(host) for host in here)
    elsewhere = ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "localhost.example", "127.0.0.1.example", ""]
    assert not any(is_loopback(host) for host in elsewhere)


@on_ipv6
async def test_a_source_of_kv_on_ipv6_tells_an_address_at_which_it_answers():
    pool = HostMemory([np.zeros((8, 32), np.uint8)])
    layout = kv_layout(block_size=4, num_layers=1, block_bytes=32)
    source = GrpcKvSource(RankCache(pool, LeaseTable(), layout), TransferOptions("::1"))
    source.start()
    try:
        assert source.address.startswith("[::1]:")
        control = GrpcControl()
        assert (await control.describe(source.address)).incarnation
    finally:
        source.close()


@on_ipv6
def test_the_two_ends_of_a_pair_group_meet_on_ipv6():
    store = host_store("::1")
    cpu = torch.device("cpu")
    with ThreadPoolExecutor(2) as threads:
        source = threads.submit(PairGroup.form, SOURCE_RANK, "key", store, "::1", cpu, "the fetcher")
        theirs = join_store("::1", store.port)
        fetcher = threads.submit(PairGroup.form, FETCHER_RANK, "key", theirs, "::1", cpu, "the source")
        ends = [source.result(), fetcher.result()]
    for end in ends:
        end.break_off()


@on_ipv6
def test_a_port_of_ours_on_ipv6_is_reached_by_a_channel_of_ours():
    server = grpc.server(ThreadPoolExecutor(1))
    port = add_port(server, join_host_port("::1", 0), None)
    server.start()
    channel = open_channel(join_host_port("::1", port), (), None)
    try:
        grpc.channel_ready_future(channel).result(10)
    finally:
        channel.close()
        server.stop(None)
