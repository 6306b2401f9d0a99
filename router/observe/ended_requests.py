"""The latest sequences that have ended: where the time of each went, its hand-off, and the decision that placed it.

`ridgeline.router.observe.metrics` records them. `GET /ridgeline/requests` and, for those of mode `adaptive` with what
was predicted, `GET /ridgeline/decisions` (`ridgeline.router.front.admin`) show them to operators.
`ridgeline.cluster.commands.ended_request` draws one, `ridgeline.cluster.commands.decisions` puts decisions into
sentences.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, takewhile
from typing import Final, Literal

import msgspec

from ridgeline.contracts.handoff import FetchOutcome
from ridgeline.router.fleet.request_route import Path
from ridgeline.router.observe.timeline import Outcome, RequestTimeline, Stage
from ridgeline.router.scheduler.features import Assignment

KEPT: Final = 1000
"""Sequences that are kept, about 2 KB each."""
SHOWN_BY_DEFAULT: Final = 10
Slo = Literal["ttft", "tpot", "all"]


class Handoff(msgspec.Struct, frozen=True, gc=False):
    """How the KV of a sequence went from one worker to another. See `ridgeline.contracts.handoff.TransferResult`."""

    source: str
    target: str
    transport: str
    outcome: FetchOutcome
    reason: str
    num_bytes: int
    wait_s: float
    wire_s: float
    """With overlap, of the last segment."""
    overlapped: bool
    """Whether it was fetched while its prompt was computed, so that only the end of it delayed anything."""
    began_early_s: float | None
    """With overlap, seconds from the arrival of the request to the begin of the decode leg."""


class ChosenWorkers(msgspec.Struct, frozen=True, gc=False):
    """Why mode adaptive gave a sequence its workers at last. Times are in seconds."""

    policy: str
    """The policy that mode adaptive served by."""
    reason: str
    expected_output_tokens: float
    placed_after_s: float
    """Time from its arrival to the decision."""
    held_s: float
    """See `ridgeline.router.scheduler.features.Assignment`."""
    prompt_worker: str
    decode_worker: str
    predicted_ttft_s: float
    predicted_tpot_s: float
    cached_tokens: int
    """Tokens of the prompt that its worker was expected to have."""


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sequence that has ended; a request with n > 1 is n of them. Times are in seconds."""

    request_id: str
    """The id of the client's answer, with `[0]`, `[1]` and so on appended for a request with n > 1."""
    http_request_id: str
    """The header x-request-id of the answer."""
    sequence_id: str
    """Its id in the logs of router and workers."""
    trace_id: str = ""
    """Its id at the collector of traces, in hexadecimal; empty without tracing."""
    outcome: Outcome
    error: str
    """See `RequestTimeline`."""
    path: Path
    arrived_unix_s: float
    """When the head of the request had been read, by the clock of the router's host."""
    latency_s: float
    """From then to its last token; to its end, if it did not finish. It is the sum of the stages."""
    ttft_s: float | None
    """What its client saw; None without any token."""
    tpot_s: float | None
    """None with less than two tokens."""
    ttft_limit_s: float | None
    tpot_limit_s: float | None
    prompt_tokens: int
    output_tokens: int
    placements: int
    """More than 1 if it was taken from a worker that was lost or drained, and placed again. A decision is then about
    the rest of it."""
    stages: tuple[Stage, ...]
    """In the order of time, without a gap."""
    handoff: Handoff | None
    """None if no KV was fetched for it."""
    decision: ChosenWorkers | None
    """None outside of mode adaptive, and until a worker's model has learned some steps."""
    ended_s_ago: float = 0.0

    def slos_met(self) -> dict[Slo, bool]:
        """Return whether it met each SLO that it has, and all of them; empty without any.

        A failed one has missed each. Any other is judged by what its client saw: one token has no TPOT to miss, and
        without a token there is nothing to judge.
        """
        ttft_s, tpot_s = (math.inf, math.inf) if self.outcome == "failed" else (self.ttft_s, self.tpot_s)
        met: dict[Slo, bool] = {}
        if ttft_s is not None and self.ttft_limit_s is not None:
            met["ttft"] = ttft_s <= self.ttft_limit_s
        if tpot_s is not None and self.tpot_limit_s is not None:
            met["tpot"] = tpot_s <= self.tpot_limit_s
        if ttft_s is not None and (self.ttft_limit_s is not None or self.tpot_limit_s is not None):
            met["all"] = all(met.values())
        return met


class RequestsAnswer(msgspec.Struct, frozen=True):
    """The answer of GET /ridgeline/requests."""

    routers: int
    """Routers of the deployment. Each keeps its own requests, and the connection decides which one answers."""
    kept: int
    """How many sequences this router keeps now."""
    most: int
    requests: list[EndedRequest]
    """Newest first."""


SendTrace = Callable[[EndedRequest, Mapping[str, str]], str]
"""Sends the spans of a sequence, of which its client gave these headers, and returns the id of its trace."""


