"""The latest requests of every mode, remembered for simulations, and told to those that record them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ridgeline.router.scheduler.recorded_events import (
    AnswerCompleted,
    AnyEvent,
    Arrived,
    Listener,
    PromptComputed,
    limit,
)

REMEMBERED: Final = 3_200
"""The latest requests that are remembered: 50 for each of 64 workers."""


@dataclass(eq=False, slots=True)
class Seen:
    """A request as it was seen: what is simulated of it."""

    number: int
    arrival_s: float
    prompt_tokens: int
    """Those that its worker computed, or had to."""
    ttft_slo_s: float
    tpot_slo_s: float
    expected_tokens: float
    """Of its answer, which counts until it has ended."""
    made_tokens: int = 0
    ended: bool = False
    latency_s: float | None = None
    """From its arrival to its last token, as its client saw it; None if that is not known."""
    sent_tokens: int = 0
    """Of its prompt, those included that a prefix cache has."""

    def __post_init__(self) -> None:
        self.sent_tokens = self.sent_tokens or self.prompt_tokens


class Traffic:
    """Told of every request, in whatever mode. `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.latest: deque[Seen] = deque(maxlen=REMEMBERED)
        self.arrived_requests = 0
        self.listeners: list[Listener] = []

    def tell(self, event: AnyEvent) -> None:
        """Tell all listeners."""
        for listener in self.listeners:
            listener(event)

    def arrived(
        self,
        prompt_tokens: int,
        ttft_slo_s: float,
        tpot_slo_s: float,
        expected_tokens: float,
        waited_s: float = 0.0,
    ) -> Seen:
        """Remember a request that arrived `waited_s` ago; the caller tells more about it as it happens."""
        arrival_s = self.clock() - waited_s
        seen = Seen(self.arrived_requests, arrival_s, prompt_tokens, ttft_slo_s, tpot_slo_s, expected_tokens)
        self.latest.append(seen)
        self.arrived_requests += 1
        if self.listeners:
            self.tell(arrival_of(seen))
        return seen

    def computed(self, seen: Seen, prompt_tokens: int, cached_tokens: int) -> None:
        """Record how many tokens of its prompt its worker had in its prefix cache."""
        seen.prompt_tokens = max(1, prompt_tokens - cached_tokens)
        if self.listeners:
            self.tell(PromptComputed(self.clock(), seen.number, prompt_tokens - seen.prompt_tokens))

    def answered(self, seen: Seen, output_tokens: int, ttft_s: float | None, tpot_s: float | None) -> None:
        """Record its complete answer."""
        seen.made_tokens, seen.ended = output_tokens, True
        if ttft_s is not None:
            seen.latency_s = ttft_s + (tpot_s or 0.0) * (output_tokens - 1)
        if self.listeners:
            self.tell(AnswerCompleted(self.clock(), seen.number, output_tokens, ttft_s, tpot_s))


def arrival_of(seen: Seen) -> Arrived:
    """Return the event of its arrival."""
    slos = limit(seen.ttft_slo_s), limit(seen.tpot_slo_s)
    return Arrived(seen.arrival_s, seen.number, seen.prompt_tokens, *slos, seen.expected_tokens)
