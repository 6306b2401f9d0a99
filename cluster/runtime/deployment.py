"""Starts the workers and the routers on Ray, watches them, and takes them down again.

Everything is tied to this process: when it ends, however it ends, Ray ends its actors, every service ends with its
actor, and an engine with its worker (`ridgeline.engine.vllm_workarounds.engine_process`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from ray.exceptions import RayError
from ray.util.placement_group import remove_placement_group

from ridgeline.cluster.config.api_keys import ApiKeyError, KeyHashes
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.ray_nodes import what_there_is
from ridgeline.cluster.runtime.actors import NodePlace
from ridgeline.cluster.runtime.autoscale.loop import Autoscaler
from ridgeline.cluster.runtime.fleet_operations import OperationRunner, OperationSteps
from ridgeline.cluster.runtime.handles.actor import DeploymentFailed, NoPlace
from ridgeline.cluster.runtime.handles.routing import DispatcherHandle, RouterHandle, routers_place
from ridgeline.cluster.runtime.handles.worker import WorkerHandle
from ridgeline.cluster.runtime.plan import CoreTable, PlacementError, Plan, dtype_of_nodes
from ridgeline.cluster.runtime.services import WorkerReady
from ridgeline.cluster.runtime.supervisor import Say, Supervisor
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.fleet.pairing import KvPair
from ridgeline.router.settings import PoolHardware, SloConfig

__all__ = ["Deployment", "DeploymentFailed", "Row", "deploy"]

DRAIN_ANSWER_S = 5.0
"""How long, after the drain's own timeout, the router may take to report how it ended."""
STOP_ROUTER_WITHIN_S = 5.0
LET_GO_WITHIN_S = 1.0
"""For workers to close each other's KV caches: they do so between two steps, and one that hangs is not waited for."""
STOP_WORKERS_WITHIN_S = 15.0
PROGRESS_EVERY_S = 10.0
KEYS_EVERY_S = 5.0
NEW_KEYS = "the files of keys have changed: only the keys that they hold now count"
MEASURED_WITHIN_S = 30.0
"""More than a router takes to measure (`ridgeline.router.idle_times`)."""
T = TypeVar("T")


class Row(NamedTuple):
    """One line of the table of what runs where."""

    name: str
    pool: str
    node: str
    cores: str
    pid: str
    engine_pids: str
    address: str
    kv_blocks: str
    start: str


