"""The prompts of one pool that wait until a worker has room: fair among clients, and bounded. No asyncio or I/O.

An engine runs prompts in order of arrival, so what was sent there cannot be reordered. A worker therefore gets a prompt
only while the prompt tokens it still has to compute are below a window; the others wait in a `FairQueue`. In mode
adaptive, which orders prompts by their SLOs, the window is as short as the worker's steps allow. A prompt also
waits while its client may not have one more sequence decoded (`DecodePlaces`).

**Bound.** In a pool of one worker, with window W, quantum Q and longest prompt L: a short prompt (up to Q tokens) of a
client with nothing else waiting starts after at most W + L tokens that the worker already has, and Q + L tokens of each
other client with prompts waiting. With more workers it starts sooner.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.fleet.fleet import Worker
from ridgeline.router.fleet.request_route import Demand, NoWorker, Route
from ridgeline.router.flow.fair_queue import Entry, FairQueue, Waiting
from ridgeline.router.flow.rates import ServiceRate
from ridgeline.router.placement.choice import Choice, Chooser, short_window
from ridgeline.router.placement.holds import DecodePlaces, Hold
from ridgeline.router.placement.placement_events import Denied, Granted
from ridgeline.router.scheduler.features import Assignment
from ridgeline.router.scheduler.traffic import Seen

logger = logging.getLogger(__name__)

SUBSTITUTED_PATIENCE_S = 2.0
"""Prompts whose pool is lost wait this long if the workers of another pool can serve them whole meanwhile."""
ADAPTER_WAITS_S = 5.0
"""A LoRA adapter without a place waits this long while sequences with others go on to start."""


@dataclass(eq=False)
class ScheduledRequest:
    """An attempt of a request, which waits and then holds places on workers."""

    number: int
    """Unique for its router."""
    demand: Demand
    router: RouterRequests
    route: Route
    since_s: float
    queue: PoolQueue | None = None
    entry: Entry[ScheduledRequest] | None = None
    """Its place in the fair order; None if it waits elsewhere, or not any more."""
    held_s: float = 0.0
    """See `Assignment`."""
    seen: Seen | None = None
    """The request among the traffic, if this is its first attempt."""
    hold: Hold | None = None
    """None while it waits."""
    assignment: Assignment | None = None
    cached_tokens: int = 0
    """Tokens of its prompt that its worker was expected to have."""


@dataclass(eq=False)
class RouterRequests:
    """The requests of one router."""

    tell: Callable[[Granted | Denied], None]
    by_number: dict[int, ScheduledRequest] = field(default_factory=dict)


class QueueNow(msgspec.Struct, frozen=True):
    """A pool's queue at one moment."""

    waiting: Waiting
    on_workers_tokens: int
    """Prompt tokens that the workers still have to compute."""
    starts_at_once: bool
    """Whether nothing waits and a worker has room."""
    tokens_per_s: float | None
    """Prompt tokens that the whole pool computes per second; None until measured."""

    def wait_s(self, client: str, prompt_tokens: int, before_tokens: int = 0) -> float | None:
        """Estimate the seconds that a prompt of this client would wait; None until measured.

        `before_tokens` are those of the same request's prompts that come here before it. A prompt that a worker would
        take at once does not wait, however slow the pool was when last measured: else a low rate would keep away the
        prompts that correct it.
        """
        if self.tokens_per_s is None:
            return None
        if self.starts_at_once:
            return before_tokens / self.tokens_per_s
        ahead = self.waiting.tokens_ahead(client, before_tokens + prompt_tokens)
        return (self.on_workers_tokens + ahead + before_tokens) / self.tokens_per_s


