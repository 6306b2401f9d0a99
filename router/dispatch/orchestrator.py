"""One request from its admission to its outcome: deadline, attempts and metrics.

If a worker is lost, the client sees a pause: the request goes through the workers again (`legs.py`) from the tokens
that the client already has (request migration). `failure_table.py` lists what happens in each state on each fault.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterable

from ridgeline.contracts.errors import EngineError, EngineFailed, HandoffError, TaskRejected, WorkerDraining, WorkerLost
from ridgeline.contracts.handoff import KvHandoff
from ridgeline.contracts.rpc.tls import TlsFileError, TlsFiles
from ridgeline.kv_transfer.control import GrpcControl, release_with_retries
from ridgeline.router.dispatch.legs import Legs, ReleaseHandoff
from ridgeline.router.dispatch.request import Emit, RequestProgress, SequenceRequest
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.observe.timeline import Outcome, RequestTimeline
from ridgeline.router.placement.places import Placement
from ridgeline.router.settings import RouterSettings

logger = logging.getLogger(__name__)
MAX_FRUITLESS_RETRIES = 3
"""Give up after more attempts in a row than this without a new token: such a request may be what kills its workers."""
MAX_LOSSES = 4
"""Give up after losing this many workers or engines in all, even if each made a token or two. It is one less than the
default of `supervision.max_restarts`, so that a single worker survives such a request."""
LOSSES = (WorkerLost, EngineFailed)
RETRY_PAUSE_S = 0.1
CAUSES: dict[type[EngineError], str] = {
    WorkerLost: "worker_lost",
    EngineFailed: "engine_failed",
    WorkerDraining: "draining",
    TaskRejected: "draining",
}
"""Errors after which another worker may succeed, with their label in the metrics."""


class HandoffReleaser:
    """Tells prefill workers, in the background, that a hand-off will not be fetched.

    Without it the blocks would stay pinned until their lease ends: harmless for a crash, but too slow when a client
    leaves. `ridgeline.router.server` creates it and gives `release` to the orchestrator.
    """

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._control = GrpcControl(tls=tls)
        self._queue: asyncio.Queue[tuple[KvHandoff, float]] = asyncio.Queue()

    def release(self, handoff: KvHandoff, after_s: float = 0.0) -> None:
        """Queue a hand-off; never blocks. It has no effect on one that was fetched already."""
        self._queue.put_nowait((handoff, after_s))

    def forget(self, addresses: Iterable[str]) -> None:
        """Close the channels to workers that are gone, once nothing uses them."""
        for address in addresses:
            self._control.forget(address)

    async def run(self) -> None:
        """Release queued hand-offs, several at a time, until cancelled."""
        control = self._control

        async def release(handoff: KvHandoff) -> None:
            for address in handoff.addresses:
                try:
                    await control.release(address, handoff.handoff_id)
                except HandoffError:
                    control.forget(address)  # the worker may be gone, and nothing would report that again
                    raise

        async def release_later(handoff: KvHandoff, after_s: float) -> None:
            await asyncio.sleep(after_s)
            try:
                await release_with_retries(release, handoff)
            except TlsFileError as error:  # one failed release must not end the router
                logger.warning("a hand-off stays until its lease ends: %s", error)

        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    handoff, after_s = await self._queue.get()
                    group.create_task(release_later(handoff, after_s))
        finally:
            await control.close()


class DeadlineExceeded(Exception):
    """The request took longer than its deadline."""


class Orchestrator:
    """Runs requests. It keeps no state between them: the placement holds what is outstanding."""

    def __init__(
        self,
        placement: Placement,
        settings: RouterSettings,
        metrics: RequestMetrics,
        release_handoff: ReleaseHandoff,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._uncounted = RequestMetrics(None, "uncounted")
        self._placement = placement
        self._legs = Legs(placement, release_handoff, overlap=settings.overlap)

    @property
    def hashed_block_tokens(self) -> int:
        """Tokens in a block of a prompt that is hashed; 0 if nobody asks for hashes."""
        return self._placement.prefix_block_tokens if self._settings.router.prefix_routing else 0

    async def run(self, request: SequenceRequest, emit: Emit) -> None:
        """Serve one sequence; return after its last delta. Cancelling it aborts it on every worker.

        Raises NoWorker, WorkerLost, EngineFailed, InvalidTask, TaskRejected, CannotContinue or DeadlineExceeded.
        """
        metrics = self._uncounted if request.probe else self._metrics
        demand = request.demand
        timeline = RequestTimeline(
            time.monotonic,
            request.request_id,
            len(request.prompt_token_ids),
            self._placement.route_of(demand).path,
            head_read_s=request.head_read_s,
            observe=metrics.observe,
            client_request_id=request.client_request_id,
            http_request_id=request.http_request_id,
            trace_headers=request.trace_headers,
            ttft_limit_s=demand.ttft_limit_s,
            tpot_limit_s=demand.tpot_limit_s,
        )
        outcome: Outcome = "failed"
        deadline_s = self._settings.router.request_timeout_s
        limit_s = min(request.timeout_s or deadline_s, deadline_s)
        progress = RequestProgress(request, emit, timeline, metrics, self.hashed_block_tokens)
        metrics.in_flight.inc()
        try:
            async with asyncio.timeout(limit_s):
                await self._until_answered(progress)
            outcome = "finished"
        except asyncio.CancelledError:
            # The client may have read the last token, and gone, before this task was woken after it.
            outcome = "finished" if progress.ended else "cancelled"
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {request.request_id} took longer than the {limit_s:g} s it may: the least of "
                "router.request_timeout_s and the client's x-ridgeline-timeout-s"
            ) from error
        finally:
            metrics.in_flight.dec()
            # The exception itself must not stay in a variable: it has this frame, and both would be a cycle.
            timeline.error = type(sys.exception()).__name__ if outcome == "failed" else ""
            metrics.close(timeline, outcome)
            if outcome == "failed":
                logger.info(outcome, extra=timeline.ids | {"why": str(sys.exception())})
            else:
                logger.debug(outcome, extra=timeline.ids)

    async def _until_answered(self, progress: RequestProgress) -> None:
        """Make attempts until the answer is complete; each continues where the last one ended (request migration)."""
        fruitless, losses = 0, 0
        while True:
            try:
                await self._legs.run(progress)
                return
            except tuple(CAUSES) as error:
                if progress.ended:  # the client has everything; only the clean-up failed
                    return
                if progress.state != "queued":  # otherwise no worker had it, and nothing has happened to it
                    fruitless = 0 if progress.state == "decoding" else fruitless + 1
                    losses += isinstance(error, LOSSES)
                if fruitless > MAX_FRUITLESS_RETRIES or losses >= MAX_LOSSES:
                    raise
                progress.metrics.retries.labels(progress.state, CAUSES[type(error)]).inc()
                progress.migrate(str(error))
            # A worker that failed is not tried again before it has reported to be well, see `Worker.load`.
            await asyncio.sleep(RETRY_PAUSE_S * fruitless)
