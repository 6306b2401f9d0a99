"""What the `cuda-ipc` puller does about source processes that end, or cannot be watched."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from ridgeline.decode_worker.kv_fetch.ipc_puller import IpcPuller
from ridgeline.kv_transfer.interfaces import UNSUPPORTED
from ridgeline.kv_transfer.memory.ipc import export
from tests.support.cuda_handles import made_up_handles
from tests.support.patience import eventually


@pytest.fixture
def puller(monkeypatch):
    monkeypatch.setattr(IpcPuller, "open", lambda _self, offer: SimpleNamespace(pid=offer["pid"]))
    control: Any = None
    device: Any = None
    return IpcPuller(control, device)


def a_source(offer: dict[str, Any]) -> Any:
    return SimpleNamespace(incarnation="i", offers={"cuda-ipc": offer})


async def test_a_process_that_has_ended_since_its_memory_was_opened_cannot_be_read(puller, monkeypatch):
    def ended(_pid):
        raise ProcessLookupError

    monkeypatch.setattr(os, "pidfd_open", ended)
    assert puller.unsupported_reason(a_source({"pid": 1})) == "its process has ended"
    assert puller._opened == {}


async def test_where_processes_cannot_be_watched_their_memory_is_read_all_the_same(puller, monkeypatch, caplog):
    def forbidden(_pid):
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    source = a_source({"pid": 1})
    with caplog.at_level("INFO", logger="ridgeline.decode_worker.kv_fetch.ipc_puller"):
        for _ in range(3):  # every pull asks
            assert puller.unsupported_reason(source) is None
    assert len(caplog.records) == 1
    puller.forget(source)
    assert puller._opened == {}


async def test_each_process_is_watched_once_and_nothing_of_it_stays_open(puller):
    before = len(os.listdir("/proc/self/fd"))
    source = a_source({"pid": os.getpid()})
    for _ in range(2):
        assert puller.unsupported_reason(source) is None
    assert len(puller._watched) == 1
    puller.forget(source)
    assert len(os.listdir("/proc/self/fd")) == before
    assert puller.unsupported_reason(source) is None
    await puller.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert puller._opened == puller._watched == {}


async def test_the_memory_of_a_process_that_was_killed_is_dropped_though_nothing_is_fetched(puller):
    source = await asyncio.create_subprocess_exec("sleep", "600")
    assert puller.unsupported_reason(a_source({"pid": source.pid})) is None
    source.kill()
    await eventually(lambda: puller._opened == puller._watched == {})
    await source.wait()


async def test_why_there_is_no_offer_is_the_reason(puller):
    assert puller.unsupported_reason(a_source({UNSUPPORTED: "CUDA does not export it"})) == "CUDA does not export it"
    assert puller.unsupported_reason(SimpleNamespace(incarnation="j", offers={})) == IpcPuller.not_offered


async def test_whatever_cuda_says_against_opening_is_the_reason(puller, monkeypatch):
    def refuse(_self, _offer):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

    monkeypatch.setattr(IpcPuller, "open", refuse)
    assert puller.unsupported_reason(a_source({"pid": 1})) == "CUDA error: out of memory"


# --- as `auto` uses it


def an_offer(exported, **changes):
    offer = msgspec.to_builtins(msgspec.structs.replace(exported.offer, **changes))
    return SimpleNamespace(incarnation="i", offers={"cuda-ipc": offer})


@pytest.fixture
def exported():
    with made_up_handles():
        yield export(list(torch.zeros(4, 64, 4096, dtype=torch.uint8)))


async def test_auto_takes_it_for_a_cache_on_the_same_gpu(exported):
    puller = IpcPuller(None, torch.device("cpu"), any_gpu=False)
    assert puller.unsupported_reason(an_offer(exported)) is None
    await puller.close()


async def test_auto_leaves_another_gpu_to_grpc_and_says_how_to_try_it(exported):
    source = an_offer(exported, device="GPU-of-another-kind")
    sentence = IpcPuller(None, torch.device("cpu"), any_gpu=False).unsupported_reason(source)
    assert sentence == (
        "its KV cache is on another GPU, and between two GPUs this has not run yet; transfer.transport: cuda-ipc "
        "tries it"
    )
    assert IpcPuller(None, torch.device("cpu")).unsupported_reason(source) != sentence


async def test_that_a_source_is_on_another_host_is_said_before_its_gpu_is_looked_at(exported):
    source = an_offer(exported, host="another/pid:[1]", device="GPU-of-another-kind")
    sentence = IpcPuller(None, torch.device("cpu"), any_gpu=False).unsupported_reason(source)
    assert "another host, or in another container" in sentence


@pytest.mark.parametrize("any_gpu", [False, True])
async def test_after_a_copy_that_failed_auto_goes_on_to_grpc_and_a_name_tries_again(exported, any_gpu, monkeypatch):
    def refused(*_):
        yield 0
        raise RuntimeError("CUDA error: invalid argument\nCompile with ...")

    monkeypatch.setattr("ridgeline.decode_worker.kv_fetch.ipc_puller.copy_out_of", lambda _pool, _pull: refused)
    puller = IpcPuller(None, torch.device("cpu"), any_gpu=any_gpu)
    source = an_offer(exported)
    assert puller.unsupported_reason(source) is None
    copy = puller.copier(puller._opened["i"], SimpleNamespace(source=source))
    with pytest.raises(RuntimeError):
        list(copy(None))
    puller.forget(source)
    assert puller.unsupported_reason(source) == (None if any_gpu else "a copy failed (CUDA error: invalid argument)")
    await puller.close()
