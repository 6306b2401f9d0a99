"""What the `cuda-ipc` puller does about source processes that end, or cannot be watched."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer.fetch.ipc_puller import IpcPuller
from kv_transfer.interfaces import OBSTACLE


@pytest.fixture
def puller(monkeypatch):
    monkeypatch.setattr(IpcPuller, "open", lambda _self, offer: SimpleNamespace(pid=offer["pid"]))
    control: Any = None
    device: Any = None
    return IpcPuller(control, device)


def a_source(offer: dict[str, Any]) -> Any:
    return SimpleNamespace(incarnation="i", offers={"cuda-ipc": offer})


async def test_a_process_that_has_ended_since_its_memory_was_opened_is_an_obstacle(puller, monkeypatch):
    def ended(_pid):
        raise ProcessLookupError

    monkeypatch.setattr(os, "pidfd_open", ended)
    assert puller.obstacle(a_source({"pid": 1})) == "its process has ended"
    assert puller._opened == {}


async def test_where_processes_cannot_be_watched_their_memory_is_read_all_the_same(puller, monkeypatch, caplog):
    def forbidden(_pid):
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    source = a_source({"pid": 1})
    with caplog.at_level("INFO", logger="kv_transfer.fetch.ipc_puller"):
        for _ in range(3):  # every pull asks
            assert puller.obstacle(source) is None
    assert len(caplog.records) == 1
    puller.forget(source)
    assert puller._opened == {}


async def test_each_process_is_watched_once_and_nothing_of_it_stays_open(puller):
    before = len(os.listdir("/proc/self/fd"))
    source = a_source({"pid": os.getpid()})
    for _ in range(2):
        assert puller.obstacle(source) is None
    assert len(puller._watched) == 1
    puller.forget(source)
    assert len(os.listdir("/proc/self/fd")) == before
    assert puller.obstacle(source) is None
    await puller.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert puller._opened == puller._watched == {}


async def test_why_there_is_no_offer_is_the_obstacle(puller):
    assert puller.obstacle(a_source({OBSTACLE: "CUDA does not export it"})) == "CUDA does not export it"
    assert puller.obstacle(SimpleNamespace(incarnation="j", offers={})) == IpcPuller.not_offered


async def test_whatever_cuda_says_against_opening_is_the_obstacle(puller, monkeypatch):
    def refuse(_self, _offer):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

    monkeypatch.setattr(IpcPuller, "open", refuse)
    assert puller.obstacle(a_source({"pid": 1})) == "CUDA error: out of memory"
