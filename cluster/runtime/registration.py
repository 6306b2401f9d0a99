"""Makes a worker's new incarnation known to all routers, each in a task of its own.

A router that does not reach it, has a fault of its own, or is being started again, keeps no other from having it: the
worker serves with those that know it, and the others are asked again until they do. The dispatcher is one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from ridgeline.cluster.runtime.handles.actor import ActorGone, DeploymentFailed, NotReached, WorkerRefused
from ridgeline.cluster.runtime.handles.routing import Routing
from ridgeline.contracts.vocabulary import RestartReason

RETRY_S = 0.5
REFUSED_RETRY_S = 30.0
"""Pause after a router has failed for good to take in a worker that others have: asking again seldom mends that."""
MAX_REGISTRATIONS = 10
"""How often every router may fail to reach a new worker, half a minute each, before it counts as broken: to load its
engine was expensive, and a router may just have much to do."""


class Registration:
    """One incarnation of a worker, and which routers have it."""

    def __init__(
        self,
        worker: str,
        address: str,
        why: RestartReason | None,
        *,
        routers: Mapping[str, Routing],
        serves: Mapping[str, asyncio.Event],
        say: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """`routers` are those there are at any moment; `serves` is set for those that serve.

        `why` is what routers count as the reason of a restart, None if it was not started again: other routers have it.
        """
        self._worker = worker
        self._address = address
        self._why = why
        self._routers = routers
        self._serves = serves
        self._say = say
        self._sleep = sleep
        self._known: set[str] = set()
        self._a_router_knows = asyncio.Event()
        if why is None:
            self._a_router_knows.set()
        self._changed = asyncio.Event()
        self._failures: dict[str, int] = {}
        self._errors: dict[str, DeploymentFailed] = {}
        """What each router said the last time that it failed."""
        self._refusal: WorkerRefused | None = None

    @property
    def enough(self) -> bool:
        """Whether it can be given work: the dispatcher has it, if there is one, and a router."""
        routers = [router for router in self._routers.values() if router.name in self._known]
        kinds = {router.kind for router in self._routers.values()}
        return {router.kind for router in routers} == kinds

    def check(self) -> None:
        """Raise WorkerRefused if it cannot work with the others.

        Raise DeploymentFailed if every router that serves has failed to take it in, or has not reached it for too long.
        """
        if self._refusal is not None:
            raise self._refusal
        asked = [one.name for one in self._routers.values() if one.kind == "router" and self._serves[one.name].is_set()]
        if asked and not self._known and all(self._has_given_up(name) for name in asked):
            raise self._errors[asked[0]]

    def _has_given_up(self, router: str) -> bool:
        return self._failures.get(router, 0) >= MAX_REGISTRATIONS

    async def changed(self, within_s: float) -> None:
        """Wait until a router has answered, at most this long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), within_s)
        self._changed.clear()

    async def to(self, router: Routing) -> None:
        """Register it until this router has it or is gone; the dispatcher last, since routers serve what it places."""
        if router.kind == "dispatcher":
            await self._a_router_knows.wait()
        said = False
        while router.name in self._routers:
            told = self._serves[router.name].is_set() and await self._told(router)
            self._changed.set()
            if told:
                return
            if not self._has_given_up(router.name):
                await self._sleep(RETRY_S)
                continue
            await self._a_router_knows.wait()  # else it is the worker that is broken
            if not said:
                again = f"is asked again every {REFUSED_RETRY_S:.0f} s"
                self._say(f"{router.name} cannot take in {self._worker} and {again}: {self._errors[router.name]}")
            said = True
            await self._sleep(REFUSED_RETRY_S)

    async def _told(self, router: Routing) -> bool:
        try:
            await router.replace_worker(self._address, self._why)
        except ActorGone:  # the one that follows may have started before this address was there
            return False
        except NotReached as error:
            if not self._failures:
                self._say(
                    f"{self._worker} runs, but {router.name} cannot connect to it yet and keeps trying: {error}; check "
                    "the network between them"
                )
            self._failures[router.name] = self._failures.get(router.name, 0) + 1
            self._errors[router.name] = error
            return False
        except DeploymentFailed as error:
            if isinstance(error, WorkerRefused):
                self._refusal = error
            self._failures[router.name], self._errors[router.name] = MAX_REGISTRATIONS, error
            return False
        self._known.add(router.name)
        if router.kind == "router":
            self._a_router_knows.set()
        return True
