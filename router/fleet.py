"""The workers this router is connected to: clients, load, pairing. Owned by `app.py`, read by the orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.data_plane import OnUnclaimed, WorkerClient
from engine.errors import WorkerLost
from engine.messages import Pool, WorkerDescription, WorkerStatus
from kv_transfer.handoff import explain_mismatch
from kv_transfer.tls_files import TlsFiles
from router.policy import WorkerLoad

STATUS_INTERVAL_S = 0.5
CONNECT_TIMEOUT_S = 30.0


class PairingRefused(Exception):
    """A prefill and a decode worker cannot exchange KV; the message names what differs."""


@dataclass(frozen=True)
class KvPair:
    """What carries KV blocks from a prefill worker to a decode worker."""

    prefill: str
    decode: str
    transport: str
    why: str
    """What stood in the way of a better transport; empty if nothing."""


class Worker:
    """One connected worker and what this router has outstanding there."""

    def __init__(self, client: WorkerClient, description: WorkerDescription) -> None:
        self.client = client
        self.description = description
        self.status: WorkerStatus | None = None
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
            outstanding_prompt_tokens=self._outstanding_prompt_tokens,
            running=self._running,
            kv_blocks_free=status.kv_blocks_free if status else self.description.num_kv_blocks,
            kv_blocks_total=self.description.num_kv_blocks,
        )

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
    """All workers by pool."""

    def __init__(self, router_id: str, on_unclaimed: OnUnclaimed = lambda _: None, tls: TlsFiles | None = None) -> None:
        self._router_id = router_id
        self._tls = tls
        self._on_unclaimed = on_unclaimed
        self._workers: dict[str, Worker] = {}
        self.kv_pairs: list[KvPair] = []

    @property
    def workers(self) -> list[Worker]:
        """Every connected worker."""
        return list(self._workers.values())

    async def connect(self, addresses: list[str], group: asyncio.TaskGroup) -> None:
        """Connect to all workers, check that they can work together, and keep their status fresh in `group`.

        Raises WorkerLost or PairingRefused.
        """
        for address in addresses:
            client = WorkerClient(address, self._router_id, self._on_unclaimed, self._tls)
            group.create_task(client.run(), name=f"client-{address}")
            await client.wait_connected(CONNECT_TIMEOUT_S)
            worker = Worker(client, await client.describe())
            self._workers[worker.worker_id] = worker
        self._check_pairs()
        await self._pair()
        await self.refresh()
        group.create_task(self._keep_fresh(), name="fleet-status")

    def pool(self, name: Pool) -> list[Worker]:
        """The workers of one pool."""
        return [worker for worker in self._workers.values() if worker.pool == name]

    def get(self, worker_id: str) -> Worker:
        """By id, as the policy returns it."""
        return self._workers[worker_id]

    async def refresh(self) -> None:
        """Read every worker's status now; one that does not answer has none."""
        await asyncio.gather(*(self._refresh_one(worker) for worker in self.workers))

    async def _refresh_one(self, worker: Worker) -> None:
        try:
            worker.status = await worker.client.status()
        except WorkerLost:
            worker.status = None

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            await self.refresh()

    async def _pair(self) -> None:
        """Every decode worker agrees with every prefill worker on what will carry the bytes, before any request."""
        sources = {
            address: worker for worker in self.pool("prefill") for address in worker.description.transfer_addresses
        }
        for decode in self.pool("decode"):
            answer = await decode.client.pair(list(sources))
            for address, sentence in answer.refused.items():
                raise PairingRefused(
                    f"{sources[address].worker_id} and {decode.worker_id} cannot exchange KV: {sentence}"
                )
            for address, (transport, why) in answer.paired.items():
                pair = KvPair(sources[address].worker_id, decode.worker_id, transport, why)
                if pair not in self.kv_pairs:
                    self.kv_pairs.append(pair)

    def _check_pairs(self) -> None:
        for prefill in self.pool("prefill"):
            for decode in self.pool("decode"):
                sentence = explain_mismatch(prefill.description.layout, decode.description.layout)
                if sentence is not None:
                    raise PairingRefused(f"{prefill.worker_id} and {decode.worker_id} cannot exchange KV: {sentence}")
