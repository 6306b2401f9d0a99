"""The workers that this router is connected to: clients, load, pairing.

`ridgeline.router.server` creates it; `ridgeline.router.dispatch` reads it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress

from ridgeline.contracts.errors import AdapterRefused, WorkerLost
from ridgeline.contracts.rpc.tls import TlsFiles
from ridgeline.contracts.tasks import Adapter
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.contracts.workers import WorkerDescription
from ridgeline.router.fleet.pairing import KvPair, PairingRefused, check_layouts, pair_all, pair_while_serving
from ridgeline.router.fleet.request_route import Demand, Route, answer_pool, exchanging_pools, pools_of, route_for
from ridgeline.router.fleet.roles import RoleTable
from ridgeline.router.fleet.worker import STALL_TIMEOUT_S, Worker
from ridgeline.worker_runtime.client import OnUnclaimed, WorkerClient

__all__ = ["Fleet", "Worker"]

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
ROLES_WITHIN_S = 20.0
"""How long a change of mode waits for workers to take their roles, which they do between two steps."""
ROLE_LOOK_S = 0.05
ASKED_AT_ONCE = 8
"""Workers that are asked for their status in one turn of the event loop."""
STRAGGLERS_S = 5.0
"""How long a router that is started again waits for workers that it does not reach, once it reaches one: as long as one
attempt of gRPC's to connect takes at the most (`ridgeline.worker_runtime.client`)."""
PAIR_WITHIN_S = 10.0
"""How long adding a worker waits for pairings that are not answered."""
SPLIT_FOR_EVER = RoleTable("disaggregated")
OnGone = Callable[[Sequence[str]], None]
"""Receives the addresses at which the KV of a removed worker could be fetched."""


