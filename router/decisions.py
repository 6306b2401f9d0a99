"""What decides for a router: itself, if it serves alone, or the dispatcher that it shares with other routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from ridgeline.contracts.errors import AdapterRefused
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.dispatch.modes import ModeChange, Modes, OwnModes
from ridgeline.router.fleet.adapters import Adapters, OwnAdapters
from ridgeline.router.fleet.fleet import PAIR_WITHIN_S, ROLES_WITHIN_S, Fleet
from ridgeline.router.fleet.roles import ModeImpossible
from ridgeline.router.flow.admission import Admission, Holdings, Wait
from ridgeline.router.flow.fair_queue import Waiting
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.learned import Learned
from ridgeline.router.placement.placement_events import Denied, Granted
from ridgeline.router.placement.places import Placement, own_placement
from ridgeline.router.placement.pool_queue import QueueNow
from ridgeline.router.settings import RouterSettings
from ridgeline.router.shared.holdings import Changes
from ridgeline.router.shared.link import Link, NoDispatcher, give_up_without_a_dispatcher
from ridgeline.router.shared.messages import (
    AdapterChanged,
    ChangeAdapter,
    ChangeMode,
    Complete,
    Down,
    ModeChanged,
    Offered,
    Others,
    Pairs,
    Sums,
    Up,
)
from ridgeline.router.watching import Comparing, Wanted
from ridgeline.worker_runtime.client import ADAPTER_DEADLINE_S

JOIN_WITHIN_S = 30.0
CHANGE_WITHIN_S = PAIR_WITHIN_S + ROLES_WITHIN_S + 30.0
"""More than the dispatcher takes for a change of mode while another one is under way."""
CHANGE_ADAPTER_WITHIN_S = 2 * ADAPTER_DEADLINE_S
"""The same for an adapter."""
HOLDINGS_EVERY_S = 0.1
"""How often the dispatcher is told what this router has admitted, if that has changed."""


class Decisions(Protocol):
    """What a router asks, whoever answers."""

    placement: Placement
    modes: Modes
    adapters: Adapters
    waits: Mapping[Pool, Wait]
    """For admission: how long a prompt would wait."""

    def queues(self) -> Mapping[Pool, QueueNow]:
        """Return what waits, for the metrics."""
        ...

    async def run(self) -> None:
        """Do what goes on while the router serves, until cancelled."""
        ...

    def fleet_changed(self) -> None:
        """Let waiting prompts look for a worker again."""
        ...

    def record(self, wanted: Wanted) -> AsyncGenerator[bytes, None]:
        """Return the lines of what happens to the scheduler from now on. Iterating it raises NoDispatcher."""
        ...


class OwnDecisions:
    """Those of a router that serves alone."""

    def __init__(self, fleet: Fleet, settings: RouterSettings) -> None:
        learned = Learned()
        self.comparing = Comparing(fleet, learned, settings.router)
        self.state = ClusterState(fleet, settings, learned, self.comparing.policy)
        self.placement = own_placement(self.state, fleet, settings)
        self.modes: Modes = OwnModes(fleet, self.state.mode_changed)
        self.adapters = OwnAdapters(fleet, settings.served_names, settings.router.request_timeout_s)
        self.waits: Mapping[Pool, Wait] = self.state.queues

    def queues(self) -> Mapping[Pool, QueueNow]:
        """Return what waits, for the metrics."""
        return self.state.queues_now()

    async def run(self) -> None:
        """Compare policies of mode adaptive, until cancelled."""
        await self.comparing.run()

    def fleet_changed(self) -> None:
        """Let waiting prompts look for a worker again."""
        self.state.look()

    def record(self, wanted: Wanted) -> AsyncGenerator[bytes, None]:
        """Return the lines of what happens to the scheduler from now on."""
        return self.comparing.record(wanted)


class SharedModes(Modes):
    """The mode of this router's deployment, as the dispatcher last told it."""

    def __init__(self, fleet: Fleet, link: Link) -> None:
        super().__init__(fleet)
        self._link = link

    async def change(self, mode: Mode) -> ModeChange:
        """Have all routers serve in this mode from now on. Raises ModeImpossible, and then changes nothing."""
        try:
            changed = await self._link.call("ChangeMode", ChangeMode(mode), ModeChanged, CHANGE_WITHIN_S)
        except NoDispatcher as error:
            raise ModeImpossible(str(error)) from error
        if changed.refused:
            raise ModeImpossible(changed.refused)
        return ModeChange(mode, changed.rerouted_prompts, changed.took_s)


