"""What only the `nixl` transport has to show: reads that cannot be aborted, and readers that die."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch

from ridgeline.contracts import errors
from ridgeline.kv_transfer.measure import Cache, CacheShape, SourceProcess
from ridgeline.kv_transfer.memory.device import pool_of
from ridgeline.kv_transfer.nixl.agent import Agent, descriptors
from ridgeline.kv_transfer.nixl.library import NixlFailed
from ridgeline.kv_transfer.nixl.source import NixlOffer, NixlSource
from ridgeline.kv_transfer.nixl.staging import Staging
from tests.support.fetches import begin, result_of
from tests.support.nixl import needs_nixl
from tests.support.patience import PATIENCE_S, eventually

pytestmark = needs_nixl

SHAPE = CacheShape(num_layers=24, num_blocks=64, block_bytes=128 << 10)
CPU = torch.device("cpu")


@pytest.fixture
def over_tcp(monkeypatch):
    """(source process, our service, our cache), where UCX has no memory in common."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    cache = Cache(SHAPE)
    with SourceProcess(SHAPE, ["nixl"], core=None) as source:
        source.start()
        service = cache.service("nixl", kv_fetch_timeout_s=2 * PATIENCE_S)
        service.start()
        try:
            yield source, service, cache
        finally:
            os.kill(source.pid, signal.SIGCONT)
            service.close()


def staging_of(service):
    return service._fetcher._pullers["nixl"]._staging


async def test_a_read_that_ends_after_its_pull_writes_to_no_block(over_tcp, monkeypatch):
    source, service, cache = over_tcp
    begin(source, service, "nixl", "warm", range(SHAPE.num_blocks))
    assert result_of(service, "warm").outcome == "ok"
    puller = service._fetcher._pullers["nixl"]
    posted, read = threading.Event(), puller._agent.read

    def freeze_and_read(*args):
        os.kill(source.pid, signal.SIGSTOP)
        time.sleep(0.1)  # until the source's threads stand still
        begun = read(*args)
        posted.set()
        return begun

    monkeypatch.setattr(puller._agent, "read", freeze_and_read)
    service._fetcher._options = replace(service._fetcher._options, kv_fetch_timeout_s=2.0)
    cache.layers.zero_()
    begin(source, service, "nixl", "frozen", range(SHAPE.num_blocks))
    result = result_of(service, "frozen")
    assert posted.is_set()
    assert (result.outcome, result.reason) == ("failed", errors.TIMEOUT), result
    assert staging_of(service).abandoned == 1
    monkeypatch.undo()
    os.kill(source.pid, signal.SIGCONT)
    staging = staging_of(service)
    await eventually(lambda: staging.give_back(staging.take(1)) or staging.abandoned == 0)
    assert not cache.layers.any(), "what came late was written to the cache"
    service._fetcher._options = replace(service._fetcher._options, kv_fetch_timeout_s=2 * PATIENCE_S)
    begin(source, service, "nixl", "again", range(SHAPE.num_blocks))
    assert result_of(service, "again").outcome == "ok"


def test_a_source_that_sends_nothing_is_given_up_before_the_deadline(over_tcp, monkeypatch):
    monkeypatch.setattr("ridgeline.kv_transfer.nixl.puller.STALLED_S", 0.5)
    source, service, _ = over_tcp
    puller = service._fetcher._pullers["nixl"]
    read = puller._agent.read

    def freeze_and_read(*args):
        os.kill(source.pid, signal.SIGSTOP)
        time.sleep(0.1)
        return read(*args)

    monkeypatch.setattr(puller._agent, "read", freeze_and_read)
    begin(source, service, "nixl", "frozen", range(SHAPE.num_blocks))
    result = result_of(service, "frozen")
    assert (result.outcome, result.reason) == ("failed", errors.UNREACHABLE), result


def test_more_abandoned_reads_than_there_is_room_for_are_refused(monkeypatch):
    monkeypatch.setattr("ridgeline.kv_transfer.nixl.staging.MOST_ABANDONED", 1)

    class Endless:
        def ended(self):
            return False

    staging = Staging(Agent("reader", CPU, answers=False), CPU)
    staging.abandon(staging.take(10), Endless())
    with pytest.raises(errors.TransferFailed) as caught:
        staging.take(10)
    assert caught.value.reason == errors.BUSY


def test_room_is_free_again_when_its_read_has_ended_though_another_goes_on():
    class Abandoned:
        def __init__(self, ends):
            self._ends = ends

        def ended(self):
            return self._ends

    staging = Staging(Agent("reader", CPU, answers=False), CPU)
    going_on, over = staging.take(10), staging.take(10)
    staging.abandon(going_on, Abandoned(False))
    staging.abandon(over, Abandoned(True))
    assert staging.take(10) is over
    assert staging.abandoned == 1
    assert staging.take(10) is not going_on


def test_room_is_used_again_and_is_as_large_as_was_asked_for():
    staging = Staging(Agent("reader", CPU, answers=False), CPU)
    small, large = staging.take(10), staging.take(9 << 20)
    staging.give_back(small)
    staging.give_back(large)
    assert staging.take(9 << 20) is large
    assert staging.take(9) is small


def test_an_idle_agent_that_answers_leaves_the_core_to_others():
    agent = Agent("answering", CPU, answers=True)
    started_s, cpu_s = time.monotonic(), time.process_time()
    time.sleep(0.5)
    assert (time.process_time() - cpu_s) / (time.monotonic() - started_s) < 0.3
    assert agent.metadata()


def test_metadata_that_is_none_is_a_sentence():
    agent = Agent("reader", CPU, answers=False)
    with pytest.raises(NixlFailed, match="NIXL could not connect"):
        agent.meet(b"something else")


def test_a_peer_is_left_when_all_who_met_it_have_parted():
    source = NixlSource(pool_of([torch.zeros(4, 32, dtype=torch.uint8)]))
    agent, metadata = Agent("reader", CPU, answers=False), source.offer()["metadata"]
    first, second = agent.meet(metadata), agent.meet(metadata)
    assert first == second
    agent.part(first)
    room = torch.zeros(32, dtype=torch.uint8)
    agent.register(descriptors([room.data_ptr()], 32, None))
    rows = descriptors([room.data_ptr()], 32, None)
    theirs = NixlOffer(**source.offer()).part(0, 32).of([0], range(1))
    read = agent.read(first, theirs, rows)
    while not read.ended():
        time.sleep(0.001)
    agent.part(second)
    with pytest.raises(NixlFailed, match="NOT_FOUND"):
        agent.read(first, theirs, rows)
