"""One record per request that joins both legs; events are recorded here, and `metrics.py` reads it at the end.

Nothing is decided by it: the request's state and what follows from it are in `router/dispatch/request.py`.

Workers report durations, since clocks differ between hosts. `RequestTimeline.ended` lays them end to end on the
router's clock, so that the stages of a sequence add up to what its client waited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import msgspec

from ridgeline.contracts.tasks import LegTiming
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.fleet.request_route import Path
from ridgeline.router.scheduler.features import Assignment

Outcome = Literal["finished", "failed", "cancelled"]
RequestState = Literal["queued", "prefilling", "handoff", "decoding"]
"""The state of a request. `handoff`: its first token was sent, and decode has not produced one yet."""
Latency = Literal["ttft", "second_token", "itl"]
"""From arrival to the first delta with tokens; from the first to the second; from each delta to the next."""
StageName = Literal[
    "preprocess",
    "queue",
    "dispatch",
    "engine_queue",
    "prefill",
    "handoff_wait",
    "wire",
    "decode_queue",
    "decode",
    "unreported",
    "lost",
]
"""A part of a sequence's latency. `preprocess`: body, template, tokenising, admission. `queue`: the wait in the router,
`engine_queue` that in an engine, which `ridgeline_stage_seconds` adds up. `dispatch`: seconds of each leg that its
worker does not count, which are messages both ways, threads, and the rest of the step that ran. `unreported`: a leg
that ended before its worker told its times. `lost`: from its placement to the loss of its worker."""
LEAST_STAGE_S: Final = 1e-6
"""A shorter stage is a rounding error, and joins the next one."""
Observe = Callable[[Latency, Pool, float], None]
"""Receives a latency, the pool that made the token at its end, and its seconds."""


class LegWorker(NamedTuple):
    """A worker of a sequence, in the pool that it had at that time."""

    pool: Pool
    worker_id: str


class Stage(msgspec.Struct, frozen=True, gc=False):
    """A part of a sequence's latency on the router's clock. Each begins where the one before it ends."""

    name: StageName
    start_s: float
    """Seconds from its arrival."""
    duration_s: float
    pool: Pool | None = None
    """The pool of the worker that was busy with it, or waited for; None: it was in the router."""
    worker: str = ""


def _nobody(_latency: Latency, _pool: Pool, _seconds: float) -> None: ...


@dataclass
class RequestTimeline:
    """The events of one sequence, recorded as they happen."""

    clock: Callable[[], float]
    request_id: str
    num_prompt_tokens: int
    path: Path
    head_read_s: float | None = None
    """When the head of its HTTP request had been read; None: it arrives now."""
    observe: Observe = _nobody
    """Receives each latency as soon as it is known."""
    client_request_id: str = ""
    """The id that its client knows; empty for a health probe."""
    http_request_id: str = ""
    """The header x-request-id of its answer."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """The headers by which its client named its own span."""
    ttft_limit_s: float = math.inf
    tpot_limit_s: float = math.inf
    router_queue_s: float = 0.0
    """Seconds that the prompt waited in the router for a worker."""
    num_output_tokens: int = 0
    prefill_timing: LegTiming | None = None
    decode_timing: LegTiming | None = None
    link: tuple[str, str] | None = None
    """The workers between which its KV went: prefill's and decode's."""
    overlapped: bool = False
    """The KV was fetched during prefill (overlap), so that waiting for it cost only the last segment."""
    assignment: Assignment | None = None
    """Why its workers were chosen, if a policy chose them."""
    pauses_s: list[tuple[RequestState, float]] = field(default_factory=list)
    """For each loss of a worker, the request's state and the pause that the client saw: from the last token before the
    loss, or from arrival, to the next token."""
    interruptions: int = 0
    """How many times it was taken from a worker to go on elsewhere."""
    last_pool: Pool | None = None
    """The pool that made the last token so far."""
    overlap_began_s: float | None = None
    """When its decode leg was begun during prefill, whether it was of use or not."""
    prompt_pool: Pool | None = None
    """The pool of the worker that computes the prompt, once it has one."""
    error: str = ""
    """The class of the error that it failed with, `WorkerLost` for example; empty unless it failed."""
    arrived_s: float = field(init=False)
    _first_token_s: float = 0.0
    _last_token_s: float = 0.0
    _num_deltas: int = 0
    _interrupted: RequestState | None = None
    _workers: tuple[LegWorker, ...] = ()
    """Those of this attempt: one for the whole request, or prefill's and decode's."""
    _prompt_done_s: float | None = None
    _stages: list[Stage] = field(default_factory=list)
    _until_s: float = field(init=False)
    """Where the last of the stages ends."""

    def __post_init__(self) -> None:
        now_s = self.clock()
        self.arrived_s = now_s if self.head_read_s is None else self.head_read_s
        self._until_s = self.arrived_s
        self._stage("preprocess", now_s)

    def placed(self, *workers: LegWorker) -> None:
        """Record that it has got these workers: one, or one for prefill and one for decode."""
        self._stage("queue", self.clock())
        self._workers, self.prompt_pool = workers, workers[0].pool

    @property
    def ids(self) -> dict[str, str]:
        """Its ids for the log: that between router and workers, and that which its client knows."""
        return {"request": self.request_id, "client_request": self.client_request_id}

    def tokens(self, count: int, pool: Pool) -> None:
        """Record that `count` tokens made by a worker of `pool` go to the client now."""
        if not count:
            return
        now_s = self.clock()
        before_s = self._last_token_s if self._num_deltas else self.arrived_s
        if self._interrupted is not None:
            self.pauses_s.append((self._interrupted, now_s - before_s))
            self._interrupted = None
        self.num_output_tokens += count
        self._num_deltas += 1
        self._last_token_s, self.last_pool = now_s, pool
        if self._num_deltas == 1:
            self._first_token_s = now_s
            self.observe("ttft", pool, now_s - before_s)
            return
        if self._num_deltas == 2:
            self.observe("second_token", pool, now_s - before_s)
        self.observe("itl", pool, now_s - before_s)

    def prompt_reported(self, timing: LegTiming | None) -> None:
        """Record the end and the timing of the leg that computed the prompt for another worker."""
        self.prefill_timing, self._prompt_done_s = timing, self.clock()

    def decode_reported(self, timing: LegTiming | None) -> None:
        """Record the timing of the leg that decodes.

        If it had to compute the prompt, the request counts as a fallback.
        """
        self.decode_timing = timing
        result = None if timing is None else timing.transfer_result
        if self.path == "disaggregated" and result is not None and result.outcome != "ok":
            self.path = "fallback"

    def interrupted(self, state: RequestState) -> None:
        """Record that the request was taken from its worker in this state and goes on elsewhere."""
        self._interrupted = state
        self.interruptions += 1
        if self._workers:
            self._stage("lost", self.clock(), self._after_prefill())
        self.overlapped, self._workers = False, ()
        self.prefill_timing = self.decode_timing = self._prompt_done_s = self.link = self.overlap_began_s = None

    def ended(self, outcome: Outcome) -> tuple[Stage, ...]:
        """Return the stages up to its last token, or up to now if it did not finish. Call it once, at the end."""
        until_s = self._last_token_s if outcome == "finished" and self._num_deltas else self.clock()
        if not self._workers:
            self._stage("queue", until_s)
        elif len(self._workers) == 1:
            self._leg(self._workers[0], until_s, self._whole_leg_s())
        elif (worker := self._after_prefill()) == self._workers[0]:
            self._leg(worker, until_s, self._prefill_leg_s())
        else:
            self._leg(worker, until_s, self._decode_leg_s())
        return tuple(self._stages)

    def _after_prefill(self) -> LegWorker:
        """Add the stages of the leg that computed the prompt for another worker, if it was handed over.

        Return the worker that then has the sequence.
        """
        if self.link is None or self._prompt_done_s is None:
            return self._workers[0]
        self._leg(self._workers[0], self._prompt_done_s, self._prefill_leg_s())
        return self._workers[1]

    def _stage(self, name: StageName, until_s: float, worker: LegWorker | tuple[()] = ()) -> None:
        """Add a stage that ends at this time of the router's clock, unless an earlier one has lasted until then."""
        if (duration_s := until_s - self._until_s) >= LEAST_STAGE_S:
            self._stages.append(Stage(name, self._until_s - self.arrived_s, duration_s, *worker))
            self._until_s = until_s

    def _leg(self, worker: LegWorker, until_s: float, durations_s: dict[StageName, float] | None) -> None:
        """Add the stages of a leg, as its worker reported them, so that the last one ends at `until_s`.

        If the leg began before the stages so far ended (overlap), only the rest of it delayed anything.
        """
        if durations_s is None:
            self._stage("unreported", until_s, worker)
            return
        end_s = until_s - sum(durations_s.values())
        self._stage("dispatch", end_s, worker)
        for name, duration_s in durations_s.items():
            end_s += duration_s
            self._stage(name, end_s, worker)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, vLLM's definition: (latency - TTFT) / (output tokens - 1)."""
        if self.num_output_tokens < 2:
            return None
        return (self._last_token_s - self._first_token_s) / (self.num_output_tokens - 1)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from its arrival to its first token; None without any."""
        return self._first_token_s - self.arrived_s if self._num_deltas else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds from its arrival to its latest token; None without any."""
        return self._last_token_s - self.arrived_s if self._num_deltas else None

    @property
    def overhead_s(self) -> float | None:
        """Seconds from placement to first token in which its engine did not have it.

        Messages, the rest of a step that ran, threads. None if not known, or if its workers were not chosen by
        prediction.
        """
        timing = self.decode_timing if self.prefill_timing is None else self.prefill_timing
        ttft_s = self.ttft_s
        request = None if self.assignment is None else self.assignment.request
        if request is None or timing is None or ttft_s is None or self.pauses_s:
            return None
        return max(0.0, ttft_s - request.waited_s - timing.queue_s - timing.first_token_s)

    @property
    def moved(self) -> tuple[int, float]:
        """Bytes and seconds of its whole hand-off; zeros if there was none, or only its last segment was timed."""
        result = None if self.decode_timing is None else self.decode_timing.transfer_result
        if self.link is None or result is None or result.outcome != "ok" or self.overlapped:
            return 0, 0.0
        return result.num_bytes, result.wire_s

    @property
    def transport(self) -> str:
        """What carried its hand-off; empty if there was none."""
        result = None if self.decode_timing is None else self.decode_timing.transfer_result
        return "" if result is None else result.transport

    def waits_s(self) -> Iterator[tuple[Pool, Literal["router", "engine"], float]]:
        """Yield where its legs waited, by the pool of their worker, and the seconds."""
        if self.prompt_pool is None:
            return
        yield self.prompt_pool, "router", self.router_queue_s
        if self.prefill_timing is not None:
            yield self.prompt_pool, "engine", self._queue_s(self.prefill_timing)
        if self.decode_timing is not None and self.last_pool is not None:
            yield self.last_pool, "engine", self._queue_s(self.decode_timing)

    @staticmethod
    def _queue_s(timing: LegTiming) -> float:
        """Return the seconds in the engine's queue, without those of a hand-off."""
        result = timing.transfer_result
        return timing.queue_s if result is None else max(0.0, timing.queue_s - result.wait_s - result.wire_s)

    def _whole_leg_s(self) -> dict[StageName, float] | None:
        """Return the stages of a leg that computes the prompt and decodes; None if they are not known."""
        timing = self.decode_timing
        if timing is None:
            return None
        decode_s = timing.compute_s - timing.first_token_s
        return {"engine_queue": timing.queue_s, "prefill": timing.first_token_s, "decode": decode_s}

    def _prefill_leg_s(self) -> dict[StageName, float] | None:
        """Return the stages of a leg that computes the prompt for another worker; None if they are not known."""
        timing = self.prefill_timing
        if timing is None:
            return None
        result = timing.transfer_result  # of what another worker had cached
        fetch: dict[StageName, float] = {"handoff_wait": result.wait_s, "wire": result.wire_s} if result else {}
        return {**fetch, "engine_queue": self._queue_s(timing), "prefill": timing.compute_s}

    def _decode_leg_s(self) -> dict[StageName, float] | None:
        """Return the stages of a leg that fetches KV and decodes, or computes the prompt if the fetch failed."""
        timing = self.decode_timing
        if timing is None:
            return None
        result = timing.transfer_result
        wait_s, wire_s = (result.wait_s, result.wire_s) if result else (0.0, 0.0)
        prefill_s = timing.first_token_s if result and result.outcome != "ok" else 0.0
        return {
            "handoff_wait": wait_s,
            "wire": wire_s,
            "decode_queue": self._queue_s(timing),
            **({"prefill": prefill_s} if prefill_s else {}),
            "decode": timing.compute_s - prefill_s,
        }
