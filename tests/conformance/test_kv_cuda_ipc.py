"""`cuda-ipc` between two processes on one GPU, where there is one."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from contextlib import closing

import pytest
import torch

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvHandoff
from ridgeline.decode_worker.kv_fetch.ipc_puller import IpcPuller
from ridgeline.kv_transfer.measure import SOURCE_SEED, Cache, CacheShape, SourceProcess, offer
from ridgeline.kv_transfer.memory.device import DeviceMemory
from ridgeline.kv_transfer.service import PairedTransport
from tests.support.cuda import NEEDS_CUDA
from tests.support.fetches import result_of
from tests.support.patience import PATIENCE_S

pytestmark = NEEDS_CUDA
SHAPE = CacheShape(num_layers=6, num_blocks=128, block_bytes=64 << 10, device="cuda:0")
"""50 MB: a whole cache takes more than one piece."""


@pytest.fixture(scope="module")
def ends():
    """(source process, what is in its cache, our cache, our service)."""
    cache, theirs = Cache(SHAPE), Cache(SHAPE, SOURCE_SEED).layers.cpu()
    with SourceProcess(SHAPE, ["cuda-ipc"], core=None) as source:
        source.start()
        service = cache.service("cuda-ipc", kv_fetch_timeout_s=2 * PATIENCE_S)
        service.start()
        try:
            yield source, theirs, cache, service
        finally:
            service.close()


def test_the_memory_of_a_source_that_was_killed_is_dropped_though_nothing_is_fetched():
    cache = Cache(SHAPE)
    with SourceProcess(SHAPE, ["cuda-ipc"], core=None) as source, closing(cache.service("cuda-ipc")) as service:
        source.start()
        service.start()
        address = source.addresses["cuda-ipc"]
        assert not isinstance(service.pair([address]).result(PATIENCE_S)[address], str)
        puller = service._fetcher._pullers["cuda-ipc"]
        (opened,) = puller._opened.values()
        memory = weakref.ref(opened)
        del opened
        os.kill(source.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + PATIENCE_S
        while memory() is not None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert memory() is None
        assert puller._opened == puller._watched == {}


def fetched(service, handoff: KvHandoff, request_id: str, targets: list[int]):
    service.start_fetch(request_id, handoff, {0: targets})
    return result_of(service, request_id)


@pytest.mark.parametrize(
    ("name", "source_ids", "targets"),
    [
        ("one", [5], [9]),
        ("scattered", [100, 7, 3, 55, 56, 57, 0], [4, 127, 9, 8, 30, 31, 2]),
        ("adjacent", list(range(64)), list(range(127, 63, -1))),
        ("whole", list(range(127, -1, -1)), list(range(128))),
    ],
)
def test_each_block_of_each_layer_is_where_it_should_be_and_nothing_else_has_changed(ends, name, source_ids, targets):
    source, theirs, cache, service = ends
    expected = cache.layers.cpu()
    expected[:, targets] = theirs[:, source_ids]
    handoff, _ = source.publish("cuda-ipc", name, source_ids)
    result = fetched(service, handoff, name, targets)
    assert (result.outcome, result.transport) == ("ok", "cuda-ipc"), result
    assert result.num_bytes == SHAPE.handoff_bytes(len(targets))
    assert torch.equal(cache.layers.cpu(), expected)
    source.wait_freed("cuda-ipc", name)


def test_a_copy_that_cuda_refuses_is_unreachable_and_the_next_fetch_opens_the_memory_anew(ends, monkeypatch):
    source, _, _, service = ends

    def refused(*_):
        yield 0
        raise RuntimeError("CUDA error: peer access is not supported\nCompile with ...")

    with monkeypatch.context() as patched:
        patched.setattr(DeviceMemory, "copies_from", refused)
        handoff, _ = source.publish("cuda-ipc", "refused", [1, 2])
        result = fetched(service, handoff, "refused", [3, 4])
    address = source.addresses["cuda-ipc"]
    assert (result.outcome, result.reason) == ("failed", errors.UNREACHABLE), result
    assert result.message == f"{address}: CUDA error: peer access is not supported"
    puller = service._fetcher._pullers["cuda-ipc"]
    assert puller._opened == puller._watched == {}
    handoff, _ = source.publish("cuda-ipc", "again", [1, 2])
    assert fetched(service, handoff, "again", [3, 4]).outcome == "ok"


def test_memory_is_opened_in_one_and_the_same_thread_at_pairing_and_anew_in_the_middle_of_serving(ends, monkeypatch):
    """A thread has its own CUDA device: one that had opened nothing before might open it on another one, or not."""
    source, _, _, service = ends
    threads = []
    open_ = IpcPuller.open

    def noted(puller, offer):
        threads.append(threading.current_thread().name)
        return open_(puller, offer)

    monkeypatch.setattr(IpcPuller, "open", noted)
    address = source.addresses["cuda-ipc"]
    service.pair([]).result(PATIENCE_S)
    service.pair([address]).result(PATIENCE_S)
    service.pair([]).result(PATIENCE_S)
    handoff, _ = source.publish("cuda-ipc", "anew", [1, 2])
    assert fetched(service, handoff, "anew", [3, 4]).outcome == "ok"
    assert threads == ["kv-transfer"] * 2


def test_auto_picks_it_for_two_engines_on_one_gpu(ends):
    source, _, cache, _ = ends
    service = cache.service("auto")
    service.start()
    try:
        address = source.addresses["cuda-ipc"]
        paired = service.pair([address]).result(PATIENCE_S)[address]
    finally:
        service.close()
    assert paired == PairedTransport("cuda-ipc", "")


def test_a_hand_off_within_one_process_copies_between_its_own_blocks(ends):
    _, _, cache, service = ends
    expected = cache.layers.cpu()
    expected[:, [1, 2]] = expected[:, [77, 70]]
    result = fetched(service, offer(service, "own", [77, 70], SHAPE), "own-fetch", [1, 2])
    assert result.outcome == "ok", result
    assert torch.equal(cache.layers.cpu(), expected)
