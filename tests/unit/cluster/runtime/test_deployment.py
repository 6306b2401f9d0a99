"""How a deployment ends: every process, whatever goes wrong with some."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from cluster.config.models import RidgelineConfig
from cluster.runtime.actors import NodePlace
from cluster.runtime.deployment import _stop
from cluster.runtime.handles.actor import ActorHandle


class Slot:
    def __init__(self, name, error=None):
        self.name, self.error, self.ended = name, error, False

    async def stop(self):
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


async def test_what_ray_says_of_an_actor_does_not_spare_its_processes(monkeypatch):
    def refuse(actor, no_restart):
        raise ValueError("not an actor of this job")

    ended = []

    async def end(self, place):
        ended.append(self.name)

    monkeypatch.setattr("cluster.runtime.handles.actor.ray.kill", refuse)
    monkeypatch.setattr(ActorHandle, "_end_processes", end)
    handle = ActorHandle("worker-1", None, RidgelineConfig())
    handle._place = NodePlace("node", "127.0.0.1", (0,), 1, "machine")
    with pytest.raises(ValueError, match=re.escape("not an actor")):
        await handle.kill()
    assert ended == ["worker-1"]
