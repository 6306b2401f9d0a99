"""Reads the routers now and then, decides, says why, and begins an operation as an operator would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from ridgeline.cluster.config.autoscale import AutoscaleConfig
from ridgeline.cluster.runtime.autoscale.policy import Decision, Memory, Reading, decide
from ridgeline.cluster.runtime.fleet_operations import OperationRunner
from ridgeline.cluster.runtime.handles.actor import DeploymentFailed
from ridgeline.cluster.runtime.handles.routing import RouterHandle, RoutingHandle
from ridgeline.cluster.runtime.supervisor import Say, Supervisor
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.fleet.request_route import pools_of
from ridgeline.router.front.operations import new_operation
from ridgeline.router.observe.fleet_use import FleetUse
from ridgeline.router.observe.metrics import LimitedLatency, Within


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
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._lead = lead
        self._routers = routers
        self._supervised = supervised
        self._operations = operations
        self._clock = clock
        self._sleep = sleep
        self._limits_s: dict[LimitedLatency, float] = {}
        if settings.ttft_slo_ms is not None:
            self._limits_s["ttft"] = settings.ttft_slo_ms / 1000
        if settings.tpot_slo_ms is not None:
            self._limits_s["tpot"] = settings.tpot_slo_ms / 1000

    async def run(self, say: Say) -> None:
        """Decide until cancelled; while nobody answers nothing is decided, and nothing said."""
        if self._settings.mode == "none":
            return
        memory = Memory()
        mode: Mode | None = None
        while True:
            await self._sleep(self._settings.interval_s)
            reading = await self._read()
            if reading.fleet.mode not in (None, mode):
                mode = reading.fleet.mode
                self._tell_bounds(pools_of(mode), say)
            decision, then = decide(self._settings, reading, memory)
            if decision is None or self._announced(decision, mode, say):
                memory = then

    def _tell_bounds(self, pools: Sequence[Pool], say: Say) -> None:
        """Say what may be changed in this mode, which has these pools."""
        bounds = {pool: at for pool, at in self._settings.bounds().items() if pool in pools}
        if bounds:
            has = (f"{pool} has {at.min_workers} to {at.max_workers} workers" for pool, at in bounds.items())
            say(f"autoscale: {', '.join(has)}")
        else:
            say(
                f"autoscale: {' and '.join(pools)} {'has' if len(pools) == 1 else 'have'} no bounds, so nothing is "
                f"scaled in this mode: set autoscale.{pools[-1]}.min_workers and max_workers, and start again"
            )

    def _announced(self, decision: Decision, mode: Mode | None, say: Say) -> bool:
        """Say what was decided and, in mode act, begin it; False if it has to wait for another operation."""
        if self._settings.mode == "advise":
            say(f"autoscale advises {decision.sentence}")
            return True
        operation = new_operation(
            "scale",
            self._settings.drain_timeout_s,
            {decision.pool: decision.wanted_workers},
            {decision.pool: decision.now_workers},
            mode,
            f"autoscale, {decision.sentence}",
        )
        return self._operations.begin(operation)

    async def _read(self) -> Reading:
        """Return what the routers know; without workers if the leader does not answer or misses some."""
        under_way = self._operations.under_way
        try:
            fleet, within = await self._lead.use(), await self._within()
        except DeploymentFailed:  # it is being started again
            return Reading(self._clock(), operation_under_way=under_way)
        differ = {worker.worker_id for worker in fleet.workers} ^ set(self._supervised.workers)
        if differ - self._supervised.lost:
            fleet = FleetUse()  # one comes or goes
        return Reading(self._clock(), fleet, within, under_way or self._operations.under_way)

    async def _within(self) -> dict[str, dict[LimitedLatency, Within]]:
        """Ask every router how many sequences have kept the limits; one that does not answer is left out."""
        if not self._limits_s:
            return {}
        asked = (router.within(self._limits_s) for router in self._routers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found: dict[str, dict[LimitedLatency, Within]] = {}
        for router, answer in zip(self._routers, answers, strict=True):
            if isinstance(answer, dict):
                found[router.name] = answer
            elif not isinstance(answer, DeploymentFailed):
                raise answer
        return found
