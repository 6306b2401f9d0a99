"""How a deployment ends: every process, whatever goes wrong with some."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.runtime.actors import NodePlace
from ridgeline.cluster.runtime.deployment import _stop
from ridgeline.cluster.runtime.handles.actor import ActorHandle
from ridgeline.cluster.runtime.processes import ProcessId


class Slot:
    def __init__(self, name, error=None):
        self.name, self.error, self.ended, self.calls = name, error, False, []

    async def close_peer_mappings(self):
        self.calls.append("let go")

    async def stop(self):
        self.calls.append("stop")
        if self.error:
            raise self.error

    async def kill(self):
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        await asyncio.sleep(0)
        self.ended = True


async def test_one_that_cannot_be_ended_does_not_spare_the_others_and_is_named():
    router, workers = Slot("router", RuntimeError("no such actor")), [Slot("worker-0"), Slot("worker-1")]
    told = await _stop(workers, SimpleNamespace(all=[router]))
    assert all(worker.ended for worker in workers)
    assert told == ["router could not be ended, and may run on: RuntimeError: no such actor"]
    assert await _stop(workers, SimpleNamespace(all=[Slot("router")])) == []


async def test_no_worker_ends_before_all_have_let_go_of_each_others_kv_caches(monkeypatch):
    calls = []
    slow, quick, router = Slot("worker-0"), Slot("worker-1"), Slot("router")
    slow.calls = quick.calls = router.calls = calls

    async def after_a_step():
        await asyncio.sleep(0)
        calls.append("let go")

    slow.close_peer_mappings = after_a_step
    await _stop([slow, quick], SimpleNamespace(all=[router]))
    assert calls == ["stop", "let go", "let go", "stop", "stop"]


async def test_a_worker_that_hangs_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr("ridgeline.cluster.runtime.deployment.LET_GO_WITHIN_S", 0.01)
    hangs, other = Slot("worker-0"), Slot("worker-1")
    hangs.close_peer_mappings = asyncio.Event().wait
    assert await _stop([hangs, other], SimpleNamespace(all=[])) == []
    assert (other.calls, other.ended, hangs.ended) == (["let go", "stop"], True, True)


async def test_what_ray_says_of_an_actor_does_not_spare_its_processes(monkeypatch):
    def refuse(actor, no_restart):
        raise ValueError("not an actor of this job")

    ended = []

    async def end(self, place):
        ended.append(self.name)

    monkeypatch.setattr("ridgeline.cluster.runtime.handles.actor.ray.kill", refuse)
    monkeypatch.setattr(ActorHandle, "_end_processes", end)
    handle = ActorHandle("worker-1", None, RidgelineConfig())
    handle._place = NodePlace("node", "127.0.0.1", (0,), ProcessId(1, 0.0), "machine")
    with pytest.raises(ValueError, match=re.escape("not an actor")):
        await handle.kill()
    assert ended == ["worker-1"]
