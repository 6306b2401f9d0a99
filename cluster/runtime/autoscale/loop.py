"""Asks now and then how many workers would keep the SLOs, says so, and begins an operation as an operator would."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress

from ridgeline.cluster.config.autoscale import AutoscaleConfig
from ridgeline.cluster.runtime.fleet_operations import OperationRunner
from ridgeline.cluster.runtime.handles.actor import DeploymentFailed
from ridgeline.cluster.runtime.handles.routing import RouterHandle, RoutingHandle
from ridgeline.cluster.runtime.supervisor import Say, Supervisor
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.fleet.request_route import pools_of
from ridgeline.router.front.operations import Operation, new_operation
from ridgeline.router.router_control import Members
from ridgeline.router.scheduler.sizing import Bounds, LatestLoad, Sizing, wanted

logger = logging.getLogger(__name__)

WINDOW_INTERVALS = 10
"""The requests of so many intervals are simulated. After a step that failed, none is begun for as many."""
FOUND_WITHIN_S = 60.0
"""How long that may take."""
DRAIN_TIMEOUT_S = 30.0
"""How long requests may finish on a leaving worker before they migrate."""


class Autoscaler:
    """Has pools follow their load."""

    def __init__(
        self,
        settings: AutoscaleConfig,
        lead: RoutingHandle,
        routers: Sequence[RouterHandle],
        supervised: Supervisor,
        operations: OperationRunner,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._lead = lead
        self._routers = routers
        self._supervised = supervised
        self._operations = operations
        self._sleep = sleep
        self._said: object = None
        """What was said last."""
        self._begun: Operation | None = None
        """The last step, until it has failed."""
        self._pauses = 0
        """Intervals in which none is begun, since the last one failed: no place was free, say."""

    async def run(self, say: Say) -> None:
        """Decide until cancelled; while nobody answers nothing is decided, and nothing said."""
        mode: Mode | None = None
        while self._settings.mode != "none":
            await self._sleep(self._settings.interval_s)
            self._pauses = max(0, self._pauses - 1)
            if (last := self._operations.last) and last.operation is self._begun and last.state == "failed":
                self._begun, self._pauses = None, WINDOW_INTERVALS
            with suppress(DeploymentFailed):  # a router is being started again
                members: Members = await self._lead.members(self._supervised.started_for)
                load: LatestLoad = await self._lead.load(WINDOW_INTERVALS * self._settings.interval_s)
                if load.mode != mode:
                    mode, self._pauses = load.mode, 0
                    self._tell_bounds(mode, say)
                if self._bounds(mode) and self._is_settled(members, load):
                    await self._decide(members, load, say)

    def _bounds(self, mode: Mode) -> dict[Pool, Bounds]:
        return {pool: at for pool, at in self._settings.bounds().items() if pool in pools_of(mode)}

    def _tell_bounds(self, mode: Mode, say: Say) -> None:
        """Say what may be changed in this mode."""
        pools = pools_of(mode)
        if bounds := self._bounds(mode):
            has = (f"{pool} may have {at.min_workers} to {at.max_workers} workers" for pool, at in bounds.items())
            say(f"autoscale: {', '.join(has)}")
        else:
            say(
                f"autoscale: {' and '.join(pools)} {'has' if len(pools) == 1 else 'have'} no bounds, so nothing is "
                f"scaled in this mode: set autoscale.{pools[-1]}.min_workers and max_workers, and start again"
            )

    def _is_settled(self, members: Members, load: LatestLoad) -> bool:
        """Return whether no worker comes or goes; one that is lost is expected back."""
        serve = all(one.usable or name in self._supervised.lost for name, one in members.workers.items())
        return serve and members.mode == load.mode and not self._operations.under_way

    async def _decide(self, members: Members, load: LatestLoad, say: Say) -> None:
        """Find how many workers there should be; say it, or in mode act begin the first step."""
        there, bounds = Counter(one.pool for one in members.workers.values()), self._bounds(load.mode)
        now = {pool: there[pool] for pool in pools_of(load.mode)}
        found = Sizing(now, why=f"nothing is decided: the simulation took more than {FOUND_WITHIN_S:.0f} s")
        search = wanted(load, now, bounds, self._settings.goal)
        try:
            async with asyncio.timeout(FOUND_WITHIN_S):
                found = await _simulated(search)
        except TimeoutError:
            pass
        except Exception as error:  # an installed policy may raise anything, and serving goes on without a decision
            logger.exception("the number of workers cannot be simulated")
            found = Sizing(now, why=f"nothing is decided: the simulation failed with {type(error).__name__}: {error}")
        for router in self._routers:
            with suppress(DeploymentFailed):
                await router.note_wanted({pool: number for pool, number in found.sizes.items() if pool in bounds})
        if found.change is None:
            self._say_once(found.why, found.why, say)
            return
        pool, more = found.change
        then = now[pool] + more
        sentence = f"{pool} from {now[pool]} to {then} workers: {found.why}"
        if self._settings.mode == "advise":
            self._say_once((pool, now[pool], then), f"advises {sentence}", say)
            return
        if self._pauses:
            self._say_once("waits", f"the last change failed, so this one waits: {sentence}", say)
            return
        reason = f"autoscale, {sentence}"
        scale = new_operation("scale", DRAIN_TIMEOUT_S, {pool: then}, {pool: now[pool]}, load.mode, reason)
        self._begun = scale if self._operations.begin(scale) else None

    def _say_once(self, what: object, sentence: str, say: Say) -> None:
        """Say it, unless the same was said last."""
        if sentence and what != self._said:
            say(f"autoscale: {sentence}")
        self._said = what


async def _simulated(search: Generator[None, None, Sizing]) -> Sizing:
    """Return what a search finds, whose simulations take seconds, on another thread."""

    def go_on() -> Sizing | None:
        try:
            next(search)
        except StopIteration as end:
            found: Sizing = end.value
            return found
        return None

    while (found := await asyncio.to_thread(go_on)) is None:  # it can be cancelled between two of them
        pass
    return found
