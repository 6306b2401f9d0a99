"""One request from its admission to its one outcome: deadline, attempts, what is counted. Called by `engine_client.py`.

A worker that is lost on the way costs the client a pause: the request goes through the workers once more
(`attempt.py`), with what the client has already. What happens in each state on each fault stands in `failure_table.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from engine import sampling
from engine.errors import EngineError, EngineFailed, TaskRejected, WorkerDraining, WorkerLost
from engine.messages import Pool
from router.answer import Answer, Emit, SequenceRequest
from router.attempt import Attempt, ReleaseHandoff
from router.fleet import Fleet
from router.metrics import RequestMetrics
from router.prefill_queue import PrefillQueue
from router.settings import RouterSettings
from router.timeline import Outcome, RequestTimeline

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


class DeadlineExceeded(Exception):
    """The request lived longer than it may."""


class CannotContinue(EngineError):
    """A stream lost its worker and its sampling state cannot be brought back; the message says why."""


class Orchestrator:
    """Stateless between requests; the fleet holds what is outstanding, the queues what waits for it."""

    def __init__(
        self,
        fleet: Fleet,
        queues: Mapping[Pool, PrefillQueue],
        settings: RouterSettings,
        metrics: RequestMetrics,
        release_handoff: ReleaseHandoff,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._metrics = metrics
        self._attempt = Attempt(fleet, queues, settings, metrics, release_handoff)
        self.in_flight = 0

    async def run(self, request: SequenceRequest, emit: Emit) -> None:
        """Serve one sequence; returns after its last delta. Cancelling it aborts it on every worker.

        Raises NoWorker, WorkerLost, EngineFailed, InvalidTask, TaskRejected, CannotContinue or DeadlineExceeded.
        """
        timeline = RequestTimeline(
            time.monotonic,
            request.request_id,
            len(request.prompt_token_ids),
            head_read_s=request.head_read_s,
            observe=self._metrics.observe,
        )
        outcome: Outcome = "failed"
        limit_s = min(request.timeout_s or self._settings.request_deadline_s, self._settings.request_deadline_s)
        self.in_flight += 1
        try:
            async with asyncio.timeout(limit_s):
                await self._until_answered(request, Answer(emit, timeline))
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
            self.in_flight -= 1
            self._metrics.close(timeline, outcome)

    async def _until_answered(self, request: SequenceRequest, answer: Answer) -> None:
        """Attempt after attempt, each going on where the last one ended."""
        number, fruitless, losses = 0, 0, 0
        while True:
            try:
                await self._attempt.run(request, answer, number)
                return
            except tuple(CAUSES) as error:
                if answer.ended:  # the client has everything; only the tidying up failed
                    return
                if answer.timeline.state != "queued":  # else no worker had it: nothing has happened to it
                    fruitless = 0 if answer.timeline.state == "decoding" else fruitless + 1
                    losses += isinstance(error, LOSSES)
                if fruitless > MAX_FRUITLESS_RETRIES or losses >= MAX_LOSSES:
                    raise
                self._check_continuable(request, answer, error)
                self._metrics.retries.labels(answer.timeline.state, CAUSES[type(error)]).inc()
            answer.timeline.interrupted()
            number += 1
            # Who has failed is not asked again before it has told that it is well, see `Worker.load`.
            await asyncio.sleep(RETRY_PAUSE_S * fruitless)

    def _check_continuable(self, request: SequenceRequest, answer: Answer, error: Exception) -> None:
        reason = sampling.resample_reason(request.params)
        if not answer.token_ids or reason is None:
            return
        pool = self._fleet.pool("colocated" if self._settings.mode == "colocated" else "decode")
        if not all(worker.description.repeats_tokens for worker in pool):
            raise CannotContinue(
                f"the worker was lost in mid-stream ({error}), and {reason} needs sampling state that these workers "
                "cannot rebuild: send the request again"
            ) from error
