"""The state by which prompts start: the workers, the requests that wait or run, and what was learned of them.

It changes by the events of its routers (`placement_events.py`), by news of the workers, and when it looks again while
prompts wait. A router that serves alone has one; several routers share that of their dispatcher (`router/shared`).

    Wants -> route -> queue of a pool -> workers with room, in fair order -> Granted, and a `Hold` until Leaves
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec.structs import replace

from ridgeline.contracts.errors import WorkerDraining, WorkerLost
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.fleet.fleet import Fleet, Worker
from ridgeline.router.fleet.request_route import (
    ADAPTIVE_SPLIT,
    ADAPTIVE_WHOLE,
    SPLIT,
    Demand,
    NoWorker,
    Route,
    pools_of,
)
from ridgeline.router.placement.choice import ByLoad, ByPolicy, Choice, Chooser, best_source
from ridgeline.router.placement.holds import DecodePlaces, Hold
from ridgeline.router.placement.learned import Learned
from ridgeline.router.placement.placement_events import (
    Answer,
    Answered,
    Denied,
    Doubts,
    Event,
    Forgets,
    Granted,
    Happened,
    Keeps,
    Leaves,
    Reason,
    Reuse,
    Reused,
    Wants,
)
from ridgeline.router.placement.pool_queue import PoolQueue, QueueNow, RouterRequests, ScheduledRequest
from ridgeline.router.scheduler.adaptive import Adaptive
from ridgeline.router.scheduler.features import Assignment
from ridgeline.router.settings import RouterSettings

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.25
"""Time between two tries while prompts wait, since a worker's return may go unreported."""
_REASONS: Final[dict[type[Exception], Reason]] = {NoWorker: "no_worker", WorkerLost: "lost", WorkerDraining: "draining"}
Later = Callable[[float, Callable[[], None]], object]


