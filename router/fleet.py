"""The workers this router is connected to: clients, load, pairing. Owned by `app.py`, read by the orchestrator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from engine.data_plane import OnUnclaimed, WorkerClient
from engine.errors import WorkerLost
from engine.messages import Pool, WorkerDescription, WorkerStatus
from kv_transfer.tls_files import TlsFiles
from router.pairing import KvPair, PairingRefused, pair_all, pair_newcomer
from router.policy import NoWorker, Score, WorkerLoad, pick

logger = logging.getLogger(__name__)
STATUS_INTERVAL_S = 0.5
CONNECT_TIMEOUT_S = 30.0
UNANSWERED_S = 4.0
"""Two questions in a row, of 2 s each (`engine.data_plane`)."""
RECOVERY_POLL_S = 0.1
STALLED_S = 20.0
"""A worker whose engine has work and made no step for so long gets no more; one step of a long prompt may take 10 s."""


class Worker:
    """One connected worker and what this router has outstanding there."""

    def __init__(self, client: WorkerClient, description: WorkerDescription) -> None:
        self.client = client
        self.description = description
        self.status: WorkerStatus | None = None
        self.answers = True
        """Whether it tells its status when asked; one that hangs gets no new work."""
        self._answered_s = time.monotonic()
        self._outstanding_prompt_tokens = 0
        self._running = 0

    @property
    def worker_id(self) -> str:
        """Its name in logs, metrics and tables."""
        return self.description.worker_id

    @property
    def pool(self) -> Pool:
        """The pool it belongs to."""
        return self.description.pool

    def load(self) -> WorkerLoad:
        """A snapshot for the policy."""
        status = self.status
        return WorkerLoad(
            worker_id=self.worker_id,
            connected=self.client.connected,
            draining=status.draining if status else False,
            healthy=self.answers and not (status and (status.engine_failed or status.stalled_s > STALLED_S)),
            outstanding_prompt_tokens=self._outstanding_prompt_tokens,
            running=self._running,
            kv_blocks_free=status.kv_blocks_free if status else self.description.num_kv_blocks,
            kv_blocks_total=self.description.num_kv_blocks,
        )

    async def refresh(self) -> None:
        """Ask for its status. One question that is not answered in time may be this router's own fault, and is none."""
        try:
            self.status = await self.client.status()
        except WorkerLost:
            if self.client.connected and time.monotonic() - self._answered_s < UNANSWERED_S:
                return
            self.status, self.answers = None, False
        else:
            self.answers, self._answered_s = True, time.monotonic()

    @contextmanager
    def reserve(self, prompt_tokens: int = 0) -> Iterator[PromptReservation]:
        """Count a sequence, and its prompt until `prompt_done`, against this worker while the block runs."""
        reservation = PromptReservation(self, prompt_tokens)
        self._running += 1
        try:
            yield reservation
        finally:
            self._running -= 1
            reservation.prompt_done()

    def add_prompt_tokens(self, count: int) -> None:
        """Called by the reservation."""
        self._outstanding_prompt_tokens += count


class PromptReservation:
    """Prompt tokens that a worker still has to compute for us."""

    def __init__(self, worker: Worker, prompt_tokens: int) -> None:
        self._worker = worker
        self._prompt_tokens = prompt_tokens
        worker.add_prompt_tokens(prompt_tokens)

    def prompt_done(self) -> None:
        """The first token is here; safe to call twice."""
        self._worker.add_prompt_tokens(-self._prompt_tokens)
        self._prompt_tokens = 0


class Fleet:
    """All workers by pool; they come and go."""

    def __init__(self, router_id: str, on_unclaimed: OnUnclaimed = lambda _: None, tls: TlsFiles | None = None) -> None:
        self._router_id = router_id
        self._tls = tls
        self._on_unclaimed = on_unclaimed
        self._workers: dict[str, Worker] = {}
        self._clients: dict[WorkerClient, asyncio.Task[None]] = {}
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
                worker = await self._open(address)
                self._workers[worker.worker_id] = worker
            self.kv_pairs = await pair_all(self.pool("prefill"), self.pool("decode"))
        await self.refresh()
        group.create_task(self._keep_fresh(), name="fleet-status")

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
            self._workers[worker.worker_id] = worker
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
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                return self.get(pick([worker.load() for worker in self.pool(pool)], score))
            except NoWorker as error:
                if time.monotonic() >= deadline_s:
                    raise NoWorker(f"no {pool} worker has been usable for {within_s:g} s") from error
            await asyncio.sleep(RECOVERY_POLL_S)

    async def refresh(self) -> None:
        """Read every worker's status now; one that is away or has not answered for `UNANSWERED_S` has none."""
        await asyncio.gather(*(worker.refresh() for worker in self.workers))

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            await self.refresh()

    async def _open(self, address: str) -> Worker:
        if self._group is None:
            raise WorkerLost("the router has not connected to its first workers yet")
        client = WorkerClient(address, self._router_id, self._on_unclaimed, self._tls)
        self._clients[client] = self._group.create_task(client.run(), name=f"client-{address}")
        try:
            await client.wait_connected(CONNECT_TIMEOUT_S)
            return Worker(client, await client.describe())
        except WorkerLost:
            await self._close_client(client)
            raise

    async def _close(self, worker: Worker) -> None:
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
