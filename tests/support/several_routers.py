"""Several routers' inner halves over worker hosts with fake engines, and their dispatcher: real gRPC, no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams

from ridgeline.router.decisions import SharedDecisions
from ridgeline.router.dispatch.orchestrator import Orchestrator
from ridgeline.router.dispatch.request import SequenceRequest
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.roles import role_table
from ridgeline.router.flow.admission import Admission
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.settings import RouterSettings, RouterStart
from ridgeline.router.shared.dispatcher import Dispatcher

PROMPT_TOKENS = 70


class OneRouter:
    """One of several routers, without its HTTP side."""

    def __init__(self, name: str, settings: RouterSettings, start: int = 1) -> None:
        """`start`: which of the processes that have this name, one after the other."""
        self.name = name
        settings = replace(settings, start=RouterStart(name, start))
        self.released: list[object] = []
        self.fleet = Fleet(name, roles=role_table(settings), leads=False)
        self.registry = CollectorRegistry()
        self.metrics = RequestMetrics(self.registry)
        self.decisions = SharedDecisions(self.fleet, settings)
        self.admission = Admission(settings, self.decisions.waits, self.fleet, self.metrics)
        self.admission.state = "open"
        self.decisions.attach(self.admission)
        self.orchestrator = Orchestrator(
            self.decisions.placement,
            settings,
            self.metrics,
            lambda handoff, _: self.released.append(handoff),
        )
        self._number = 0
        self._running: asyncio.Task[None] | None = None

    async def start(self, addresses: list[str], dispatcher: str) -> None:
        """Connect to the workers, and join."""
        started = asyncio.Event()

        async def run() -> None:
            with contextlib.suppress(BaseExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    await self.decisions.link.follow(dispatcher)
                    group.create_task(self.decisions.run())
                    await self.fleet.connect(addresses, group)
                    await self.decisions.joined()
                    started.set()
                    await asyncio.Event().wait()

        self._running = asyncio.create_task(run(), name=self.name)
        waiting = asyncio.ensure_future(started.wait())
        await asyncio.wait((self._running, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert started.is_set(), "the router did not start"

    async def die(self) -> None:
        """End all of its connections."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))

    def ask(
        self, tokens: int = 5, client: str = "a", prompt: int = PROMPT_TOKENS
    ) -> tuple[list[int], asyncio.Task[None]]:
        """Send a request; returns what its client gets, and the request."""
        self._number += 1
        sent: list[int] = []
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = SequenceRequest(
            f"{self.name}-{self._number}", list(range(prompt)), sampling_of(params), reasoning_ended=True, client=client
        )
        return sent, asyncio.create_task(self.orchestrator.run(request, lambda delta: sent.extend(delta.token_ids)))


@contextlib.asynccontextmanager
async def a_dispatcher(addresses: list[str], settings: RouterSettings, port: int = 0):
    """Run a dispatcher; yields it and its address."""
    dispatcher = Dispatcher(settings)
    address = await dispatcher.serve(addresses, "127.0.0.1", port)
    try:
        yield dispatcher, address
    finally:
        await dispatcher.stop()


@contextlib.asynccontextmanager
async def routers(number: int, addresses: list[str], dispatcher: str, settings: RouterSettings):
    """Run routers that share a dispatcher."""
    running = [OneRouter(f"router-{index}", settings) for index in range(number)]
    try:
        await asyncio.gather(*(one.start(addresses, dispatcher) for one in running))
        yield running
    finally:
        await asyncio.gather(*(one.die() for one in running))