class ClusterState:
    """Assigns the waiting requests of routers to workers, and counts what runs where."""

    def __init__(
        self,
        fleet: Fleet,
        settings: RouterSettings,
        learned: Learned | None = None,
        policy: Adaptive | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Later = lambda delay_s, look: asyncio.get_running_loop().call_later(delay_s, look),
        paused: bool = False,
    ) -> None:
        """In pool `adaptive` prompts go by `policy`. Predictions use what `learned` has been told.

        `later` calls a function once after so many seconds. `paused`: no prompt starts before `resume`.
        """
        self._fleet = fleet
        self._learned = learned or Learned()
        self._min_remote_prefill_tokens = settings.router.min_remote_prefill_tokens
        self._recovery_timeout_s = settings.router.recovery_timeout_s
        self._reuses_decode_kv = settings.reuse_decode_kv
        self._clock, self._later, self._looks_again = clock, later, False
        self._places = DecodePlaces(fleet.answering)
        self._decode = ByLoad("decode", self._learned)
        self.queues = {pool: self._queue(pool, settings, policy) for pool in fleet.pools}
        self._turns = list(self.queues.values())
        """The pool whose prompt started last is last, so that none takes all free decode places."""
        self._in_doubt: dict[ScheduledRequest, float] = {}
        """Those that wait until it is known whether there is a worker to decode, and since when."""
        self._doubtful_since_s: float | None = None
        """Since when those that wait in pool `prefill` wait for the same."""
        self._early: dict[ScheduledRequest, None] | None = {} if paused else None
        """Those that came while it was paused."""
        fleet.on_news = self._heard

    def _queue(self, pool: Pool, settings: RouterSettings, policy: Adaptive | None) -> PoolQueue:
        workers, choosers = partial(self._fleet.pool, pool), list[Chooser]([ByLoad(pool, self._learned)])
        if pool == "adaptive" and policy is not None:
            choosers.insert(0, ByPolicy(workers, self._learned, policy, self._min_remote_prefill_tokens))

        def another_serves() -> bool:
            return any(self._fleet.usable(other) for other in pools_of(self._fleet.mode) if other != pool)

        return PoolQueue(
            pool,
            workers,
            settings.prefill_window_tokens[pool],
            self._recovery_timeout_s,
            self._places,
            choosers,
            self._clock,
            another_serves,
        )

    # --- events

    def apply(self, router: RouterRequests, event: Event) -> None:
        """Take what a router tells. It is answered by `router.tell`, at once or later."""
        match event:
            case Wants():
                self._guarded(router, event.number, self._want, router, event)
                self._start()
            case Keeps():
                self._keep(router, event)
            case Happened() | Answered():
                request = router.by_number.get(event.number)
                if request is not None and request.hold is not None:
                    self._happened(request, request.hold, event)
            case Leaves():
                request = router.by_number.pop(event.number, None)
                if request is not None and self._end(request):
                    self._start()
            case Forgets():
                self._learned.prefixes.forget_all()
            case Doubts():
                self._doubt(event)

    def left(self, router: RouterRequests) -> None:
        """Take that a router has gone, with all its requests."""
        requests, router.by_number = router.by_number, {}
        for request in requests.values():
            self._end(request)
        self._start()

    def queues_now(self) -> dict[Pool, QueueNow]:
        """Return what one can know of the queues."""
        return {pool: queue.now() for pool, queue in self.queues.items()}

    def mode_changed(self) -> int:
        """Send the prompts on that wait in pools without a part in the new mode; return how many there were."""
        pools = pools_of(self._fleet.mode)
        sent_on = [one for pool, queue in self.queues.items() if pool not in pools for one in queue.pop_all()]
        for request in sent_on:
            self._go_on(request, self._enter)
        self.look()
        return len(sent_on)

    def resume(self) -> None:
        """Let prompts start from now on."""
        early, self._early = self._early or {}, None
        for request in early:
            self._go_on(request, self._enter)
        self.look()

    def look(self) -> None:
        """Start what can start now, and give up what has waited too long for a worker. Called when workers change."""
        known, latest_s = self._decode_is_known(), self._clock() - self._recovery_timeout_s
        for request, since_s in tuple(self._in_doubt.items()):
            if known or since_s <= latest_s:
                self._go_on(request, self._look_for_decode, since_s)
        for queue in self.queues.values():
            if (why := queue.outage()) is not None:
                for request in queue.pop_all():
                    self._go_on(request, self._without_worker, why)
        self._start()

    def _doubt(self, event: Doubts) -> None:
        worker = self._fleet.find(event.worker_id)
        if worker is not None and worker.description.incarnation == event.incarnation:
            worker.client.has_failed()

    def _heard(self) -> None:
        if (self._in_doubt or self._doubtful_since_s is not None) and self._decode_is_known():
            self._doubtful_since_s = None
            self.look()

    def _decode_is_known(self) -> bool:
        """Return whether there is a worker to decode, or none at all: then nobody has to wait for a doubt to end."""
        workers = self._fleet.pool("decode")
        return any(worker.takes_work for worker in workers) or not any(worker.usable for worker in workers)

    # --- a request waits

    def route_of(self, demand: Demand) -> Route:
        """Return which way it would go at this moment."""
        return self._fleet.route(demand, self._min_remote_prefill_tokens)

    def _want(self, router: RouterRequests, event: Wants) -> None:
        self._forget_removed_workers()
        demand = event.demand
        request = router.by_number[event.number] = ScheduledRequest(
            event.number, demand, router, self.route_of(demand), self._clock()
        )
        if not (demand.probe or demand.urgent):
            request.seen = self._learned.traffic.arrived(
                demand.prompt_tokens,
                demand.ttft_limit_s,
                demand.tpot_limit_s,
                self._learned.output_tokens(demand.output_tokens),
                demand.waited_s,
            )
        if self._early is not None:
            self._early[request] = None
        else:
            self._enter(request)

    def _go_on(self, request: ScheduledRequest, step: Callable[..., None], *args: object) -> None:
        """Take the next step with a request, to which others have led."""
        self._guarded(request.router, request.number, step, request, *args)

    def _guarded(self, router: RouterRequests, number: int, step: Callable[..., None], *args: object) -> None:
        """Take a step that concerns one request, so that a fault of ours ends this one only."""
        try:
            step(*args)
        except Exception as error:
            logger.exception("no place for prompt %d of a router", number)
            self._refuse(router, number, error)

    def _enter(self, request: ScheduledRequest) -> None:
        """Have it wait on the route that is right at the moment."""
        request.route, request.queue = self.route_of(request.demand), None
        if request.route == SPLIT:  # do not prefill while it is not known whether there is a worker to decode
            self._look_for_decode(request, self._clock())
        else:
            self._push(request)

    def _push(self, request: ScheduledRequest) -> None:
        request.queue = self.queues[request.route.prompt_pool]
        request.queue.push(request)

    def _look_for_decode(self, request: ScheduledRequest, since_s: float) -> None:
        """Let it wait for prefill if a worker would decode. The status of one in doubt is being asked for."""
        self._in_doubt.pop(request, None)
        if self.route_of(request.demand) != request.route:
            self._enter(request)
        elif any(worker.takes_work for worker in self._fleet.pool("decode")):
            self._push(request)
        elif not self._fleet.usable("decode"):
            self._without_worker(request, NoWorker("no decode worker is usable"))
        elif self._clock() - since_s >= self._recovery_timeout_s:
            why = f"no decode worker has been usable for {self._recovery_timeout_s:g} s"
            self._without_worker(request, NoWorker(why))
        else:
            self._in_doubt[request] = since_s

    def _without_worker(self, request: ScheduledRequest, why: NoWorker) -> None:
        """Send it another way if workers serve that now."""
        now = self.route_of(request.demand)
        if now != request.route and self._fleet.usable(now.prompt_pool):
            self._enter(request)
        else:
            self._deny(request, why)

    def _refuse(self, router: RouterRequests, number: int, error: Exception) -> None:
        """End a prompt that had a fault of ours: without an answer its router would wait until its deadline."""
        request = router.by_number.get(number)
        if request is None:
            router.tell(Denied(number, *_why(error)))
        elif request.hold is None:
            self._end(request)
            self._deny(request, error)

    def _deny(self, request: ScheduledRequest, error: Exception) -> None:
        request.router.by_number.pop(request.number, None)
        request.router.tell(Denied(request.number, *_why(error)))

    def _forget_removed_workers(self) -> None:
        there = [worker.worker_id for worker in self._fleet.workers]
        self._learned.forget_all_but(there)
        for queue in self._turns:
            queue.forget_all_but(there)

    # --- it starts

    def _start(self) -> None:
        """Send the next prompts to their workers while there is room."""
        going = [queue for queue in self._turns if self._may_go(queue)] if self._early is None else []
        while going:  # one prompt of each in turn, for many places may have become free at once
            queue = going.pop(0)
            if (start := queue.take_next()) is not None:
                self._go_on(start[0], self._grant, queue, start[1])
                self._turns.remove(queue)
                self._turns.append(queue)
                going.append(queue)
        waits = self._in_doubt or any(queue.waiting for queue in self._turns)
        if waits and not self._looks_again:
            self._looks_again = True
            self._later(LOOK_EVERY_S, self._look_again)

    def _may_go(self, queue: PoolQueue) -> bool:
        """Return whether its prompts may start: prefill waits while no decode worker is known to be usable."""
        if queue.pool != SPLIT.prompt_pool or not queue.waiting:
            return True
        if self._decode_is_known():
            self._doubtful_since_s = None
            return True
        now_s = self._clock()
        if self._doubtful_since_s is None:
            self._doubtful_since_s = now_s
        return now_s - self._doubtful_since_s >= self._recovery_timeout_s

    def _look_again(self) -> None:
        self._looks_again = False
        self.look()

    def _grant(self, request: ScheduledRequest, queue: PoolQueue, choice: Choice | Exception) -> None:
        if isinstance(choice, Exception):
            self._deny(request, choice)
            return
        try:
            decode = self._decode_worker(request, choice)
        except NoWorker as error:
            self._without_worker(request, error)
            return
        except (WorkerLost, WorkerDraining) as error:
            self._deny(request, error)
            return
        if decode is None:
            self._enter(request)
            return
        worker, route, assignment = choice.worker, request.route, choice.assignment
        if assignment is not None and request.held_s:
            assignment = replace(assignment, held_s=request.held_s)
        if route == ADAPTIVE_WHOLE and decode is not worker:
            route = ADAPTIVE_SPLIT
        was_idle = not worker.outstanding.prompt_tokens
        request.cached_tokens = choice.cached_tokens
        reuse = self._reuse(request, worker)  # before it counts itself among the sequences that decode
        self._hold(request, worker, decode, assignment)
        if was_idle:
            queue.began(worker)
        request.router.tell(
            Granted(
                request.number,
                route,
                _incarnation(worker),
                _incarnation(decode) if route.splits else None,
                assignment,
                reuse,
            )
        )

    def _reuse(self, request: ScheduledRequest, sink: Worker) -> Reuse | None:
        """Return what prefill had better fetch from a decode worker than compute."""
        if not self._reuses_decode_kv or request.route != SPLIT:
            return None
        avoided = request.demand.avoided
        sources = [
            one
            for one in self._fleet.usable("decode")
            if one.worker_id not in avoided and self._fleet.is_paired(one, sink)
        ]
        return best_source(request.demand, sink, request.cached_tokens, sources, self._learned)

    def _hold(
        self, request: ScheduledRequest, worker: Worker, decode: Worker, assignment: Assignment | None = None
    ) -> None:
        request.assignment = assignment
        request.hold = Hold(request.demand, worker, decode, request.cached_tokens)
        self._places.add(request.demand.client, decode, 1)

    def _decode_worker(self, request: ScheduledRequest, choice: Choice) -> Worker | None:
        """Return the worker that decodes; None if the mode has no such pool any more.

        If the route splits and none was chosen, choose one by load and by how near it is. Raises NoWorker, WorkerLost
        or WorkerDraining.
        """
        if request.route != SPLIT:
            return choice.decode_worker or choice.worker
        pool = self._fleet.usable("decode")
        if not pool and self._fleet.mode != "disaggregated":
            return None
        if not pool:
            leaves = any(worker.drains for worker in self._fleet.pool("decode"))
            gone = WorkerDraining if leaves else WorkerLost
            raise gone("the decode workers were lost while the prompt waited for its turn")
        ready = [worker for worker in pool if worker.takes_work]
        if not ready:
            raise NoWorker("no decode worker is accepting work")
        return self._decode.best(request.demand, ready, choice.worker).worker

    def _keep(self, router: RouterRequests, kept: Keeps) -> None:
        """Count a request where it runs already; if its worker is gone, it is about to leave anyway."""
        try:
            worker = self._fleet.get(kept.prompt_worker)
            decode = worker if kept.decode_worker is None else self._fleet.get(kept.decode_worker)
        except KeyError:
            return
        request = router.by_number[kept.number] = ScheduledRequest(
            kept.number, kept.demand, router, kept.route, self._clock(), self.queues[kept.route.prompt_pool]
        )
        self._hold(request, worker, decode)
        for step in kept.steps:
            self.apply(router, Happened(kept.number, step))

    # --- it runs

    def _happened(self, request: ScheduledRequest, hold: Hold, event: Happened | Answered) -> None:
        if isinstance(event, Answered):
            self._answered(request, hold, event.answer)
        elif event.step == "prompt_done":
            self._prompt_done(request, hold, event.cached_tokens)
        elif event.step == "prompt_left":
            makes_room = hold.computes
            self._drop_prompt(request, hold)
            hold.prompt_left()
            if makes_room:
                self._start()
        else:
            hold.decode_began()

    def _prompt_done(self, request: ScheduledRequest, hold: Hold, cached_tokens: int | None) -> None:
        worker, computed_now = hold.prompt_worker, hold.computes
        hold.prompt_done()
        if computed_now and request.queue is not None:
            request.queue.computed(worker, request.demand.prompt_tokens)
            self._start()
            if worker.outstanding.prompt_tokens:
                request.queue.began(worker)
        if request.demand.probe:  # its size says nothing of clients' requests
            return
        if cached_tokens is not None:
            self._learned.had(worker.description, request.demand.prefix, cached_tokens, request.cached_tokens)
            if request.seen is not None:
                self._learned.traffic.computed(request.seen, request.demand.prompt_tokens, cached_tokens)
        self._learned.computed(worker.description, request.demand.prefix)

    def _answered(self, request: ScheduledRequest, hold: Hold, answer: Answer) -> None:
        if request.demand.probe:
            return
        self._learned.answered(request.demand, answer.output_tokens)
        if request.seen is not None:
            self._learned.traffic.answered(request.seen, answer.output_tokens, answer.ttft_s, answer.tpot_s)
        if request.assignment is not None and answer.overhead_s is not None:
            self._learned.had_overhead(answer.overhead_s)
        if (reused := answer.reused) is not None:
            self._reused(request, hold.prompt_worker, reused)
        self._learned.computed(hold.decode_worker.description, answer.prefix)
        if hold.splits:
            source, sink = hold.prompt_worker.worker_id, hold.decode_worker.worker_id
            self._learned.moved(source, sink, answer.kv_bytes, answer.wire_s)

    def _reused(self, request: ScheduledRequest, sink: Worker, reused: Reused) -> None:
        wanted = reused.wanted
        source = self._fleet.find(wanted.worker_id)
        if source is None or source.description.incarnation != wanted.incarnation:
            return
        self._learned.had(source.description, request.demand.prefix, reused.cached_tokens, wanted.tokens)
        self._learned.fetched(source.worker_id, sink.worker_id, reused.kv_bytes, reused.wire_s, reused.waited_s)

    def _drop_prompt(self, request: ScheduledRequest, hold: Hold) -> None:
        if hold.computes and request.queue is not None:
            request.queue.dropped(hold.prompt_worker)

    def _end(self, request: ScheduledRequest) -> bool:
        """Take it out, wherever it is; return whether others may start because of that."""
        hold = request.hold
        if hold is None:
            self._in_doubt.pop(request, None)
            if self._early is not None:
                self._early.pop(request, None)
            return request.queue is not None and request.queue.remove(request)
        self._drop_prompt(request, hold)
        hold.close()
        self._places.add(request.demand.client, hold.decode_worker, -1)
        return True


def _why(error: Exception) -> tuple[Reason, str]:
    """Return the reason and the sentence of `Denied`."""
    reason = _REASONS.get(type(error))
    if reason is not None:
        return reason, str(error)
    return "failed", f"the router failed to place the prompt ({type(error).__name__}: {error}): see its log"


def _incarnation(worker: Worker) -> tuple[str, str]:
    return worker.worker_id, worker.description.incarnation
