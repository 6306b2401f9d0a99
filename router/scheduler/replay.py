"""Decides again what a recording tells of, by the same code, from what the scheduler saw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ridgeline.router.scheduler.adaptive import Adaptive
from ridgeline.router.scheduler.features import FleetModel
from ridgeline.router.scheduler.recorded_events import (
    AnswerCompleted,
    AnyEvent,
    Arrived,
    Began,
    Chose,
    Compared,
    Placed,
    PromptComputed,
)
from ridgeline.router.scheduler.traffic import Seen, Traffic


@dataclass(frozen=True, slots=True)
class OtherDecision:
    """A decision that comes out otherwise."""

    at_s: float
    """Since the recording began."""
    recorded: str
    replayed: str


@dataclass(slots=True)
class Replayed:
    """How many decisions were made again, and those that differ."""

    placements: int = 0
    comparisons: int = 0
    differences: list[OtherDecision] = field(default_factory=list)


def replay(events: Iterable[AnyEvent]) -> Replayed:
    """Make every decision of a recording again."""
    replayed, replay_ = Replayed(), None
    for event in events:
        if isinstance(event, Began):
            replay_ = _Replay(event, replayed)
        elif replay_ is not None:
            replay_.take(event)
    return replayed


class _Replay:
    def __init__(self, began: Began, replayed: Replayed) -> None:
        self._began_s = self._now_s = began.at_s
        self._replayed = replayed
        self._fleet: FleetModel | None = began.fleet
        self._traffic = Traffic(lambda: self._now_s)
        self._policy = Adaptive.restored(began, lambda: self._fleet, self._traffic)
        self._comparing: Iterator[None] | None = None
        self._known: dict[int, Seen] = {seen.number: seen for seen in self._traffic.latest}
        self._prompt_tokens = {number: seen.prompt_tokens for number, seen in self._known.items()}

    def take(self, event: AnyEvent) -> None:
        """Make the decision that this event tells of, or learn what it tells."""
        self._now_s = event.at_s
        match event:
            case Arrived():
                seen = self._traffic.arrived(
                    event.prompt_tokens, event.ttft_slo_s, event.tpot_slo_s, event.expected_tokens
                )
                self._known[seen.number], self._prompt_tokens[seen.number] = seen, event.prompt_tokens
            case PromptComputed() if event.number in self._known:
                self._traffic.computed(
                    self._known[event.number], self._prompt_tokens[event.number], event.cached_tokens
                )
            case AnswerCompleted() if event.number in self._known:
                self._prompt_tokens.pop(event.number)
                seen = self._known.pop(event.number)
                self._traffic.answered(seen, event.output_tokens, event.ttft_s, event.tpot_s)
            case Placed():
                self._place(event)
            case Compared():
                self._fleet = event.fleet
                self._policy.serves_since(event.serves_since)
                self._comparing = self._policy.compare()
                next(self._comparing, None)  # it takes the requests that are known now
            case Chose():
                self._choose(event)

    def _choose(self, event: Chose) -> None:
        if self._comparing is None:  # it had begun before the recording did
            self._policy.chose(event)
            return
        for _ in self._comparing:
            pass
        self._comparing = None
        self._replayed.comparisons += 1
        self._compare(event.policy, self._policy.name, event.at_s)

    def _place(self, event: Placed) -> None:
        self._replayed.placements += 1
        assigned = self._policy.assign(event.request, event.workers)
        again = None if assigned is None else (assigned.prompt_worker, assigned.decode_worker, assigned.reason)
        self._compare(str((event.prompt_worker, event.decode_worker, event.reason)), str(again), event.at_s)

    def _compare(self, recorded: str, replayed: str, at_s: float) -> None:
        if recorded != replayed:
            self._replayed.differences.append(OtherDecision(at_s - self._began_s, recorded, replayed))