@dataclass
class Deployment:
    """Running actors; made by `deploy`."""

    url: str
    rows: list[Row]
    kv_pairs: list[KvPair]
    routers: list[RouterHandle]
    supervisor: Supervisor
    operations: OperationRunner
    autoscaler: Autoscaler
    warnings: list[str] = field(default_factory=list)
    """What operators should mend in their settings."""
    read_keys: Callable[[], KeyHashes] = KeyHashes
    """Returns what the files of keys hold now. Raises ApiKeyError."""

    async def watch(self, say: Say, on_away: Callable[[Mapping[str, str]], None] = lambda _: None) -> None:
        """Bring back what dies, carry out operations, give some if pools follow their load, and report all of it.

        `on_away` is told of workers that are lost again and again, see `Supervisor.run`. Never returns; raises
        DeploymentFailed when the last worker has left on purpose.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.supervisor.run(say, on_away), name="supervisor")
                group.create_task(self.operations.run(say), name="operations")
                group.create_task(self.autoscaler.run(say), name="autoscaler")
                group.create_task(self._follow_key_files(say), name="keys")
        except* DeploymentFailed as failures:
            raise failures.exceptions[0] from None

    async def _follow_key_files(self, say: Say) -> None:
        """Give each router each change of the files of keys; those that cannot be used change nothing."""
        said = ""
        while True:
            await asyncio.sleep(KEYS_EVERY_S)
            try:
                keys = await asyncio.to_thread(self.read_keys)
            except ApiKeyError as error:
                now = f"the former keys count: {error}"
            else:
                told = await asyncio.gather(*(_told_of_keys(router, keys) for router in self.routers))
                now = "; ".join(failed for _, failed in told if failed)
                if not now and any(new for new, _ in told):
                    say(NEW_KEYS)
            if now and now != said:
                say(now)
            said = now

    async def drain(self, timeout_s: float) -> int | None:
        """Refuse new requests and wait for the running ones; returns how many did not end in time.

        None if no router answers, within `DRAIN_ANSWER_S` more: they hang or are being started again.
        """
        left = await asyncio.gather(*(_left_after_drain(router, timeout_s) for router in self.routers))
        known = [number for number in left if number is not None]
        return sum(known) if known else None


async def _told_of_keys(router: RouterHandle, keys: KeyHashes) -> tuple[bool, str]:
    """Return whether these are new to it, and what it keeps if it does not answer; it is told again."""
    try:
        return await router.use_keys(keys), ""
    except DeploymentFailed as error:
        return False, f"{router.name} has the former keys: {error}"


async def _left_after_drain(router: RouterHandle, timeout_s: float) -> int | None:
    try:
        return int(await router.call("drain", timeout_s, timeout_s=timeout_s + DRAIN_ANSWER_S))
    except DeploymentFailed:
        return None


@asynccontextmanager
async def deploy(plan: Plan, say: Say) -> AsyncIterator[Deployment]:
    """Place and start everything; on exit stop it. Raises PlacementError, NameTaken or DeploymentFailed."""
    cores = CoreTable(share=plan.config.ray.share_cores)
    group = _RouterGroup(plan)  # first: it is what has the deployment's name
    workers = [WorkerHandle(plan, planned, cores) for planned in plan.workers]
    try:
        yield await _start(plan, workers, group, cores, say)
    finally:
        for sentence in await _stop([worker for worker in workers if not worker.retired], group):
            say(sentence)
        group.give_back()


class _RouterGroup:
    """The routers, and the dispatcher if there are several."""

    def __init__(self, plan: Plan) -> None:
        number = plan.routers
        self.dispatcher = DispatcherHandle(plan) if number > 1 else None
        self._place = routers_place(plan.config)
        self.routers = [RouterHandle(plan, index, self.dispatcher, self._place) for index in range(number)]
        if self.dispatcher is not None:
            self.dispatcher.routers = self.routers

    def give_back(self) -> None:
        """Give back what the routers took of their node, once they have ended."""
        if self._place is not None:
            with suppress(RayError):  # the cluster may be gone
                remove_placement_group(self._place)

    @property
    def all(self) -> list[RouterHandle | DispatcherHandle]:
        """All of them, routers first: they know a worker before the dispatcher may choose it."""
        return [*self.routers, *([self.dispatcher] if self.dispatcher else [])]

    @property
    def title(self) -> str:
        """What they are, for sentences."""
        return "the router" if self.dispatcher is None else f"{len(self.routers)} routers with a dispatcher"

    async def serve(self, addresses: list[str], hardware: dict[Pool, PoolHardware]) -> str:
        """Have all of them serve; returns the URL of the first router, whose port the others share."""
        first, *others = self.routers
        if self.dispatcher is not None:
            await self.dispatcher.serve(addresses)
        url = await first.serve(addresses, hardware)
        for router in others:
            router.join(first.port)
        await _all_or_fail([router.serve(addresses, hardware) for router in others])
        return url

    @property
    def lead(self) -> RouterHandle | DispatcherHandle:
        """The one that pairs workers and gives them roles."""
        return self.dispatcher or self.routers[0]


async def _start(
    plan: Plan, workers: list[WorkerHandle], group: _RouterGroup, cores: CoreTable, say: Say
) -> Deployment:
    say(f"placing {len(workers)} workers and {group.title} on Ray")
    places = await _placed(plan.config, workers, group, say)
    titles = (worker.planned.title for worker in workers)
    dtype = dtype_of_nodes(plan.config, dict(zip(titles, places, strict=True)))
    if dtype != plan.dtype:
        say(f"the workers' machines compute {dtype} best, this one {plan.dtype}: {dtype} it is")
        plan = replace(plan, dtype=dtype)
        for worker in workers:
            worker.follow(plan)
        for one in group.all:
            one.follow(plan)
    if plan.config.ray.address is not None:
        await _refuse_unfit_nodes(plan, workers, places, say)
    for worker in workers:
        worker.take_cores()  # for all before the first one starts, so that too few cores are reported at once
    hardware = await _hardware(plan, workers, say)
    begins: list[tuple[str, Awaitable[Any]]] = [
        *((worker.planned.title, _timed_load(worker, say)) for worker in workers),
        *((one.name, one.prepare()) for one in group.all),
    ]
    started = await _told_of(begins, lambda left: f"still loading: {', '.join(left)}", say)
    ready: list[tuple[WorkerReady, float]] = started[: len(workers)]
    say(f"connecting {group.title} to the workers")
    addresses = {handle.name: worker.address for handle, (worker, _) in zip(workers, ready, strict=True)}
    url = await group.serve(list(addresses.values()), hardware)
    rows = [
        Row(
            name=handle.name,
            pool=handle.planned.pool,
            node=place.host,
            cores=",".join(map(str, worker.cores)) or f"{handle.gpus:g} GPU",
            pid=str(worker.pid),
            engine_pids=",".join(map(str, worker.engine_pids)),
            address=worker.address,
            kv_blocks=str(worker.num_kv_blocks),
            start=f"{start_s:.0f} s",
        )
        for handle, place, (worker, start_s) in zip(workers, places, ready, strict=True)
    ]
    supervisor = Supervisor(workers, group.all, addresses, plan.config.supervision)

    def another(name: str, pool: Pool) -> WorkerHandle:
        workers[:] = [worker for worker in workers if not worker.retired]
        workers.append(WorkerHandle(plan, plan.another_worker(name, pool), cores))
        return workers[-1]  # ended with the others

    start_within_s = plan.config.ray.patience_s + plan.config.supervision.start_timeout_s
    steps = OperationSteps(group.lead, supervisor, another, start_within_s, plan.config.transfer.lease_s)
    operations = OperationRunner(group.routers, steps.carry_out)
    autoscaler = Autoscaler(plan.config.autoscale, group.lead, group.routers, supervisor, operations)
    pairs = list(await group.lead.call("kv_pairs"))  # what carries KV between which workers
    warnings = await limits_too_short(plan.config.router.slo, group.routers[0], say)
    keys = plan.config.security.keys
    return Deployment(url, rows, pairs, group.routers, supervisor, operations, autoscaler, warnings, keys)


async def limits_too_short(slo: SloConfig, router: RouterHandle, say: Say) -> list[str]:
    """Return which of these limits an idle server cannot keep; a few requests measure that, if there are limits."""
    if (slo.ttft_ms, slo.tpot_ms) == (None, None):
        return []
    say("measuring an idle server, for router.slo")
    try:
        return list(await router.call("limits_too_short", timeout_s=MEASURED_WITHIN_S))
    except DeploymentFailed as error:  # the supervisor sees to a router that is lost
        say(f"whether the limits of router.slo can be kept is not known: {error}")
        return []


async def _placed(
    config: RidgelineConfig, workers: list[WorkerHandle], group: _RouterGroup, say: Say
) -> list[NodePlace]:
    """Wait until Ray has placed all, which may take as long as its autoscaler needs to start machines."""
    takes = {one.planned.title: (one.planned.section, config.takes(one.planned.settings)) for one in workers}
    takes |= {one.name: ("router", config.router.resources if one is group.routers[0] else {}) for one in group.all}

    def what_waits(left: list[str]) -> str:
        wishes = ", ".join(name + _wish(takes[name][1]) for name in left)
        return f"waiting for Ray to place {wishes}; {what_there_is(takes[name] for name in left)}"

    begins: list[tuple[str, Awaitable[Any]]] = [
        *((worker.planned.title, worker.find_place()) for worker in workers),
        *((one.name, one.find_place()) for one in group.all),
    ]
    try:
        return list(await _told_of(begins, what_waits, say))[: len(workers)]
    except NoPlace as error:
        wanted = ", ".join(name + _wish(numbers) for name, (_, numbers) in takes.items())
        there_is = await asyncio.to_thread(what_there_is, takes.values())
        raise PlacementError(f"{error}. Wanted: {wanted}. {there_is}: add machines or lower pools.*") from error


def _wish(takes: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{number:g} {name}' for name, number in takes.items())})" if takes else ""


async def _told_of(begins: list[tuple[str, Awaitable[T]]], sentence: Callable[[list[str]], str], say: Say) -> list[T]:
    """Await all, and say every `PROGRESS_EVERY_S` which names have not ended; the first failure ends the others."""
    left = [name for name, _ in begins]

    async def one(name: str, begun: Awaitable[T]) -> T:
        result = await begun
        left.remove(name)
        return result

    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            say(await asyncio.to_thread(sentence, list(left)))

    telling = asyncio.create_task(tell())
    try:
        return await _all_or_fail([one(name, begun) for name, begun in begins])
    finally:
        telling.cancel()


async def _refuse_unfit_nodes(plan: Plan, workers: list[WorkerHandle], places: list[NodePlace], say: Say) -> None:
    """Have the first worker of each machine check it for all that are there, before an engine loads anywhere.

    Raises PlacementError with a sentence for each thing that is missing.
    """
    there: dict[str, list[WorkerHandle]] = {}
    for worker, place in zip(workers, places, strict=True):
        there.setdefault(place.machine, []).append(worker)
    hosts = {place.machine: place.host for place in places}
    say(f"checking {', '.join(sorted({hosts[machine] for machine in there}))}")
    asked = [
        here[0].call_apart("unfit", plan.config, Counter(worker.planned.pool for worker in here))
        for here in there.values()
    ]
    found: list[list[str]] = await _all_or_fail(asked)
    sentences = [
        f"{hosts[machine]}: {sentence}" for machine, each in zip(there, found, strict=True) for sentence in each
    ]
    if sentences:
        raise PlacementError("\n".join(sentences))


async def _hardware(plan: Plan, workers: list[WorkerHandle], say: Say) -> dict[Pool, PoolHardware]:
    """Measure the peaks of one worker of each pool, one after the other and before any engine makes the node busy."""
    say("reading or measuring peak FLOP/s and memory bandwidth")
    first = {worker.planned.pool: worker for worker in reversed(workers)}
    found: dict[Pool, PoolHardware | str] = {}
    for pool, worker in first.items():
        settings = worker.planned.settings
        found[pool] = await worker.call_apart(
            "hardware", plan.dtype, settings.cores_per_worker, settings.gpus_per_worker, plan.multiplies_in_fp8
        )
    peaks = known_peaks(found, say)
    started_for = {worker.name: worker.planned.pool for worker in workers}
    for roles in plan.roles.by_mode.values():  # a worker has the same hardware in each of its pools
        for worker_id, role in roles.items():
            if started_for[worker_id] in peaks:
                peaks.setdefault(role.pool, peaks[started_for[worker_id]])
    return peaks


def known_peaks(found: Mapping[Pool, PoolHardware | str], say: Say) -> dict[Pool, PoolHardware]:
    """Return the pools whose peaks are known, and say of the others what is left out: metrics alone need them."""
    for pool, why_not in found.items():
        if isinstance(why_not, str):
            say(f"{pool}: {why_not}; until then /metrics has no peaks of this pool")
    return {pool: peaks for pool, peaks in found.items() if not isinstance(peaks, str)}


async def _timed_load(worker: WorkerHandle, say: Say) -> tuple[WorkerReady, float]:
    began_s = time.monotonic()
    cores = worker.take_cores()
    say(f"{worker.planned.title}: loading the engine" + (f" on core {','.join(map(str, cores))}" if cores else ""))
    ready = await worker.load()
    took_s = time.monotonic() - began_s
    say(f"{worker.planned.title}: ready after {took_s:.0f} s")
    return ready, took_s


async def _all_or_fail(awaitables: list[Any]) -> list[Any]:
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _within(limit_s: float, begins: list[Coroutine[Any, Any, None]]) -> None:
    """Await all of these, at most for this long."""
    if begins:
        await asyncio.wait([asyncio.ensure_future(begun) for begun in begins], timeout=limit_s)


async def _stop(workers: list[WorkerHandle], group: _RouterGroup) -> list[str]:
    """Stop gracefully, the routers first so that its clients hear why; then end what is left, also if it hangs.

    Between the two, workers let go of each other's KV caches, which are freed with their engines.
    If one cannot be ended, the others are ended all the same; returns a sentence for each that could not.
    """
    await _within(STOP_ROUTER_WITHIN_S, [one.stop() for one in group.all])
    await _within(LET_GO_WITHIN_S, [worker.close_peer_mappings() for worker in workers])
    await _within(STOP_WORKERS_WITHIN_S, [worker.stop() for worker in workers])
    everyone = (*group.all, *workers)
    ends = await asyncio.gather(*(handle.kill() for handle in everyone), return_exceptions=True)
    return [
        f"{handle.name} could not be ended, and may run on: {type(error).__name__}: {error}"
        for handle, error in zip(everyone, ends, strict=True)
        if isinstance(error, BaseException)
    ]