class EndedRequests:
    """The latest sequences of this router. `clock` gives seconds that only grow, `wall_clock` those since 1970."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        send_trace: SendTrace | None = None,
        routers: int = 1,
    ) -> None:
        self._send_trace = send_trace
        self._routers = routers
        self._clock = clock
        self._wall_clock = wall_clock
        self._began_s = clock()
        self._latest: deque[tuple[float, EndedRequest]] = deque(maxlen=KEPT)
        """With the times at which they ended, newest first."""

    def add(self, timeline: RequestTimeline, outcome: Outcome) -> EndedRequest:
        """Keep a sequence that has ended, and return what is known of it."""
        stages = timeline.ended(outcome)
        record = EndedRequest(
            request_id=timeline.client_request_id or timeline.request_id,
            http_request_id=timeline.http_request_id,
            sequence_id=timeline.request_id,
            outcome=outcome,
            error=timeline.error,
            path=timeline.path,
            arrived_unix_s=self._wall_clock() - (timeline.clock() - timeline.arrived_s),
            latency_s=sum(stage.duration_s for stage in stages),
            ttft_s=timeline.ttft_s,
            tpot_s=timeline.tpot_s,
            ttft_limit_s=_finite(timeline.ttft_limit_s),
            tpot_limit_s=_finite(timeline.tpot_limit_s),
            prompt_tokens=timeline.num_prompt_tokens,
            output_tokens=timeline.num_output_tokens,
            placements=1 + timeline.interruptions,
            stages=stages,
            handoff=_handoff(timeline),
            decision=_decision(timeline.assignment),
        )
        if self._send_trace is not None:
            trace_id = self._send_trace(record, timeline.trace_headers)
            record = msgspec.structs.replace(record, trace_id=trace_id)
        self._latest.appendleft((self._clock(), record))
        return record

    def within(self, seconds: float) -> tuple[list[EndedRequest], float]:
        """Return those that ended within so many seconds, newest first, and for how many of these it is known."""
        since_s = self._clock() - seconds
        found = self._aged(takewhile(lambda pair: pair[0] >= since_s, self._latest))
        return found, found[-1].ended_s_ago if len(found) == KEPT else min(seconds, self._clock() - self._began_s)

    def latest(self, most: int) -> list[EndedRequest]:
        """Return the latest ones, newest first."""
        return self._aged(islice(self._latest, most))

    def answer(self, most: int, wanted: str = "") -> RequestsAnswer:
        """Return the latest ones, or those of one request, with what a client must know to look for others."""
        found = self.find(wanted)[:most] if wanted else self.latest(most)
        return RequestsAnswer(self._routers, len(self._latest), KEPT, found)

    def decisions(self, most: int) -> list[EndedRequest]:
        """Return the latest ones whose workers were chosen by prediction, newest first."""
        return self._aged(islice((pair for pair in self._latest if pair[1].decision is not None), most))

    def find(self, wanted: str) -> list[EndedRequest]:
        """Return those of one request, newest first, by any of its ids; it may have several prompts and sequences."""
        of_answer = re.compile(re.escape(wanted) + r"(-\d+)?(\[\d+\])?")
        return self._aged(
            (ended_s, one)
            for ended_s, one in self._latest
            if wanted in (one.http_request_id, one.sequence_id, one.trace_id) or of_answer.fullmatch(one.request_id)
        )

    def _aged(self, found: Iterable[tuple[float, EndedRequest]]) -> list[EndedRequest]:
        now_s = self._clock()
        return [msgspec.structs.replace(one, ended_s_ago=round(now_s - ended_s, 3)) for ended_s, one in found]


def _handoff(timeline: RequestTimeline) -> Handoff | None:
    result = None if timeline.decode_timing is None else timeline.decode_timing.transfer_result
    if result is None or timeline.link is None:
        return None
    began_s = timeline.overlap_began_s
    return Handoff(
        *timeline.link,
        transport=result.transport,
        outcome=result.outcome,
        reason=result.reason,
        num_bytes=result.num_bytes,
        wait_s=result.wait_s,
        wire_s=result.wire_s,
        overlapped=timeline.overlapped,
        began_early_s=None if began_s is None else began_s - timeline.arrived_s,
    )


def _decision(assignment: Assignment | None) -> ChosenWorkers | None:
    if assignment is None or assignment.request is None:
        return None
    return ChosenWorkers(
        policy=assignment.policy,
        reason=assignment.reason,
        expected_output_tokens=assignment.request.output_tokens,
        placed_after_s=assignment.request.waited_s,
        held_s=assignment.held_s,
        prompt_worker=assignment.prompt_worker,
        decode_worker=assignment.decode_worker,
        predicted_ttft_s=assignment.ttft_s,
        predicted_tpot_s=assignment.tpot_s,
        cached_tokens=assignment.cached_tokens,
    )


def _finite(limit_s: float) -> float | None:
    return limit_s if math.isfinite(limit_s) else None