class Fleet:
    """All workers by pool; they may come and go at any time."""

    def __init__(
        self,
        router_id: str,
        on_unclaimed: OnUnclaimed = lambda _: None,
        tls: TlsFiles | None = None,
        *,
        on_gone: OnGone = lambda _: None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        roles: RoleTable = SPLIT_FOR_EVER,
        leads: bool = True,
        reuses_decode_kv: bool = False,
    ) -> None:
        """`leads`: whether it pairs workers and gives them their roles; one of several routers follows instead.

        `reuses_decode_kv`: whether prefill workers fetch from decode workers too.
        """
        self._router_id = router_id
        self._tls = tls
        self._on_unclaimed = on_unclaimed
        self._on_gone = on_gone
        self._stall_timeout_s = stall_timeout_s
        self.roles = roles
        self._leads = leads
        self._reuses_decode_kv = reuses_decode_kv
        self.mode: Mode = roles.first
        self._role_number = 0
        self._workers: dict[str, Worker] = {}
        self._clients: dict[WorkerClient, asyncio.Task[None]] = {}
        self._pollers: dict[Worker, asyncio.Task[None]] = {}
        self.on_news: Callable[[], object] = lambda: None
        """Called after each answer of a worker, and when the mode has changed."""
        self._group: asyncio.TaskGroup | None = None
        self.adapters: Mapping[str, Adapter] = {}
        """The LoRA adapters that requests can choose, by name; replaced with each change."""
        self.on_adapters: Callable[[], object] = lambda: None
        """Called when they have changed."""
        self.kv_pairs: list[KvPair] = []
        self._links: tuple[list[KvPair], set[tuple[str, str]]] = [], set()
        """The pairs of which the set is."""
        self._carried_by: dict[tuple[str, str], str] = {}
        """By prefill and decode worker, the transport of their last pairing."""
        self.restarts: Counter[tuple[Pool, str, str]] = Counter()
        """Number of restarts by pool, worker id and reason."""
        self.away: dict[str, str] = {}
        """Workers that are lost again and again, by id, and how they are tried again."""
        self._missed_since_s: dict[str, float] = {}
        """By address, since when it has not reached a worker that it did not reach when it started."""

    @property
    def workers(self) -> list[Worker]:
        """All connected workers."""
        return list(self._workers.values())

    async def connect(self, addresses: list[str], group: asyncio.TaskGroup, *, some: bool = False) -> None:
        """Connect to all workers, check that they can work together, and poll their status in `group`.

        With `some` it begins with those that it reaches, if there are any; the others are `unreached`. Raises
        WorkerLost or PairingRefused.
        """
        self._group = group
        opening = {asyncio.create_task(self._first_time(address)): address for address in addresses}
        try:
            workers = await (self._those_reached(opening) if some else asyncio.gather(*opening))
            newest = self.roles.newest([worker.description for worker in workers])
            self._assign(newest.mode if newest else self.mode, newest.number if newest else 1, workers)
            if self._leads:
                self.offer_adapters({one.name: one for worker in workers for one in worker.description.adapters})
                await asyncio.gather(*map(self.give_adapters, workers))
            for worker in workers:
                self._enter(worker)
        finally:
            for task in opening:
                task.cancel()
        if self._leads:
            self.kv_pairs = await pair_all(self._sources(self.mode, self.workers))
            self._note_transports(self.kv_pairs)
        await self.refresh()

    async def _first_time(self, address: str) -> Worker:
        client = self._client(address)
        try:
            return await self._attach(client, await client.identify(CONNECT_TIMEOUT_S))
        except BaseException:
            await self._close_client(client)
            raise

    async def _those_reached(self, opening: Mapping[asyncio.Task[Worker], str]) -> list[Worker]:
        """Return the workers that are reached soon after the first one. Raises WorkerLost if there is none."""
        left = {*opening}
        while left and not any(_succeeded(task) for task in opening):
            _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        if left:
            await asyncio.wait(left, timeout=STRAGGLERS_S)
        reached = [task.result() for task in opening if _succeeded(task)]
        if not reached:
            return list(await asyncio.gather(*opening))  # raises why
        self._missed_since_s = {address: time.monotonic() for task, address in opening.items() if not _succeeded(task)}
        return reached

    async def replace(self, address: str, reason: str | None) -> None:
        """Add a worker that was started again, in place of its older incarnation, and count the reason if it has one.

        Raises WorkerLost or PairingRefused, and then changes nothing. Does nothing for an incarnation that it already
        has; addresses are not compared, since another worker may have had this one. Concurrent calls are allowed: each
        worker is entered before it looks for others to pair with, so that they find each other.
        """
        client = self._client(address)
        try:
            description = await client.identify(CONNECT_TIMEOUT_S)
            known = self._workers.get(description.worker_id)
            if known is not None and known.description.incarnation == description.incarnation:
                await self._close_client(client)
                return
            worker = await self._attach(client, description)
            self._assign(self.mode, self._role_number, (worker,))
            self._check_layout(worker)
            await self.give_adapters(worker)
        except (WorkerLost, PairingRefused):
            await self._close_client(client)
            raise
        former = self._workers.get(worker.worker_id)
        self._missed_since_s.pop(address, None)
        worker.held_back = True
        self.kv_pairs = self._pairs_without(worker.worker_id)
        if reason is not None:
            self.restarts[worker.pool, worker.worker_id, reason] += 1
        self._enter(worker)
        if former is not None:
            await self._close(former)
        try:
            await self._pair(self._to_pair_after(worker))
        finally:
            worker.held_back = False
        await worker.refresh()

    def offer_adapters(self, adapters: Mapping[str, Adapter]) -> None:
        """Let requests choose these from now on; their workers have them already."""
        self.adapters = adapters
        self.on_adapters()

    async def give_adapters(self, worker: Worker) -> None:
        """Have a worker take in what it lacks, when it comes. Without an adapter it gets no requests for it."""
        if not self._leads:
            return
        had = worker.adapters.loaded.copy()
        while lacking := [one for one in self.adapters.values() if one.key not in had]:  # some may come meanwhile
            adapter = lacking[0]
            had.add(adapter.key)
            try:
                await worker.client.load_adapter(adapter.name, adapter.path, adapter.digest)
                worker.adapters.load(adapter.key)
            except AdapterRefused as error:
                logger.warning("%s gets no requests for the adapter %s: %s", worker.title, adapter.name, error)

    def when_connected(self, worker: Worker, act: Callable[[Worker], Awaitable[None]]) -> None:
        """Do this with a worker once it is connected; its next incarnation learns by itself what there is."""

        async def wait_and_act() -> None:
            while worker in self.workers:
                with suppress(WorkerLost):
                    await worker.client.wait_connected(CONNECT_TIMEOUT_S)
                    await act(worker)
                    return
                await asyncio.sleep(ROLE_LOOK_S)

        assert self._group is not None
        self._group.create_task(wait_and_act(), name=f"catch-up-{worker.worker_id}")

    async def remove(self, worker_id: str) -> None:
        """Forget a worker that has left; does nothing if it is not known."""
        worker = self._workers.pop(worker_id, None)
        self.kv_pairs = self._pairs_without(worker_id)
        for gone in [pair for pair in self._carried_by if worker_id in pair]:
            del self._carried_by[gone]
        for series in [series for series in self.restarts if series[1] == worker_id]:  # an id is never used again
            del self.restarts[series]
        if worker is None:
            return
        await self._close(worker)
        had = self._sources(self.mode, [worker, *self.workers])  # they keep its KV cache mapped until they pair again
        await self._pair([one for one, sources in had.items() if worker in sources])

    async def change_mode(self, mode: Mode, on_change: Callable[[], object] = lambda: None) -> None:
        """Give every worker its role in this mode. What runs on a worker goes on there, whatever its role becomes.

        Pairs the workers that will exchange KV before anything is sent their way, calls `on_change` at the moment of
        the change, and waits until all that answer have their role; the others get it when they answer. Call it from
        one task at a time. Raises ModeImpossible or PairingRefused, and then changes nothing.
        """
        self.roles.require(mode)
        sources = self._sources(mode, self._connected())
        check_layouts(sources)
        await self._pair(sources, sources)
        self._assign(mode, self._role_number + 1, self.workers)
        on_change()
        self.on_news()
        with suppress(TimeoutError):
            async with asyncio.timeout(ROLES_WITHIN_S):
                await self._roles_taken()

    @property
    def role_number(self) -> int:
        """The number of the change that gave the workers their present roles."""
        return self._role_number

    def follow(self, mode: Mode, role_number: int) -> None:
        """Take over the mode from the dispatcher, which has told the workers."""
        if role_number != self._role_number:
            self._assign(mode, role_number, self.workers)
            self.on_news()

    async def _roles_taken(self) -> None:
        """Wait until every worker that answers has its role; one that is in a long step takes it after that."""
        await self.refresh()
        while any(worker.status is not None and not worker.has_its_role for worker in self.workers):
            await asyncio.sleep(ROLE_LOOK_S)
            await self.refresh()

    def _sources(self, mode: Mode, workers: Sequence[Worker]) -> dict[Worker, list[Worker]]:
        """Return from which others each of these workers fetches KV in a mode, those left out that fetch none."""
        pools = exchanging_pools(mode)
        if pools is None:
            return {}
        gives, takes = ([one for one in workers if self._pool_in(mode, one) == pool] for pool in pools)
        sources = {sink: [one for one in gives if one is not sink] for sink in takes}
        if self._reuses_decode_kv and gives != takes:
            sources |= dict.fromkeys(gives, takes)
        return sources

    def _pool_in(self, mode: Mode, worker: Worker) -> Pool:
        role = self.roles.role_of(worker.worker_id, worker.description.pool, mode, 0)
        return role.pool if role else worker.description.pool

    def _to_pair_after(self, newcomer: Worker) -> list[Worker]:
        """Return the workers that must pair because this one has come."""
        sources = self._sources(self.mode, self.workers)
        return [one for one, its in sources.items() if one is newcomer or newcomer in its]

    def _assign(self, mode: Mode, number: int, workers: Sequence[Worker]) -> None:
        self.mode, self._role_number = mode, number
        for worker in workers:
            worker.assign(self.roles.role_of(worker.worker_id, worker.description.pool, mode, number))
            worker.outstanding.favours = None

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of every mode that it can serve."""
        return tuple(pool for mode in self.roles.modes for pool in pools_of(mode))

    def unreached(self, for_s: float) -> list[str]:
        """Return the addresses of workers that this router has not reached for this many seconds; 0: does not now."""
        now_s = time.monotonic()
        return [
            *(address for address, since_s in self._missed_since_s.items() if now_s - since_s >= for_s),
            *(worker.client.address for worker in self.workers if worker.unreached_s > for_s),
        ]

    def pool(self, name: Pool) -> list[Worker]:
        """Return the workers of one pool."""
        return [worker for worker in self._workers.values() if worker.pool == name]

    def get(self, worker_id: str) -> Worker:
        """Return the worker with this id. Raises KeyError."""
        return self._workers[worker_id]

    def find(self, worker_id: str) -> Worker | None:
        """Return the worker with this id; None if it is not known."""
        return self._workers.get(worker_id)

    def usable(self, name: Pool) -> list[Worker]:
        """Return the workers of one pool that may get new work."""
        return [worker for worker in self.pool(name) if worker.usable]

    def route(self, demand: Demand, min_remote_prefill_tokens: int) -> Route:
        """Return which way a request goes at this moment."""
        usable = self._usable_pools(demand.avoided) or self._usable_pools()
        return route_for(demand, self.mode, min_remote_prefill_tokens, usable)

    @property
    def answer_pool(self) -> Pool:
        """The pool whose workers decode at this moment."""
        return answer_pool(self.mode, self._usable_pools())

    def answering(self) -> list[Worker]:
        """Return the workers of the pool that decodes at this moment."""
        return self.pool(self.answer_pool)

    def _usable_pools(self, avoided: AbstractSet[str] = frozenset()) -> set[Pool]:
        found: set[Pool] = set()
        for worker in self._workers.values():
            if worker.pool not in found and worker.usable and worker.worker_id not in avoided:
                found.add(worker.pool)
        return found

    async def refresh(self) -> None:
        """Update every worker's status; a worker that does not answer has none.

        Waits for the slowest answer; each worker's status is updated as soon as it answers.
        """
        asking: list[asyncio.Task[None]] = []
        for number, worker in enumerate(self.workers, 1):
            asking.append(asyncio.create_task(worker.refresh(), name=f"refresh-{worker.worker_id}"))
            if number % ASKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # streams go first: asking 64 workers at once would take the loop for 10 ms
        await asyncio.gather(*asking)

    def _enter(self, worker: Worker) -> None:
        assert self._group is not None
        self._workers[worker.worker_id] = worker
        self._pollers[worker] = self._group.create_task(worker.keep_fresh(), name=f"poll-{worker.worker_id}")

    def _client(self, address: str) -> WorkerClient:
        if self._group is None:
            raise WorkerLost("the router has not connected to its first workers yet")
        return WorkerClient(address, self._router_id, self._on_unclaimed, self._tls)

    async def _attach(self, client: WorkerClient, description: WorkerDescription) -> Worker:
        assert self._group is not None
        self._clients[client] = self._group.create_task(client.run(), name=f"client-{client.address}")
        await client.wait_connected(CONNECT_TIMEOUT_S)
        return Worker(client, description, lambda: self.on_news(), self._stall_timeout_s, gives_role=self._leads)

    async def _close(self, worker: Worker) -> None:
        poller = self._pollers.pop(worker, None)
        if poller is not None:
            poller.cancel()
        await self._close_client(worker.client)
        self._on_gone(worker.description.transfer_addresses)

    async def _close_client(self, client: WorkerClient) -> None:
        running = self._clients.pop(client, None)
        if running is not None:
            running.cancel()
            await asyncio.wait((running,))
        await client.close()

    def _check_layout(self, newcomer: Worker) -> None:
        others = [one for one in self._connected() if one.worker_id != newcomer.worker_id]
        check_layouts(self._sources(self.mode, [*others, newcomer]))

    async def _pair(self, sinks: Iterable[Worker], sources: Mapping[Worker, list[Worker]] | None = None) -> None:
        """Pair all of them at once, with these sources or with those that each has when it is its turn.

        One that does not answer is no obstacle: it pairs when it answers or comes back.
        """
        if not self._leads:
            return
        assert self._group is not None
        asked = [
            self._group.create_task(self._pair_one(sink, sources), name=f"pair-{sink.worker_id}")
            for sink in sinks
            if sink.client.connected
        ]
        if asked:
            await asyncio.wait(asked, timeout=PAIR_WITHIN_S)

    async def _pair_one(self, sink: Worker, sources: Mapping[Worker, list[Worker]] | None) -> None:
        async with sink.pairing:
            if sources is None:
                sources = self._sources(self.mode, self._connected())  # all: others are forgotten
            its = sources.get(sink, [])
            pairs = await pair_while_serving(its, sink)
        still = {*self.workers}
        if sink not in still:
            return
        there = {one.worker_id for one in its if one in still}
        new = [pair for pair in pairs if pair.source in there]
        self._note_transports(new)
        self.kv_pairs = list({pair.link: pair for pair in (*self.kv_pairs, *new)}.values())

    def is_paired(self, source: Worker, sink: Worker) -> bool:
        """Return whether one of these workers can fetch KV from the other."""
        if self._links[0] is not self.kv_pairs:
            self._links = self.kv_pairs, {pair.link for pair in self.kv_pairs}
        return (source.worker_id, sink.worker_id) in self._links[1]

    def _note_transports(self, pairs: Sequence[KvPair]) -> None:
        """Log where two workers paired by another transport than the last time: nobody would notice a slower one."""
        for pair in pairs:
            before = self._carried_by.get(pair.link, pair.transport)
            self._carried_by[pair.link] = pair.transport
            if before != pair.transport:
                why = f" ({pair.why})" if pair.why else ""
                logger.warning("KV %s -> %s goes by %s now, by %s before%s", *pair.link, pair.transport, before, why)

    def _connected(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.client.connected]

    def _pairs_without(self, worker_id: str) -> list[KvPair]:
        return [pair for pair in self.kv_pairs if worker_id not in pair.link]


def _succeeded(task: asyncio.Task[Worker]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