class SharedAdapters(Adapters):
    """The LoRA adapters of this router's deployment, as the dispatcher last told them."""

    def __init__(self, fleet: Fleet, link: Link) -> None:
        super().__init__(fleet)
        self._link = link

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Have all workers take an adapter in; `in_place`: also if its name is known. Raises AdapterRefused."""
        await self._change(ChangeAdapter(name=name, path=path, in_place=in_place))

    async def unload(self, name: str) -> bool:
        """Have no more requests choose it; return False if there is none of this name. Raises AdapterRefused."""
        return (await self._change(ChangeAdapter(name=name))).found

    async def _change(self, change: ChangeAdapter) -> AdapterChanged:
        try:
            changed = await self._link.call("ChangeAdapter", change, AdapterChanged, CHANGE_ADAPTER_WITHIN_S)
        except NoDispatcher as error:
            raise AdapterRefused(str(error)) from error
        if changed.refused:
            raise AdapterRefused(changed.refused)
        return changed


class SharedDecisions:
    """Those of the dispatcher. `run` must run while the router serves."""

    def __init__(self, fleet: Fleet, settings: RouterSettings) -> None:
        self._fleet = fleet
        self.link = Link(settings.start, settings.tls)
        self.placement = Placement(fleet, settings, self.link.send, self._unreached)
        self._placed_on: AbstractSet[str] = frozenset()
        """The workers that the dispatcher chooses from, as it last told."""
        self._recovery_timeout_s = settings.router.recovery_timeout_s
        self.modes: Modes = SharedModes(fleet, self.link)
        self.adapters: Adapters = SharedAdapters(fleet, self.link)
        self._told = dict.fromkeys(fleet.pools, QueueNow(Waiting(), 0, starts_at_once=True, tokens_per_s=None))
        """Each pool's queue in the dispatcher, as it last told."""
        self.waits: Mapping[Pool, Wait] = self._told
        self._admission: Admission | None = None
        self._changes = Changes()
        self._heard: set[type[Down]] = set()
        self._joined = asyncio.Event()
        self.link.state = self._state
        self.link.on_message = self._take

    def queues(self) -> Mapping[Pool, QueueNow]:
        """Return what waits, for the metrics: the prompts of all routers."""
        return self._told

    def fleet_changed(self) -> None:
        """Do nothing: the dispatcher has been told too."""

    def record(self, wanted: Wanted) -> AsyncGenerator[bytes, None]:
        """Return the lines of what happens to the dispatcher from now on."""
        return self.link.lines("Record", wanted)

    async def joined(self) -> None:
        """Wait until the dispatcher has told what the others hold. Raises NoDispatcher."""
        try:
            async with asyncio.timeout(JOIN_WITHIN_S):
                await self._joined.wait()
        except TimeoutError as error:
            raise NoDispatcher(
                f"no connection to the dispatcher at {self.link.address} within {JOIN_WITHIN_S:.0f} s"
            ) from error

    def attach(self, admission: Admission) -> None:
        """Share what this router admits."""
        self._admission = admission

    async def run(self) -> None:
        """Keep the connection to the dispatcher, and tell it what this router has admitted, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.link.run(), name="dispatcher-link")
            group.create_task(self._tell_holdings(), name="holdings")
            giving_up = give_up_without_a_dispatcher(self.link, self.placement, self._recovery_timeout_s)
            group.create_task(giving_up, name="without-dispatcher")

    def _unreached(self) -> frozenset[str]:
        """Return the workers that the dispatcher may choose and that this router does not reach, or does not know."""
        known = {worker.worker_id for worker in self._fleet.workers}
        return frozenset(self._placed_on | known) - {one.worker_id for one in self._fleet.workers if one.reached}

    async def _tell_holdings(self) -> None:
        while True:
            await asyncio.sleep(HOLDINGS_EVERY_S)
            holds = self._changes.since_told(self._holdings())
            if holds is not None:
                self.link.send(holds)

    def _holdings(self) -> Holdings:
        assert self._admission is not None
        return self._admission.holdings()

    def _state(self) -> list[Up]:
        return [self._changes.everything(self._holdings()), *self.placement.state(), Complete()]

    def _take(self, message: Down) -> None:
        match message:
            case Granted() | Denied():
                self.placement.take(message)
            case Sums():
                self._take_sums(message)
            case Others():
                self._take_others(message)
            case Pairs():
                self._fleet.kv_pairs = message.kv_pairs
            case Offered():
                self._fleet.offer_adapters({adapter.name: adapter for adapter in message.adapters})
        self._heard.add(type(message))
        if {Sums, Others} <= self._heard:
            self._joined.set()

    def _take_sums(self, sums: Sums) -> None:
        self._fleet.follow(sums.mode, sums.role_number)
        for worker in self._fleet.workers:
            if worker.worker_id in sums.outstanding:
                worker.outstanding = sums.outstanding[worker.worker_id]
        self._placed_on = sums.outstanding.keys()
        self._told.update(sums.queues)

    def _take_others(self, others: Others) -> None:
        assert self._admission is not None
        if others.whole:
            self._admission.others = Holdings()
        known = self._admission.others
        for client, held in others.changed.items():
            known.put(client, held)
        known.sequences_per_s, known.blocks_per_s = others.sequences_per_s, others.blocks_per_s
