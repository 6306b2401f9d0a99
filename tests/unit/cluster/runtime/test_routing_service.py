"""What becomes of a router's counts when its process ends."""

import asyncio
import os
import signal

from ridgeline.cluster.runtime.services import RouterService
from tests.support.samples import router_settings


class Router:
    """One that only notes how it ends."""

    ended = False

    def __init__(self):
        self.said = []

    async def stop(self):
        self.said.append("stopped")

    def forget_counts(self):
        self.said.append("forgot")


async def test_only_the_end_of_the_deployment_removes_what_a_router_has_counted(monkeypatch):
    exited, made = asyncio.Event(), [Router(), Router()]
    monkeypatch.setattr("ridgeline.cluster.runtime.services.os._exit", lambda _: exited.set())
    monkeypatch.setattr(RouterService, "_make", lambda self, settings: made[len(services) - 1])
    services = []
    for _ in made:
        services.append(RouterService())
        await services[-1].prepare(router_settings(routers=2))
    os.kill(os.getpid(), signal.SIGTERM)  # which the last one heard of
    await exited.wait()
    await services[0].stop()
    assert (made[1].said, made[0].said) == (["stopped"], ["stopped", "forgot"])
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