class PoolQueue:
    """The waiting prompts of one pool, and the rate at which its workers compute prompts."""

    def __init__(
        self,
        pool: Pool,
        workers: Callable[[], Sequence[Worker]],
        window_tokens: int,
        recovery_timeout_s: float,
        places: DecodePlaces,
        choosers: Sequence[Chooser],
        clock: Callable[[], float] = time.monotonic,
        has_substitute: Callable[[], bool] = lambda: False,
    ) -> None:
        """The first of `choosers` chooses a prompt's workers, and the next one where it has a fault.

        `has_substitute`: whether the workers of another pool can serve whole requests now.
        """
        self.pool: Pool = pool
        self._choosers = choosers
        self._has_substitute = has_substitute
        self._workers = workers
        self._places = places
        self._window_tokens = window_tokens
        self._recovery_timeout_s = recovery_timeout_s
        self._clock = clock
        self._queue: FairQueue[ScheduledRequest] = FairQueue()
        self._rate = ServiceRate(clock, window_tokens)
        self._unusable_since_s: float | None = None
        self._held: ScheduledRequest | None = None
        """The prompt that waits although a worker would take it."""
        self._held_since_s = 0.0
        self._aside: list[ScheduledRequest] = []
        """Prompts whose turn came while all workers that their routers reach were full, or had no place for one more
        LoRA adapter, so that they hold up nobody.
        Once there is room they and the others go in turn, so that neither keep the other waiting."""
        self._aside_went_last = False
        self._starved = ""
        """The LoRA adapter for which others make way."""

    # --- prompts

    def push(self, waiter: ScheduledRequest) -> None:
        """Put a prompt into the queue, with the time by which it must start if its first token is to be in time."""
        demand, deadline_s, latest_s = waiter.demand, None, None
        least_s = self._choosers[0].least_s(demand)
        if least_s is not None and math.isfinite(demand.ttft_limit_s):
            deadline_s = waiter.since_s - demand.waited_s + demand.ttft_limit_s
            latest_s = deadline_s - least_s
        waiter.entry = self._queue.push(
            demand.client,
            demand.prompt_tokens,
            waiter,
            urgent=demand.urgent,
            deadline_s=deadline_s,
            latest_start_s=latest_s,
        )

    def remove(self, waiter: ScheduledRequest) -> bool:
        """Take out a prompt that no longer waits; does nothing if it is not here.

        Returns whether the others waited for it: a look at them, whenever one of thousands leaves, would take seconds.
        """
        if waiter in self._aside:
            self._aside.remove(waiter)
        elif waiter.entry is not None:
            self._queue.remove(waiter.entry)
            waiter.entry = None
        return waiter is self._held

    def pop_all(self) -> list[ScheduledRequest]:
        """Take out all prompts, in their order."""
        popped, self._aside = self._aside, []
        while len(self._queue):
            popped.append(self._queue.pop().item)
            popped[-1].entry = None
        return popped

    def take_next(self) -> tuple[ScheduledRequest, Choice | Exception] | None:
        """Take out the prompt that starts now, with its workers or the fault of the rules; None if all must wait.

        A fault of the rules ends only the prompt that they were asked about. Call it again once the prompt is counted
        on its workers.
        """
        held: ScheduledRequest | None = None
        try:
            if not self.waiting or not (roomy := self._with_room()):
                return None
            may_start, now_s = self._places.as_of_now(), self._clock()
            self._starved = self._starved_adapter(now_s, roomy)
            waiter = self._next(may_start, now_s, roomy)
            if waiter is None:  # all waiting clients are over their share of decode
                return None
            choice = self._choose(waiter, waiter.demand.waited_s + now_s - waiter.since_s, roomy)
            if choice is None:  # it waits for a worker that has no room now
                held = waiter
                return None
            self._take(waiter, may_start, now_s)
        finally:
            self._hold(held)
        return waiter, choice

    def outage(self) -> NoWorker | None:
        """Return why no prompt should wait any longer, once the pool has been without a usable worker for long."""
        if not self.waiting or any(worker.usable for worker in self._workers()):
            self._unusable_since_s = None
            return None
        now_s = self._clock()
        if self._unusable_since_s is None:
            self._unusable_since_s = now_s
        patience_s = self._recovery_timeout_s
        if self._has_substitute():
            patience_s = min(SUBSTITUTED_PATIENCE_S, patience_s)
        if now_s - self._unusable_since_s < patience_s:
            return None
        self._unusable_since_s = None
        return NoWorker(
            f"no {self.pool} worker was connected and accepting work for {patience_s:.0f} s "
            "(router.recovery_timeout_s): start one, or find out why they are gone"
        )

    # --- what its workers compute

    def began(self, worker: Worker) -> None:
        """Record that a worker begins to compute prompts, or goes on with the next one."""
        self._rate.begin(worker.worker_id, self._full(worker))

    def computed(self, worker: Worker, prompt_tokens: int) -> None:
        """Record that a worker has computed a prompt; call `began` next if it has more."""
        self._rate.finished(worker.worker_id, prompt_tokens)

    def dropped(self, worker: Worker) -> None:
        """Record that a prompt has left a worker before it was computed."""
        self._rate.dropped(worker.worker_id)

    def forget_all_but(self, worker_ids: Sequence[str]) -> None:
        """Forget what was measured of workers that have left."""
        self._rate.forget_all_but(worker_ids)

    # --- what admission and metrics read

    @property
    def usable_workers(self) -> int:
        """Number of workers that would take a prompt, now or later."""
        return sum(worker.usable for worker in self._workers())

    @property
    def waiting(self) -> int:
        """Number of prompts that wait here."""
        return len(self._queue) + len(self._aside)

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens that the whole pool computes per second; None until measured."""
        rate = self._rate.tokens_per_s
        return None if rate is None else rate * max(1, self.usable_workers)

    def now(self) -> QueueNow:
        """Return what one can know of the queue; `waiting` in it goes on to change."""
        return QueueNow(
            waiting=self._all_waiting(),
            on_workers_tokens=sum(worker.outstanding.prompt_tokens for worker in self._workers()),
            starts_at_once=not len(self._queue) and any(map(self._has_room, self._workers())),
            tokens_per_s=self.tokens_per_s,
        )

    def wait_s(self, client: str, prompt_tokens: int, before_tokens: int = 0) -> float | None:
        """Estimate a prompt's wait, see `QueueNow.wait_s`."""
        return None if self._rate.tokens_per_s is None else self.now().wait_s(client, prompt_tokens, before_tokens)

    # ---

    def _all_waiting(self) -> Waiting:
        if not self._aside:
            return self._queue.waiting
        return self._queue.waiting.plus((one.demand.client, one.demand.prompt_tokens) for one in self._aside)

    def _with_room(self) -> list[Worker]:
        """Return the workers whose window is not full."""
        return [worker for worker in self._workers() if self._has_room(worker)]

    def _has_room(self, worker: Worker) -> bool:
        return not self._full(worker) and worker.takes_work

    def _full(self, worker: Worker) -> bool:
        most_tokens = self._window_tokens
        if self.pool == "adaptive":
            most_tokens = short_window(worker, most_tokens)
        return worker.outstanding.prompt_tokens >= most_tokens

    def _next(self, may_start: Callable[[str], bool], now_s: float, roomy: Sequence[Worker]) -> ScheduledRequest | None:
        """Return the prompt that is next, after setting aside those before it that reach only full workers."""
        aside = self._next_aside(may_start, roomy)
        if aside is not None and not self._aside_went_last:
            return aside
        while (entry := self._queue.peek(may_start, now_s)) is not None:
            if not self._reaches_only_full_ones(entry.item, roomy):
                return entry.item
            self._aside.append(self._queue.pop(may_start, now_s).item)
            entry.item.entry = None
        return aside

    def _next_aside(self, may_start: Callable[[str], bool], roomy: Sequence[Worker]) -> ScheduledRequest | None:
        """Return the first prompt that was set aside and may go now."""
        for waiter in self._aside:
            may_go = waiter.demand.urgent or may_start(waiter.demand.client)
            if may_go and not self._reaches_only_full_ones(waiter, roomy):
                return waiter
        return None

    def _reaches_only_full_ones(self, waiter: ScheduledRequest, roomy: Sequence[Worker]) -> bool:
        """Return whether its router reaches workers, and all are full. One that reaches none finds that out itself."""
        key = waiter.demand.adapter
        if key and not waiter.demand.urgent and (self._starved not in ("", key) or not self._takes_adapter(key, roomy)):
            return True
        avoided = waiter.demand.avoided
        if not avoided or any(worker.worker_id not in avoided for worker in roomy):
            return False
        return any(worker.takes_work and worker.worker_id not in avoided for worker in self._workers())

    def _takes_adapter(self, key: str, roomy: Sequence[Worker]) -> bool:
        """Return whether a worker for the prompt and one that decodes have a place for this adapter in their steps.

        An engine would hold the sequence back itself, but with its KV blocks on both sides.
        """
        return any(worker.adapters.has_place_for(key) for worker in roomy) and self._places.take_adapter(key)

    def _starved_adapter(self, now_s: float, roomy: Sequence[Worker]) -> str:
        """Return the adapter that has waited for a place for too long, so that no sequences with others start."""
        first = next((waiter for waiter in self._aside if waiter.demand.adapter), None)
        if first is None or now_s - first.since_s < ADAPTER_WAITS_S or self._takes_adapter(first.demand.adapter, roomy):
            return ""
        return first.demand.adapter

    def _choose(self, waiter: ScheduledRequest, waited_s: float, roomy: Sequence[Worker]) -> Choice | Exception | None:
        """Return the choice for a prompt, by the first chooser without a fault; or the last one's fault."""
        fault: Exception | None = None
        for chooser in self._choosers:
            try:
                return chooser.choose(waiter.demand, waited_s, roomy)
            except Exception as error:
                logger.exception("%s cannot choose a worker of pool %s", type(chooser).__name__, self.pool)
                fault = error
        return fault

    def _take(self, waiter: ScheduledRequest, may_start: Callable[[str], bool], now_s: float) -> None:
        """Take out the prompt that is next."""
        self._aside_went_last = waiter in self._aside
        if self._aside_went_last:
            self._aside.remove(waiter)
        else:
            self._queue.pop(may_start, now_s)
            waiter.entry = None

    def _hold(self, waiter: ScheduledRequest | None) -> None:
        """Count the time until now for the prompt that was held back, and from now on for this one."""
        now_s = self._clock()
        if self._held is not None:
            self._held.held_s += now_s - self._held_since_s
        self._held, self._held_since_s = waiter, now_s


class QueueCollector(Collector):
    """The series about prompts that wait in the router; registered once."""

    def __init__(self, queues: Callable[[], Mapping[Pool, QueueNow]]) -> None:
        self._queues = queues

    def collect(self) -> Iterator[Metric]:
        """Yield every series; called by prometheus-client at each scrape."""
        prompts = GaugeMetricFamily(
            "ridgeline_waiting_prompts", "Prompts that wait in the router for a worker of the pool", labels=["pool"]
        )
        tokens = GaugeMetricFamily(
            "ridgeline_waiting_prompt_tokens",
            "Tokens of the prompts that wait in the router for a worker of the pool",
            labels=["pool"],
        )
        speed = GaugeMetricFamily(
            "ridgeline_prompt_tokens_per_second",
            "Prompt tokens per second that the pool computes when it is fully loaded, as last measured",
            labels=["pool"],
        )
        for pool, queue in self._queues().items():
            prompts.add_metric([pool], queue.waiting.prompts)
            tokens.add_metric([pool], queue.waiting.tokens)
            if queue.tokens_per_s is not None:
                speed.add_metric([pool], queue.tokens_per_s)
        yield from (prompts, tokens, speed)
