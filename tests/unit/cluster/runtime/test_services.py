"""When a router or the dispatcher counts as stuck: how long its event loop is silent, and who else serves."""

from types import SimpleNamespace

import pytest

from ridgeline.cluster.runtime import services
from ridgeline.cluster.runtime.services import DispatcherService, NotServing, RouterService, device_of
from ridgeline.contracts.errors import WorkerLost
from ridgeline.router.router_control import RouterControl
from tests.support.samples import router_settings


async def stuck(service, routers, silent_s, monkeypatch, later_s=None):
    """What a service says of itself whose loop has been silent for so long, and for `later_s` when it looks again."""
    server = SimpleNamespace(ended=False, loop_silent_s=silent_s)
    monkeypatch.setattr(service, "_make", lambda settings: server)

    def sleep(seconds):
        server.loop_silent_s = silent_s + seconds if later_s is None else later_s

    monkeypatch.setattr(services, "time", SimpleNamespace(sleep=sleep))
    await service.prepare(router_settings(routers=routers))
    return service.failure()


@pytest.mark.parametrize(
    ("service", "routers", "silent_s", "health"),
    [
        (RouterService, 1, 119.0, ""),
        (RouterService, 1, 121.0, "unreachable"),
        (RouterService, 3, 19.0, ""),
        (RouterService, 3, 21.0, "unreachable"),
        (DispatcherService, 3, 21.0, "unreachable"),
    ],
)
async def test_one_of_several_routers_that_is_stuck_is_ended_sooner_than_the_only_router(
    service, routers, silent_s, health, monkeypatch
):
    assert await stuck(service(), routers, silent_s, monkeypatch) == health


class Control(RouterControl):
    """A router with this one worker."""

    TITLE = "router"
    queues = ()

    def __init__(self, worker):
        async def refresh():
            pass

        super().__init__(SimpleNamespace(get=lambda worker_id: {"worker-0": worker}[worker_id], refresh=refresh))

    def fleet_changed(self):
        pass


async def test_a_drain_for_a_worker_that_a_router_does_not_have_or_for_another_incarnation_reaches_nobody():
    drained = []

    async def drain(timeout_s):
        drained.append(timeout_s)

    worker = SimpleNamespace(client=SimpleNamespace(drain=drain), description=SimpleNamespace(incarnation="2"))
    service = RouterService()
    with pytest.raises(NotServing):
        await service.drain_worker("worker-0", 30.0, "")
    service._server = Control(worker)
    for worker_id, incarnation in (("worker-1", ""), ("worker-1", "2"), ("worker-0", "1")):
        with pytest.raises(WorkerLost, match=worker_id):
            await service.drain_worker(worker_id, 30.0, incarnation)
    assert drained == []
    await service.drain_worker("worker-0", 20.0, "2")
    await service.drain_worker("worker-0", 10.0, "")
    assert drained == [20.0, 10.0]


async def test_a_router_that_stood_still_with_its_whole_process_is_not_taken_for_stuck(monkeypatch):
    assert await stuck(RouterService(), 1, 3600.0, monkeypatch, later_s=0.0) == ""


def test_workers_on_the_same_cores_or_gpus_are_on_one_device():
    assert device_of((1, 0), "") == device_of((0, 1), "") != device_of((0, 2), "")
    assert device_of((), "0") == device_of((), "0") != device_of((), "1")
    assert device_of((0,), "") != device_of((), "0")
    assert device_of((), "") == ""
