"""Three routers, of which one has lost its route to half of the workers: nothing is restarted, all is served, it heals.

Real gRPC, through relays that can be cut, the real dispatcher and the real supervisor; engines without a model.
"""

import asyncio
import contextlib
import math

import pytest

from ridgeline.cluster.config.models import SupervisionConfig
from ridgeline.cluster.runtime.supervisor import Supervisor
from ridgeline.contracts.workers import Ack, WorkerStatus
from ridgeline.router.fleet.request_route import NoWorker
from tests.components.router.dispatch.test_modes import ROLES
from tests.components.router.shared.test_several_routers import expected
from tests.support.cut_route import Route
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT, router_settings
from tests.support.several_routers import OneRouter, a_dispatcher
from tests.support.small_fleet import hosts

SETTINGS = router_settings(routers=3, roles=ROLES.by_mode)
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LAYOUTS = {"prefill": LAYOUT, "prefill_1": LAYOUT, "decode": LAYOUT, "decode_1": LAYOUT}
CUT_OFF_S = 0.3
"""Longer than one question to a worker that is cut off, so that two in a row have no answer."""


def cut_route(router, name, route, how):
    """Cut it, and have the router give up at once on what is lost there; what goes other routes has its usual time."""
    worker = router.fleet.get(name)
    client, usual = worker.client, worker.client.status

    async def status():
        if route.carries:
            return await usual()
        return await client._unary("Status", Ack(), WorkerStatus, deadline_s=0.2)  # nothing comes, however long it asks

    client.status = status
    route.cut(how)
    worker._silent_since_s, client.last_token_s = -math.inf, None


class Handle:
    """A worker or a head that is well, as far as the supervisor asks it, and notes what is done to it."""

    def __init__(self, name, done, kind="worker", fleet=None):
        self.name, self.kind, self._done, self._fleet = name, kind, done, fleet

    async def failure(self, known=None):
        await asyncio.sleep(0.05)
        return ""

    async def unreached(self, for_s):
        return [named_at(address) for address in self._fleet.unreached(CUT_OFF_S)]

    async def note_away(self, away):
        self._done.append(("away", away))

    async def end(self):
        self._done.append(("end", self.name))


def named_at(address):
    return AT[address]


AT: dict[str, str] = {}
"""The worker at each address, relays included; the supervisor knows workers by one name only."""


@contextlib.asynccontextmanager
async def three_routers():
    """Yields the routers, the routes of the second one by worker, what the supervisor says and what it does."""
    async with contextlib.AsyncExitStack() as stack:
        started = await stack.enter_async_context(hosts(**LAYOUTS))
        addresses = {host._engine.config.worker_id: host.address for host in started}
        routes = {name: Route(address) for name, address in addresses.items()}
        relayed = {name: await route.start() for name, route in routes.items()}
        for route in routes.values():
            stack.push_async_callback(route.close)
        AT.clear()
        AT.update({address: name for names in (addresses, relayed) for name, address in names.items()})
        dispatcher, at = await stack.enter_async_context(a_dispatcher(list(addresses.values()), SETTINGS))
        routers = [OneRouter(f"router-{number}", SETTINGS) for number in range(3)]
        for number, router in enumerate(routers):
            stack.push_async_callback(router.die)
            await router.start(list((relayed if number == 1 else addresses).values()), at)
        said, done = [], []
        supervisor = Supervisor(
            [Handle(name, done) for name in WORKERS],
            [
                *(Handle(router.name, done, "router", router.fleet) for router in routers),
                Handle("dispatcher", done, "dispatcher", dispatcher.fleet),
            ],
            {name: name for name in WORKERS},
            SupervisionConfig(),
        )
        watching = asyncio.create_task(supervisor.run(said.append))
        try:
            yield routers, routes, said, done
        finally:
            watching.cancel()
            await asyncio.wait((watching,))


async def all_served(routers):
    """Six requests of each router, with the tokens of one engine."""
    asked = [router.ask() for router in routers for _ in range(6)]
    for sent, request in asked:
        await request
        assert sent == expected(5)


@pytest.mark.parametrize(
    ("cut", "how"),
    [
        (("prefill-1", "decode-1"), "dropped"),
        (("decode-0", "decode-1"), "refused"),
        (("prefill-0", "prefill-1"), "dropped"),
    ],
)
async def test_a_router_that_lost_its_route_to_half_of_the_workers_serves_with_the_rest_and_heals(cut, how):
    async with asyncio.timeout(2 * PATIENCE_S), three_routers() as (routers, routes, said, done):
        await all_served(routers)
        for name in cut:
            cut_route(routers[1], name, routes[name], how)
        missed = ", ".join(sorted(cut))
        await eventually(lambda: f"router-1 does not reach {missed}, which others do: " in "".join(said))
        async with asyncio.timeout(PATIENCE_S / 2):
            await all_served(routers)
        for name in cut:
            routes[name].mend()
        await eventually(lambda: said[-1] == "router-1 reaches what the others reach again")
        await all_served(routers)
        assert done == [], "nothing was restarted"
        assert len(said) == 2


async def test_a_router_that_reaches_no_worker_gives_up_what_waits_in_it_and_the_others_serve_on():
    async with asyncio.timeout(2 * PATIENCE_S), three_routers() as (routers, routes, _, _):
        deaf = routers[1]
        deaf.decisions.placement._recovery_timeout_s = 0.5
        for name, route in routes.items():
            cut_route(deaf, name, route, "refused")
        await eventually(lambda: all(not worker.reached for worker in deaf.fleet.workers))
        _, request = deaf.ask()
        with pytest.raises(NoWorker, match="this router has reached no worker for"):
            await request
        await all_served([routers[0], routers[2]])
