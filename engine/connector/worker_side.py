"""The connector's worker side: owns the transfer service and turns its reports into vLLM's.

It runs in the process that holds the KV cache. The service has its own thread; nothing here waits for the network.
Methods that implement one of vLLM's hooks have its name. `apply` serves two hooks, the first of which comes every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from ridgeline.contracts.handoff import KvHandoff, TransferResult, new_handoff_id
from ridgeline.engine.connector.messages import (
    BYTES,
    STALE_HANDOFFS,
    CounterStats,
    Endpoint,
    Publish,
    StepInstructions,
    TransferResults,
)
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.service import PairedTransport, RankLayers, TransferService

RANK_WAIT_S = 0.02
"""The time that a step without work waits for a transfer to end, where this rank is not in the step loop's process and
so cannot wake it.

Without it vLLM would spin at 1 kHz and send statistics to the front end each time, which on a small machine takes the
CPU time that the copy needs. The end of a transfer ends the wait at once; a new request may wait this long.
"""
GPU_RANK_WAIT_S = 0.001
"""The same beside a GPU, whose whole prefill may take less than the other, and whose host has cores to spare."""


WARM_UP_BLOCKS = 17
WARM_UP_ROUNDS = 4
WARM_UP_LEASE_S = 5.0


class WorkerSide:
    """One rank's end of hand-offs."""

    def __init__(self, cache: RankLayers, options: TransferOptions, on_news: Callable[[], None] = lambda: None) -> None:
        """`on_news` is called, in any thread, when `get_transfer_results` or `take_arrived` has something."""
        self.layout = cache.layout
        first = next(iter(cache.layers.values()))
        self._num_blocks = int(first.shape[0])
        self._layers = {name: number for number, name in enumerate(cache.layers, start=1)}
        self._writes_at_once = first.device.type == "cpu"
        """Whether a layer is in the cache when its call returns; on a GPU the write is only queued then."""
        self._service = TransferService(cache, options, on_news)
        self._service.start()
        self._on_news = on_news
        self._rank_wait_s = RANK_WAIT_S if self._writes_at_once else GPU_RANK_WAIT_S
        for transport in warm_ups(options, first.device):
            self._warm_up(transport)
        self._after_warm_up = self._service.stats()
        """The counters so far, to be subtracted: no request's KV was moved."""
        self._results = TransferResults()
        self._pairing: tuple[str, Future[dict[str, PairedTransport | str]]] | None = None

    def _warm_up(self, transport: str | None) -> None:
        """Hand blocks off to ourselves, so that buffers and connections exist before the first client's KV arrives.

        By `transport` if it is named, else by the one that is picked.

        The cache is still empty, and each block is copied onto itself: zeros. A
        failure is ignored here, because the first real transfer will report it.
        """
        if transport is not None:
            with suppress(TimeoutError):
                self._service.pair([self._service.address], transport).result(WARM_UP_LEASE_S)
        blocks = list(range(1, min(self._num_blocks, WARM_UP_BLOCKS)))
        for number in range(WARM_UP_ROUNDS):
            name = f"warm-up-{transport}-{number}"
            handoff = KvHandoff(
                handoff_id=new_handoff_id(),
                # Our own address once per rank: with equal tensor-parallel sizes, rank i fetches from addresses[i].
                addresses=(self._service.address,) * self.layout.tensor_parallel_size,
                num_blocks=len(blocks),
                num_tokens=len(blocks) * self.layout.block_size,
                compatibility_hash=self.layout.compatibility_hash(),
                lease_s=WARM_UP_LEASE_S,
                num_bytes=len(blocks) * self.endpoint.block_bytes_all_layers,
            )
            self._service.publish(name, handoff.handoff_id, blocks, handoff.num_tokens)
            self._service.start_fetch(name, handoff, {0: blocks})
            open_ends = {"sent", "received"}
            give_up_s = time.monotonic() + WARM_UP_LEASE_S
            while open_ends and time.monotonic() < give_up_s:
                self._service.wait(WARM_UP_LEASE_S)
                done = self._service.poll()
                open_ends -= ({"sent"} if done.sent else set()) | ({"received"} if done.received else set())

    def pair(
        self, ticket: str, addresses: Sequence[str], transport: str | None
    ) -> dict[str, PairedTransport | str] | None:
        """Pair like `TransferService.pair`, without stopping the step loop: None while it runs; call again then."""
        if self._pairing is None or self._pairing[0] != ticket:
            self._pairing = (ticket, self._service.pair(addresses, transport))
        asked = self._pairing[1]
        return asked.result() if asked.done() else None

    def release_own(self, handoff_ids: Sequence[str]) -> None:
        """Free the blocks of this engine's hand-offs that no router will release."""
        for handoff_id in handoff_ids:
            self._service.leases.release(handoff_id, by="its own worker")

    @property
    def endpoint(self) -> Endpoint:
        """This rank's address and block sizes, for the scheduler side."""
        return Endpoint(
            address=self._service.address,
            layout_hash=self.layout.compatibility_hash(),
            num_blocks=self._num_blocks,
            block_bytes_all_layers=self.layout.block_bytes * self.layout.num_layers,
        )

    def apply(self, instructions: StepInstructions) -> None:
        """Start what the scheduler side decided. Called before the forward, so that bytes move during it."""
        if instructions.applied:
            return
        instructions.applied = True
        for handoff_id in instructions.revoke:
            self._service.leases.revoke(handoff_id)
        for extend in instructions.extend:
            self._service.leases.extend(extend.handoff_id, extend.request_id, extend.block_ids)
        self._service.leases.begin_last_step(instructions.last_step if self._writes_at_once else {})
        for publish in instructions.publish:
            self.publish(publish)
        for handoff in instructions.watch:
            self._service.watch(handoff)
        for handoff in instructions.unwatch:
            self._service.unwatch(handoff)
        for fetch in instructions.fetch:
            self._service.start_fetch(fetch.request_id, fetch.handoff, fetch.targets)
        for request_id in instructions.cancel:
            self._service.cancel(request_id)
        for handoff in instructions.release:
            self._service.release(handoff)

    def publish(self, publish: Publish) -> None:
        """Offer blocks that are final."""
        self._service.publish(
            publish.request_id,
            publish.handoff_id,
            publish.block_ids,
            publish.num_tokens,
            publish.first_token,
            publish.lease_s,
        )

    def save_kv_layer(self, layer_name: str) -> None:
        """Report that the running step has written this layer.

        Without effect on a GPU, with several groups, where nobody reads a step's layers before its end, and for a layer
        that only reads another one's KV.
        """
        if layer_name in self._layers:
            self._service.leases.end_layer(self._layers[layer_name])

    def get_transfer_results(self, *, may_wait: bool) -> KVConnectorTransferResults:
        """Return what ended since the last call, each id exactly once; `may_wait` a little for something to end."""
        if may_wait:
            self._service.wait(self._rank_wait_s)
        done = self._service.poll()
        if done.sent or done.received:
            self._on_news()  # the step loop may read this step's report only in its next step
        self._results = TransferResults(dict(done.results))
        return KVConnectorTransferResults(
            finished_sending=set(done.sent), finished_recving=set(done.received), failed_recving=set(done.failed)
        )

    def take_arrived(self) -> dict[str, TransferResult]:
        """Return the fetches that have succeeded since `get_transfer_results`, which does not return them again."""
        return self._service.arrived()

    def build_connector_worker_meta(self, step: int | None) -> TransferResults | None:
        """Return the results that belong to the last `get_transfer_results`, for this step; None if there are none."""
        results, self._results = self._results, TransferResults()
        results.step = step
        return None if step is None and not results.by_request else results

    def get_kv_connector_stats(self) -> CounterStats:
        """Return gauges and counters of the transfer service."""
        stats = self._service.stats().since(self._after_warm_up)
        data: dict[str, Any] = {
            STALE_HANDOFFS: self._service.leases.stale_handoffs(),
            "open_leases": stats.open_leases,
            "pinned_blocks": stats.pinned_blocks,
            "expired_leases_total": stats.expired_leases_total,
            "active_fetches": stats.active_fetches,
            "watched_handoffs": stats.watched_handoffs,
            f"{BYTES}sent": stats.bytes_sent_total,
            f"{BYTES}received": stats.bytes_received_total,
        }
        data.update({f"fetches_total.{name}": count for name, count in stats.fetches_total.items()})
        return CounterStats(data=data)

    def shutdown(self) -> None:
        """Stop the service's thread; open leases end with it."""
        self._service.close()


def warm_ups(options: TransferOptions, device: torch.device) -> tuple[str | None, ...]:
    """Return by which transports blocks are handed off to ourselves; None is the one that is picked.

    Not with faults, which it would hit and leave its hand-offs to their leases; nor over NCCL, which refuses a group of
    two ranks on one GPU. A GPU reaches itself by another transport than `auto` picks for other GPUs, so by both.
    """
    on_gpu = device.type == "cuda"
    if options.faults or (options.transport == "collective" and on_gpu):
        return ()
    return (None, "grpc") if options.transport == "auto" and on_gpu else (None,)
