"""One request from its admission to its one outcome: deadline, attempts, what is counted.

Called by `router.front.engine_client`.

A worker that is lost on the way costs the client a pause: the request goes through the workers once more (`legs.py`),
with what the client has already. What happens in each state on each fault stands in `failure_table.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from contracts.errors import EngineError, EngineFailed, TaskRejected, WorkerDraining, WorkerLost
from contracts.vocabulary import Pool
from router.dispatch.legs import Legs, ReleaseHandoff
from router.dispatch.request import Attempt, Emit, RequestProgress, SequenceRequest
from router.fleet.fleet import Fleet
from router.fleet.policy import NoWorker, Path, path_for, pools_of, prompt_pool
from router.flow.prompt_queue import PromptQueue
from router.observe.metrics import RequestMetrics
from router.observe.timeline import Outcome, RequestTimeline
from router.settings import RouterSettings

MAX_FRUITLESS_RETRIES = 3
"""A request that kills its workers must not take the whole fleet along: so many attempts may decode nothing."""
MAX_LOSSES = 4
"""Nor may one that gets a token or two out of each: so many workers or engines may be lost with it in all. That is one
less than `supervision.max_restarts` is by default, so that a single worker outlives such a request."""
LOSSES = (WorkerLost, EngineFailed)
RETRY_PAUSE_S = 0.1
CAUSES: dict[type[EngineError], str] = {
    WorkerLost: "worker_lost",
    EngineFailed: "engine_failed",
    WorkerDraining: "draining",
    TaskRejected: "draining",
}
"""What another worker may mend, and how it is counted."""

_RECOMPUTE_REASONS: dict[Path, str] = {"colocated": "", "decode_only": "short_prompt", "fallback": "no_prefill_worker"}
"""Why a worker that gets a whole request computes a prompt that prefill could have computed."""


class DeadlineExceeded(Exception):
    """The request lived longer than it may."""


class CannotContinue(EngineError):
    """A stream lost its worker and its sampling state cannot be brought back; the message says why."""


class Orchestrator:
    """Stateless between requests; the fleet holds what is outstanding, the queues what waits for it."""

    def __init__(
        self,
        fleet: Fleet,
        queues: Mapping[Pool, PromptQueue],
        settings: RouterSettings,
        metrics: RequestMetrics,
        release_handoff: ReleaseHandoff,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._metrics = metrics
        self._uncounted = RequestMetrics(None)
        self._legs = Legs(fleet, queues, release_handoff, overlap=settings.overlap)
        self.in_flight = 0
        """Sequences that are being served, canaries apart."""

    async def run(self, request: SequenceRequest, emit: Emit) -> None:
        """Serve one sequence; returns after its last delta. Cancelling it aborts it on every worker.

        Raises NoWorker, WorkerLost, EngineFailed, InvalidTask, TaskRejected, CannotContinue or DeadlineExceeded.
        """
        metrics = self._uncounted if request.canary else self._metrics
        timeline = RequestTimeline(
            time.monotonic,
            request.request_id,
            len(request.prompt_token_ids),
            self._path_of(request),
            head_read_s=request.head_read_s,
            observe=metrics.observe,
        )
        outcome: Outcome = "failed"
        limit_s = min(request.timeout_s or self._settings.request_deadline_s, self._settings.request_deadline_s)
        self.in_flight += not request.canary
        try:
            async with asyncio.timeout(limit_s):
                await self._until_answered(request, RequestProgress(emit, timeline, metrics))
            outcome = "finished"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {request.request_id} took longer than the {limit_s:g} s it may: the least of "
                "router.request_deadline_s and the client's x-ridgeline-timeout-s"
            ) from error
        finally:
            self.in_flight -= not request.canary
            metrics.close(timeline, outcome)

    async def _until_answered(self, request: SequenceRequest, progress: RequestProgress) -> None:
        """Make attempt after attempt, each going on where the last one ended (request migration)."""
        number, fruitless, losses = 0, 0, 0
        while True:
            try:
                await self._try(Attempt(request, progress, number))
                return
            except tuple(CAUSES) as error:
                if progress.ended:  # the client has everything; only the tidying up failed
                    return
                if progress.state != "queued":  # else no worker had it: nothing has happened to it
                    fruitless = 0 if progress.state == "decoding" else fruitless + 1
                    losses += isinstance(error, LOSSES)
                if fruitless > MAX_FRUITLESS_RETRIES or losses >= MAX_LOSSES:
                    raise
                self._check_continuable(request, progress, error)
                progress.metrics.retries.labels(progress.state, CAUSES[type(error)]).inc()
            progress.migrate()
            number += 1
            # Who has failed is not asked again before it has told that it is well, see `Worker.load`.
            await asyncio.sleep(RETRY_PAUSE_S * fruitless)

    async def _try(self, attempt: Attempt) -> None:
        """Take the request through the workers once, on the way that it goes as things are now."""
        progress = attempt.progress
        path = progress.timeline.path = self._path_of(attempt.request)
        if path == "disaggregated":
            # Nothing is prefilled while there is nobody to decode it.
            await self._fleet.wait_until_usable("decode", self._settings.recovery_timeout_s)
            try:
                await self._legs.split(attempt)
                return
            except NoWorker:  # the prefill pool has gone while the prompt waited for it
                progress.advance("queued")
                path = progress.timeline.path = "fallback"
        await self._legs.whole(attempt, prompt_pool(path), _RECOMPUTE_REASONS[path])

    def _path_of(self, request: SequenceRequest) -> Path:
        least_tokens = 0 if request.canary else self._settings.min_remote_prefill_tokens
        prefill_usable = bool(self._fleet.usable("prefill"))
        return path_for(request.demand, self._settings.mode, least_tokens, prefill_usable)

    def _check_continuable(self, request: SequenceRequest, progress: RequestProgress, error: Exception) -> None:
        reason = request.sampling.resample_reason
        if not progress.token_ids or reason is None:
            return
        pool = self._fleet.pool(pools_of(self._settings.mode)[-1])
        if not all(worker.description.repeats_tokens for worker in pool):
            raise CannotContinue(
                f"the worker was lost in mid-stream ({error}), and {reason} needs sampling state that these workers "
                "cannot rebuild: send the request again"
            ) from error
