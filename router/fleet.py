"""The workers this router is connected to: clients, load, pairing. Owned by `app.py`, read by the orchestrator."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from engine.data_plane import OnUnclaimed, WorkerClient
from engine.errors import WorkerLost
from engine.messages import Pool
from kv_transfer.tls_files import TlsFiles
from router.pairing import KvPair, PairingRefused, pair_all, pair_newcomer
from router.policy import NoWorker, Score, pick
from router.worker import Worker

__all__ = ["Fleet", "Worker"]

logger = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 30.0


class Fleet:
    """All workers by pool; they come and go."""

    def __init__(self, router_id: str, on_unclaimed: OnUnclaimed = lambda _: None, tls: TlsFiles | None = None) -> None:
        self._router_id = router_id
        self._tls = tls
        self._on_unclaimed = on_unclaimed
        self._workers: dict[str, Worker] = {}
        self._clients: dict[WorkerClient, asyncio.Task[None]] = {}
        self._pollers: dict[Worker, asyncio.Task[None]] = {}
        self._usable: dict[Pool, asyncio.Event] = {}
        """Who waits for a worker of a pool; a new event each time one is, or may be, usable."""
        self._group: asyncio.TaskGroup | None = None
        self._change = asyncio.Lock()
        """One at a time: a prefill and a decode worker that came at once would each miss the other."""
        self.kv_pairs: list[KvPair] = []
        self.restarts: Counter[tuple[str, str]] = Counter()
        """By worker id and reason."""

    @property
    def workers(self) -> list[Worker]:
        """Every connected worker."""
        return list(self._workers.values())

    async def connect(self, addresses: list[str], group: asyncio.TaskGroup) -> None:
        """Connect to all workers, check that they can work together, and keep their status fresh in `group`.

        Raises WorkerLost or PairingRefused.
        """
        self._group = group
        async with self._change:
            for address in addresses:
                self._enter(await self._open(address))
            self.kv_pairs = await pair_all(self.pool("prefill"), self.pool("decode"))
        await self.refresh()

    async def replace(self, address: str, reason: str) -> None:
        """Take in a worker that was started again, in place of its older incarnation, and count why.

        Raises WorkerLost or PairingRefused; then all is as before. Done again with the same address it does nothing.
        """
        async with self._change:
            if any(worker.client.address == address for worker in self.workers):
                return
            worker = await self._open(address)
            try:
                pairs = await self._pair_with_connected(worker)
            except (WorkerLost, PairingRefused):
                await self._close(worker)
                raise
            former = self._workers.get(worker.worker_id)
            self._enter(worker)
            self.kv_pairs = list(dict.fromkeys([*self._pairs_without(worker.worker_id), *pairs]))
            self.restarts[worker.worker_id, reason] += 1
            if former is not None:
                await self._close(former)
        await worker.refresh()

    async def remove(self, worker_id: str) -> None:
        """Forget a worker that has left; an unknown one is forgotten already."""
        async with self._change:
            worker = self._workers.pop(worker_id, None)
            self.kv_pairs = self._pairs_without(worker_id)
            if worker is not None:
                await self._close(worker)
                if worker.pool == "prefill":
                    await self._pair_with_those_left()

    def pool(self, name: Pool) -> list[Worker]:
        """The workers of one pool."""
        return [worker for worker in self._workers.values() if worker.pool == name]

    def get(self, worker_id: str) -> Worker:
        """By id."""
        return self._workers[worker_id]

    def usable(self, name: Pool) -> list[Worker]:
        """The workers of one pool that may be given new work."""
        return [worker for worker in self.pool(name) if worker.load().usable]

    async def available(self, pool: Pool, score: Score, within_s: float) -> Worker:
        """The best usable worker of a pool; waits for one to come (back) if there is none. Raises NoWorker."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        return self.get(pick([worker.load() for worker in self.pool(pool)], score))
                    except NoWorker:
                        await self._usable.setdefault(pool, asyncio.Event()).wait()
        except TimeoutError as error:
            raise NoWorker(f"no {pool} worker has been usable for {within_s:g} s") from error

    def _tell_usable(self, pool: Pool) -> None:
        """Each waits until it finds one; nobody looks in between."""
        if pool in self._usable:
            self._usable.pop(pool).set()

    async def refresh(self, max_age_s: float = 0.0) -> None:
        """Know every worker's status, as it is now or was `max_age_s` ago; one that is away has none.

        Waits for the slowest answer. What each worker says is known as soon as it has said it.
        """
        await asyncio.gather(*(worker.refresh(max_age_s) for worker in self.workers))

    def _enter(self, worker: Worker) -> None:
        assert self._group is not None
        self._workers[worker.worker_id] = worker
        self._pollers[worker] = self._group.create_task(worker.keep_fresh(), name=f"poll-{worker.worker_id}")

    async def _open(self, address: str) -> Worker:
        if self._group is None:
            raise WorkerLost("the router has not connected to its first workers yet")
        client = WorkerClient(address, self._router_id, self._on_unclaimed, self._tls)
        self._clients[client] = self._group.create_task(client.run(), name=f"client-{address}")
        try:
            await client.wait_connected(CONNECT_TIMEOUT_S)
            return Worker(client, await client.describe(), self._tell_usable)
        except WorkerLost:
            await self._close_client(client)
            raise

    async def _close(self, worker: Worker) -> None:
        poller = self._pollers.pop(worker, None)
        if poller is not None:
            poller.cancel()
        await self._close_client(worker.client)

    async def _close_client(self, client: WorkerClient) -> None:
        running = self._clients.pop(client)
        running.cancel()
        await asyncio.wait((running,))
        await client.close()

    async def _pair_with_connected(self, worker: Worker) -> list[KvPair]:
        """One that is away or hangs now is no obstacle: it pairs when it comes back. Raises PairingRefused."""
        others = [one for one in self._connected() if one.worker_id != worker.worker_id]
        prefills = [one for one in (*others, worker) if one.pool == "prefill"]  # all: what is not named is forgotten
        decodes = [worker] if worker.pool == "decode" else [one for one in others if one.pool == "decode"]
        return await pair_newcomer(prefills, decodes)

    async def _pair_with_those_left(self) -> None:
        """A prefill worker has left: decode workers keep its KV cache mapped until they pair without it."""
        there = self._connected()
        prefills, decodes = ([one for one in there if one.pool == pool] for pool in ("prefill", "decode"))
        try:
            pairs = await pair_newcomer(prefills, decodes)
        except PairingRefused as error:  # layouts were checked when they came
            logger.warning("decode workers keep what they had of a prefill worker that has left: %s", error)
            return
        self.kv_pairs = list(dict.fromkeys([*self.kv_pairs, *pairs]))

    def _connected(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.client.connected]

    def _pairs_without(self, worker_id: str) -> list[KvPair]:
        return [pair for pair in self.kv_pairs if worker_id not in (pair.prefill, pair.decode)]
