"""Makes the state of the live page from what the router knows: samples every two seconds, a state for whoever looks.

Counters of workers come with their status reports, which the router asks for anyway; nothing is asked for here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.contracts.workers import StepModel
from ridgeline.roofline import bottleneck as rule
from ridgeline.roofline.bottleneck import Bottleneck, bottleneck
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.request_route import exchanging_pools, pools_of
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.live.advice import fleet_state, resources, verdict_of
from ridgeline.router.live.promise import Recent, shown
from ridgeline.router.live.samples import Sample, Text, Window, bucket_quantiles, counted, mean, steps_of, worker_sample
from ridgeline.router.live.state import (
    SCHEMA,
    DeploymentNow,
    Flow,
    History,
    HistoryMark,
    LinkNow,
    OperationNow,
    PageState,
    PoolNow,
    Promise,
    PromisedSlo,
    RequestNow,
    RouterNow,
    SloPoint,
    Verdict,
    WorkerNow,
    WorkerState,
)
from ridgeline.router.observe.loop_lag import LoopLag
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.placement.pool_queue import QueueNow
from ridgeline.router.settings import PoolHardware, RouterSettings

logger = logging.getLogger(__name__)
PERIOD_S: Final = 2.0
PROMISE_S: Final = 60.0
MOST_REQUESTS: Final = 14
WINDOW_S: Final = 10.0
"""What figures are of: long beside a step, short beside a change that somebody waits for."""
HISTORY_STEP_S: Final = 6.0
HISTORY_POINTS: Final = 150
TRAIL_STEP_S: Final = 60.0
TRAIL_POINTS: Final = 14
"""A quarter of an hour, both."""
MOST_TRAILS: Final = 8
"""Workers up to which each has a trail: more cover each other."""
HELD_S: Final = 10.0
"""How long another resource must be short before the sentence changes: one window, else it would flicker."""
FORGOTTEN_S: Final = 2.5 * PERIOD_S
REQUESTS_EVERY: Final = 5
"""Events of a stream between two with the latest requests, a third of the bytes."""
PROMPT_STEPS: Final = ("prefill", "mixed")


@dataclass(frozen=True)
class Sources:
    """Where the figures come from, each asked when a sample or a state is made."""

    settings: RouterSettings
    fleet: Fleet
    metrics: RequestMetrics
    lag: LoopLag
    text: Callable[[], Text]
    queues: Callable[[], Mapping[Pool, QueueNow]]
    hardware: Callable[[], Mapping[Pool, PoolHardware]]
    operation: Callable[[], OperationNow | None]


class LiveView:
    """Takes samples while it runs; makes states from them."""

    def __init__(self, sources: Sources, clock: Callable[[], float] = time.monotonic) -> None:
        self._sources = sources
        self._clock = clock
        self._began_s = clock()
        self._samples: deque[Sample] = deque(maxlen=round(PROMISE_S / PERIOD_S) + 1)
        self._history = _HistoryKept()
        self._trails: dict[tuple[str, str], deque[tuple[float, float]]] = {}
        self._trails_s = self._began_s
        self._states: dict[str, tuple[WorkerState, float]] = {}
        """Of each worker, since when."""
        self._verdict: tuple[Verdict, float] | None = None
        self._other_since_s: float | None = None
        self._judged_s = self._began_s
        self.mode_is_for: tuple[Mode | None, str] = None, ""
        """The mode that this router was last told to change to, and what that is for."""
        self._sampled = asyncio.Event()
        self._made: tuple[Sample, PageState] | None = None

    async def run(self) -> None:
        """Take a sample every period, until cancelled."""
        while True:
            try:
                self.sample()
            except Exception:
                logger.exception("the live page has no new figures")
            await asyncio.sleep(PERIOD_S)

    def sample(self) -> None:
        """Take one."""
        sources, now_s = self._sources, self._clock()
        text = sources.text()
        self._samples.append(
            Sample(
                now_s,
                {one.worker_id: worker_sample(one) for one in sources.fleet.workers if one.status is not None},
                {pool: queue.waiting.prompts for pool, queue in sources.queues().items()},
                time.process_time(),
                text.tokens,
                text.events,
                dict(counted(sources.metrics)),
            )
        )
        self._note_workers(now_s)
        if now_s >= self._history.next_s:
            self._history.add(now_s, self._promise(self._recent()))
        if now_s >= self._trails_s + TRAIL_STEP_S:
            self._trails_s = now_s
            self._add_to_trails()
        self._sampled.set()
        self._sampled = asyncio.Event()

    def state(self) -> PageState:
        """Return the whole state as of the last sample; all who ask share it."""
        if not self._samples:
            self.sample()
        if self._made is None or self._made[0] is not self._samples[-1]:
            self._made = self._samples[-1], self._make()
        return self._made[1]

    async def stream(self) -> AsyncGenerator[PageState, None]:
        """Yield a state at each sample: the first one whole, later ones without what has not changed."""
        yield self.state()
        seen_s, number = self._history.newest_s, 0
        while True:
            await self._sampled.wait()
            state, number = self.state(), number + 1
            history = self._history.newest(self._clock()) if self._history.newest_s > seen_s else None
            seen_s = self._history.newest_s
            requests = state.requests if number % REQUESTS_EVERY == 0 else None
            yield msgspec.structs.replace(state, history=history, requests=requests)

    @property
    def _window(self) -> Window:
        """The samples of the last `WINDOW_S`."""
        last = self._samples[-1]
        return Window([one for one in self._samples if one.at_s >= last.at_s - WINDOW_S - PERIOD_S / 2])

    def _note_workers(self, now_s: float) -> None:
        """Note since when each worker is in its state, and mark what was lost."""
        fleet, before = self._sources.fleet, self._states
        self._states = {}
        for worker_id, state in _states(fleet).items():
            known = before.get(worker_id)
            self._states[worker_id] = known if known is not None and known[0] == state else (state, now_s)
            if known is not None and known[0] != state == "lost":
                self._history.mark(now_s, f"{worker_id} lost")
        if self._history.note_mode(now_s, fleet.mode) and self.mode_is_for[0] != fleet.mode:  # by another router
            self.mode_is_for = None, ""

    def _add_to_trails(self) -> None:
        workers, window = self._sources.fleet.workers, self._window
        trails = {}
        for worker in workers if len(workers) <= MOST_TRAILS else ():
            for figures in window.steps(worker.worker_id):
                trail = self._trails.get((worker.worker_id, figures.step)) or deque(maxlen=TRAIL_POINTS)
                trail.append((figures.intensity, figures.flops_per_s))
                trails[worker.worker_id, figures.step] = trail
        self._trails = trails

    def _make(self) -> PageState:
        sources, window = self._sources, self._window
        settings, fleet = sources.settings, sources.fleet
        recent = self._recent()
        promise, pools = self._promise(recent), [self._pool(pool, window) for pool in pools_of(fleet.mode)]
        found = bottleneck(fleet_state(promise, pools, window, self._receivers(window)))
        verdict = self._verdict_now(found, pools, promise)
        links, router = self._links(window), self._router(window)
        uses = resources(verdict, promise, pools, links, router)
        operation = sources.operation()
        return PageState(
            schema=SCHEMA,
            time_unix_s=time.time(),
            period_s=PERIOD_S,
            window_s=WINDOW_S,
            deployment=DeploymentNow(
                name=settings.name,
                model=settings.served_names[0],
                mode=fleet.mode,
                mode_is_for=self.mode_is_for[1],
                modes=list(fleet.roles.modes),
                uptime_s=self._clock() - self._began_s,
            ),
            verdict=verdict,
            resources=uses,
            promise=promise,
            history=self._history.all(self._clock()),
            pools=pools,
            links=links,
            router=router,
            flow=_flow(links, window),
            requests=_requests(recent),
            requests_shown_of=promise.sequences,
            requests_of=None if settings.routers == 1 else f"{settings.start.name}, one of {settings.routers}",
            operations=[] if operation is None else [operation],
        )

    def _recent(self) -> Recent:
        """Return what has ended within the last minute, in the present mode."""
        since_s = min(PROMISE_S, max(self._clock() - self._history.mode_since_s, PERIOD_S))
        return Recent(*self._sources.metrics.ended.within(since_s))

    def _promise(self, recent: Recent) -> Promise:
        window = self._window
        limits, of_minute = self._sources.settings.router.slo, Window([self._samples[0], self._samples[-1]])
        ended = {outcome: window.per_s("requests", outcome) for outcome in ("finished", "failed", "cancelled")}
        refused = {reason: rate for reason, rate in window.rates("rejected").items() if rate}
        more_in_flight = window.grown("in_flight") / window.seconds
        return Promise(
            window_s=recent.seconds,
            sequences=len(recent.ended),
            slo=PromisedSlo(limits.ttft_limit_s, limits.tpot_limit_s, rule.MIN_ATTAINMENT),
            ttft_s=recent.ttft_s,
            tpot_s=recent.tpot_s,
            itl_s=bucket_quantiles(of_minute.rates("itl")),
            attainment_ratio=recent.attainment("all"),
            ttft_attainment_ratio=recent.attainment("ttft"),
            tpot_attainment_ratio=recent.attainment("tpot"),
            goodput_per_s=recent.goodput_per_s,
            arrivals_per_s=max(0.0, sum(ended.values()) + more_in_flight),
            finished_per_s=ended["finished"],
            refused_per_s=sum(refused.values()),
            failed_per_s=ended["failed"],
            refused_by=refused,
        )

    def _pool(self, pool: Pool, window: Window) -> PoolNow:
        fleet, hardware = self._sources.fleet, self._sources.hardware().get(pool)
        peaks = (hardware.peak_flops, hardware.peak_bytes_per_s) if hardware else (None, None)
        workers = sorted(fleet.pool(pool), key=lambda one: (len(one.worker_id), one.worker_id))
        rows = [self._worker(worker, window) for worker in workers]
        kinds = steps_of(window.grown_of(row.id for row in rows), window.seconds)
        longest = max(kinds, key=lambda kind: kind.busy_ratio, default=None)
        mfu = longest.flops_per_s / peaks[0] if longest and peaks[0] else None
        mbu = longest.bytes_per_s / peaks[1] if longest and peaks[1] else None
        means = {kind.step: kind.seconds for kind in kinds}
        grown = window.grown_of(row.id for row in rows)
        queue = self._sources.queues().get(pool)
        known = [row for row in rows if row.busy_ratio is not None]
        phase = "prefill" if pool == "prefill" else "decode"
        point, alone_s = (None, None) if pool == "prefill" else self._decode_limits(workers, window)
        return PoolNow(
            pool=pool,
            hardware=hardware.name if hardware else None,
            peak_flops_per_s=peaks[0],
            peak_bytes_per_s=peaks[1],
            peaks_source=_source_of(hardware) if hardware else None,
            workers_ready=sum(row.state == "ready" for row in rows),
            workers_wanted=sum(row.state != "draining" for row in rows),
            bound=rule.bound(mfu, mbu),
            mfu_ratio=mfu,
            mbu_ratio=mbu,
            busy_ratio=mean(row.busy_ratio for row in known),
            prompt_busy_ratio=mean(row.prompt_busy_ratio for row in known),
            tokens_per_s=grown.get(f"tokens_total.{phase}", 0.0) / window.seconds,
            waiting_prompts=queue.waiting.prompts if queue else 0,
            wait_s=window.mean_of("stage", "queue") if queue else None,
            decode_step_s=means["decode"] / made_per_sequence(grown) if "decode" in means else None,
            mixed_step_s=means.get("mixed"),
            kv_blocks=workers[0].description.num_kv_blocks if workers else 0,
            slo_point=point,
            alone_step_s=alone_s,
            workers=rows,
            prefix_hit_ratio=window.ratio("prefix_hits", "prefix_queries", pool),
        )

    def _worker(self, worker: Worker, window: Window) -> WorkerNow:
        state, since_s = self._states.get(worker.worker_id, ("ready", self._clock()))
        status, blocks = worker.status, worker.description.num_kv_blocks
        per_step = made_per_sequence(window.grown_by(worker.worker_id))
        steps = [
            msgspec.structs.replace(one, trail=list(self._trails.get((worker.worker_id, one.step), ())))
            for one in window.steps(worker.worker_id)
        ]
        known = worker.worker_id in window.last.workers
        held = blocks - worker.kv_blocks_free + worker.outstanding.promised_blocks
        sample = window.last.workers.get(worker.worker_id)
        return WorkerNow(
            id=worker.worker_id,
            state=state,
            state_since_s=self._clock() - since_s,
            host=worker.description.host,
            device=worker.description.device or None,
            busy_ratio=min(1.0, sum(one.busy_ratio for one in steps)) if known else None,
            prompt_busy_ratio=min(1.0, sum(one.busy_ratio for one in steps if one.step in PROMPT_STEPS))
            if known
            else None,
            running=status.running if status else None,
            max_running=worker.max_num_seqs,
            waiting=sample.waiting if sample else None,
            kv_used_ratio=min(1.0, held / blocks) if status and blocks else None,
            kv_pinned_ratio=status.counters.get("pinned_blocks", 0.0) / blocks if status and blocks else None,
            decode_step_s=next((one.seconds / per_step for one in steps if one.step == "decode"), None),
            steps=steps,
            restarts=sum(count for key, count in self._sources.fleet.restarts.items() if key[1] == worker.worker_id),
            why=_why(worker) if state == "lost" else self._sources.fleet.away.get(worker.worker_id),
        )

    def _decode_limits(self, workers: Sequence[Worker], window: Window) -> tuple[SloPoint | None, float | None]:
        """Return where these workers meet the SLO on TPOT, and the seconds of a step of one sequence."""
        limit_s = self._sources.settings.router.slo.tpot_limit_s
        model = next((worker.step_model for worker in workers if worker.step_model is not None), None)
        running = sum(worker.outstanding.decodes for worker in workers)
        if model is None or not running:
            return None, None
        context_tokens = sum(worker.outstanding.context_tokens for worker in workers) / running
        counted, most = window.grown_of(row.worker_id for row in workers), min(row.max_num_seqs for row in workers)
        point = None if limit_s is None else slo_point(model, limit_s, context_tokens, most, counted)
        return point, model.decode_s(1, context_tokens) / model.made_per_sequence

    def _receivers(self, window: Window) -> int:
        exchanging = exchanging_pools(self._sources.fleet.mode)
        return 0 if exchanging is None else sum(one.pool == exchanging[1] for one in window.last.workers.values())

    def _links(self, window: Window) -> list[LinkNow]:
        pairs = self._sources.fleet.kv_pairs
        moved, seconds = window.rates("link_bytes"), window.rates("link_seconds")
        overlapped, others = window.rates("overlapped").get("ok", 0.0), window.rates("link_rate_count")
        grown, receivers = window.grown_of(window.last.workers), self._receivers(window)
        counters = [one.status.counters for one in self._sources.fleet.workers if one.status is not None]
        fetched = {key.partition(".")[2]: value for key, value in grown.items() if key.startswith("fetches_total.")}
        is_known = receivers > 0 and self._sources.settings.routers == 1  # each router times its own hand-offs
        links: list[LinkNow] = []
        for transport in sorted({pair.transport for pair in pairs}):
            first = not links  # what is counted for all transports together is told once
            handoffs = others.get(transport, 0.0) + (overlapped if first else 0.0)
            links.append(
                LinkNow(
                    transport=transport,
                    why=next((pair.why for pair in pairs if pair.transport == transport and pair.why), ""),
                    bytes_per_s=grown.get("kv_bytes_total.received", 0.0) / window.seconds
                    if first
                    else moved.get(transport, 0.0),
                    use_ratio=seconds.get(transport, 0.0) / receivers if is_known and others.get(transport) else None,
                    handoffs_per_s=handoffs,
                    waiting=int(sum(one.get("open_leases", 0.0) for one in counters)) if first else 0,
                    mean_wait_s=window.mean_of("stage", "handoff_wait"),
                    overlapped_ratio=overlapped / handoffs if handoffs and first else None,
                    failed_per_s=sum(value for result, value in fetched.items() if result != "ok") / window.seconds
                    if first
                    else 0.0,
                    expired_per_s=grown.get("expired_leases_total", 0.0) / window.seconds if first else 0.0,
                    fastest_bytes_per_s=window.last.requests.get(f"link_fastest{{{transport}}}"),
                )
            )
        return links

    def _router(self, window: Window) -> RouterNow:
        return RouterNow(
            cpu_ratio=(window.last.cpu_s - window.first.cpu_s) / window.seconds,
            tokens_per_event=window.tokens_per_event,
            loop_lag_s=self._sources.lag.worst_s,
            in_flight=int(window.last.requests.get("in_flight{}", 0)),
        )

    def _verdict_now(self, found: Bottleneck, pools: list[PoolNow], promise: Promise) -> Verdict:
        """Return the verdict; what is short stays so until another has been short for `HELD_S`."""
        now_s, verdict = self._clock(), verdict_of(found, pools, promise, self._sources.fleet.roles.modes)
        if now_s - self._judged_s > FORGOTTEN_S:  # nobody has looked since, so it may have been otherwise meanwhile
            self._verdict = self._other_since_s = None
        self._judged_s = now_s
        if self._verdict is not None and verdict.severity != "fault":
            before, since_s = self._verdict
            if before.kind == verdict.kind and before.resource == verdict.resource:
                self._other_since_s = None
                return msgspec.structs.replace(verdict, since_s=now_s - since_s)
            if self._other_since_s is None:
                self._other_since_s = now_s
            if before.severity not in ("fault", "idle") and now_s - self._other_since_s < HELD_S:
                return msgspec.structs.replace(before, since_s=now_s - since_s)
        elif self._verdict is not None and self._verdict[0].worker == verdict.worker:
            return msgspec.structs.replace(verdict, since_s=now_s - self._verdict[1])
        self._verdict, self._other_since_s = (verdict, now_s), None
        return verdict


@dataclass
class _HistoryKept:
    """The points of the last quarter of an hour."""

    next_s: float = float("-inf")
    newest_s: float = float("-inf")
    mode_since_s: float = float("-inf")
    """When the mode changed: what requests saw before says nothing of the pools that there are now."""
    _points: deque[tuple[float | None, ...]] = field(default_factory=lambda: deque(maxlen=HISTORY_POINTS))
    _marks: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=20))
    _mode: str | None = None

    def add(self, now_s: float, promise: Promise) -> None:
        self.newest_s, self.next_s = now_s, now_s + HISTORY_STEP_S - PERIOD_S / 2
        self._points.append(
            (
                promise.ttft_s.p90 if promise.ttft_s else None,
                promise.tpot_s.p90 if promise.tpot_s else None,
                promise.itl_s.p99 if promise.itl_s else None,
                promise.attainment_ratio,
                promise.goodput_per_s,
                promise.arrivals_per_s,
            )
        )

    def mark(self, now_s: float, text: str) -> None:
        self._marks.append((now_s, text))

    def note_mode(self, now_s: float, mode: str) -> bool:
        """Return whether it is another one than before."""
        if changed := self._mode not in (None, mode):
            self.mark(now_s, f"mode {mode}")
            self.mode_since_s = now_s
        self._mode = mode
        return changed

    def all(self, now_s: float) -> History:
        return self._of(list(self._points), now_s)

    def newest(self, now_s: float) -> History:
        return self._of([self._points[-1]], now_s)

    def _of(self, points: Sequence[tuple[float | None, ...]], now_s: float) -> History:
        kept_s = HISTORY_STEP_S * HISTORY_POINTS
        marks = [HistoryMark(now_s - at_s, text) for at_s, text in self._marks if now_s - at_s < kept_s]
        ttft_s, tpot_s, itl_s, attained, goodput, arrivals = zip(*points, strict=True) if points else [()] * 6
        return History(
            HISTORY_STEP_S,
            list(ttft_s),
            list(tpot_s),
            list(itl_s),
            list(attained),
            list(goodput),
            list(arrivals),
            marks,
        )


def _requests(recent: Recent) -> list[RequestNow]:
    """Return the latest sequences, those that missed an SLO or failed first."""
    ended = sorted(recent.ended, key=lambda one: one.outcome == "finished" and one.slos_met().get("all", True))
    return list(map(shown, ended[:MOST_REQUESTS]))


def slo_point(
    model: StepModel, limit_s: float, context_tokens: float, most: int, counted: Mapping[str, float]
) -> SloPoint | None:
    """Return the largest batch that keeps the SLO on TPOT; None if one sequence takes longer.

    `context_tokens` are those of one sequence. Its intensity follows from what decode steps have `counted`: weights
    are moved once a step, KV and FLOPs grow with the batch.
    """
    batch, step_limit_s = 0, limit_s * model.made_per_sequence
    while batch < most and model.decode_s(batch + 1, (batch + 1) * context_tokens) <= step_limit_s:
        batch += 1
    tokens, steps = counted.get("tokens_total.decode", 0.0), counted.get("steps_total.decode", 0.0)
    tokens = counted.get("sequence_steps_total") or tokens  # sequences of all steps
    if not batch or not tokens or not steps:
        return None
    if counted.get("steps_total.mixed"):
        return SloPoint(batch, None, None)
    weights = counted.get("bytes_total.decode.weights", 0.0) / steps
    kv = sum(counted.get(f"bytes_total.decode.{kind}", 0.0) for kind in ("kv_read", "kv_write")) / tokens
    flops, moved = batch * counted.get("flops_total.decode", 0.0) / tokens, weights + batch * kv
    step_s = model.decode_s(batch, batch * context_tokens)
    return SloPoint(batch, flops / moved, flops / step_s) if moved else None


def made_per_sequence(grown: Mapping[str, float]) -> float:
    """Return how many tokens a sequence got of each step that it decoded in: above 1 with speculation."""
    sequence_steps = grown.get("sequence_steps_total", 0.0)
    return 1.0 + grown.get("accepted_tokens_total", 0.0) / sequence_steps if sequence_steps else 1.0


def _source_of(hardware: PoolHardware) -> str:
    return "measured" if hardware.source.startswith("measured") else "data sheet"


def _states(fleet: Fleet) -> dict[str, WorkerState]:
    found: dict[str, WorkerState] = dict.fromkeys(fleet.away, "away")
    for worker in fleet.workers:
        state: WorkerState = "ready" if worker.usable and worker.status else "lost"
        if worker.drains or worker.leaves:
            state = "draining"
        elif worker.held_back:  # until the others have paired with it
            state = "starting"
        if worker.worker_id not in found or state == "ready":
            found[worker.worker_id] = state
    return found


def _why(worker: Worker) -> str:
    if not worker.client.connected:
        return "not connected"
    if worker.status is None:
        return "no answer"
    return "its engine has died" if worker.status.engine_failed else f"no step for {worker.status.stalled_s:.0f} s"


def _flow(links: list[LinkNow], window: Window) -> Flow:
    grown = window.grown_of(window.last.workers)
    finished = {
        labels.partition(",")[0]: rate
        for labels, rate in window.rates("requests").items()
        if labels.endswith(",finished")
    }
    all_of = sum(finished.values())
    return Flow(
        prompt_tokens_per_s=grown.get("tokens_total.prefill", 0.0) / window.seconds,
        split_ratio=finished.get("disaggregated", 0.0) / all_of if all_of else None,
        kv_bytes_per_s=sum(link.bytes_per_s for link in links),
        output_tokens_per_s=grown.get("tokens_total.decode", 0.0) / window.seconds,
    )
