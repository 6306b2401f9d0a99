"""Serves requests by a policy on modelled engines. Everything that comes of it is simulated."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import count

from ridgeline.router.scheduler.engines import ModelledRequest, ModelledWorker
from ridgeline.router.scheduler.features import HOPELESS_AFTER
from ridgeline.router.scheduler.policies import Policy

YIELD_EVENTS = 16
"""Events between two yields of `Simulation.steps`: half a millisecond, so that it may run beside an event loop."""


class Simulation:
    """Workers, a policy, and requests at known times."""

    def __init__(
        self, workers: Sequence[ModelledWorker], policy: Policy, handover_s: float, *, by_deadline: bool = True
    ) -> None:
        """`by_deadline`: prompts that can meet their TTFT SLO go first, earliest deadline first."""
        self.workers = workers
        self.policy = policy
        self.now_s = 0.0
        self._handover_s = handover_s
        self._by_deadline = by_deadline
        self._passed_late = 0
        self._by_id = {worker.worker_id: worker for worker in workers}
        self._waiting: list[ModelledRequest] = []
        self._events: list[tuple[float, int, ModelledWorker | None, int, ModelledRequest | None]] = []
        self._numbers = count()

    def run(self, requests: Sequence[ModelledRequest]) -> None:
        """Serve all of them."""
        for _ in self.steps(requests):
            pass

    def steps(self, requests: Sequence[ModelledRequest]) -> Iterator[None]:
        """Serve all of them, and yield now and then."""
        for request in requests:
            self._at(request.arrival_s, None, 0, request)
        events, number = self._events, 0
        while events:
            at_s, _, worker, version, joins = heapq.heappop(events)
            if worker is not None and joins is None and worker.version != version:
                continue
            self.now_s = at_s
            if joins is None:
                assert worker is not None
                self._end(worker)
            elif worker is None:
                self.arrives(joins)
            else:
                worker.joining.append(joins)
                self._wake(worker)
            number += 1
            if number % YIELD_EVENTS == 0:
                yield

    def arrives(self, request: ModelledRequest) -> None:
        """Queue a request, and place what has room."""
        self._waiting.append(request)
        self._dispatch()

    def placed(self, request: ModelledRequest) -> None:
        """Do nothing; for those that watch."""

    def _at(self, at_s: float, worker: ModelledWorker | None, version: int, request: ModelledRequest | None) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), worker, version, request))

    def _next(self) -> tuple[ModelledRequest, bool]:
        """Return the prompt that goes next, and whether it passes one that is late."""
        if not self._by_deadline:
            return self._waiting[0], False
        model, now_s, earliest_s = self.workers[0].model, self.now_s, math.inf
        timely: ModelledRequest | None = None
        late: ModelledRequest | None = None
        for one in self._waiting:
            deadline_s = one.arrival_s + one.ttft_slo_s
            if deadline_s >= earliest_s and late is not None:
                continue
            tokens = one.prompt_tokens
            if now_s + model.step_s(tokens, 0, 0, tokens * tokens / 2) > deadline_s:
                late = late or one
            elif deadline_s < earliest_s:
                timely, earliest_s = one, deadline_s
        if late is not None and self._passed_late >= HOPELESS_AFTER:
            return late, False
        return timely or self._waiting[0], timely is not None and late is not None

    def _dispatch(self) -> None:
        while self._waiting and any(worker.takes_prompt for worker in self.workers):
            request, passes_late = self._next()
            chosen = self.policy.assign(request.features(self.now_s), self.workers)
            if chosen is None:
                return
            self._waiting.remove(request)
            self._passed_late = self._passed_late + 1 if passes_late else 0
            self._place(request, self._by_id[chosen.prompt_worker], self._by_id[chosen.decode_worker], chosen.paced)

    def _place(
        self,
        request: ModelledRequest,
        prompt: ModelledWorker,
        decode: ModelledWorker,
        paced: bool,
    ) -> None:
        request.placed_s, request.decode_worker = self.now_s, decode
        prompt.prompts.append(request)
        prompt.prompt_tokens += request.prompt_tokens
        prompt.running += 1
        decode.running += prompt is not decode
        decode.decodes_here[request.number] = request
        decode.context_tokens += request.context_tokens
        if paced and request.tpot_slo_s < math.inf:
            sure = request.expected_output_tokens or request.output_tokens
            decode.slack.expect(str(request.number), request.tpot_slo_s, sure_tokens=sure)
        self.placed(request)
        self._wake(prompt)

    def _wake(self, worker: ModelledWorker) -> None:
        if not worker.steps:
            self._begin(worker)
        elif worker.interrupt(self.now_s):
            self._schedule(worker)

    def _begin(self, worker: ModelledWorker) -> None:
        worker.begin(self.now_s)
        if worker.steps:
            for one in worker.device.busy:
                self._schedule(one)

    def _schedule(self, worker: ModelledWorker) -> None:
        worker.version += 1
        self._at(worker.ends_s, worker, worker.version, None)

    def _end(self, worker: ModelledWorker) -> None:
        prefilled = worker.prefilled or ()
        worker.prefilled = None
        ended = worker.end(self.now_s)
        for request in ended:
            self._finish(request, worker)
        for request in prefilled:
            worker.prompts.remove(request)
            worker.prompt_tokens -= request.prompt_tokens
            request.first_s, request.made_tokens = self.now_s, 1
            decode = request.decode_worker
            assert decode is not None
            worker.running -= decode is not worker
            if request.output_tokens == 1:
                self._finish(request, decode)
            elif decode is worker:
                worker.joining.append(request)
            else:
                self._at(self.now_s + self._handover_s, decode, 0, request)
        for one in worker.device.busy:
            self._schedule(one)
        if prefilled or ended:
            self._dispatch()
        if not worker.steps:
            self._begin(worker)

    def _finish(self, request: ModelledRequest, worker: ModelledWorker) -> None:
        request.end_s = self.now_s
        worker.running -= 1
        del worker.decodes_here[request.number]
        worker.context_tokens -= request.context_tokens
        worker.slack.forget(str(request.number))
