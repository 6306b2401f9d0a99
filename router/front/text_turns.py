"""Streams take turns in becoming text, a slice of the event loop's time at once.

A turn makes one event of all tokens of its stream that have come by then. While the router keeps up that is one token;
when it is behind it is several, which cost little more than one. So throughput grows where tokens are late anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SLICE_S = 0.002
"""After so long the loop reads what workers and clients have sent. A message of 256 tokens is read in about 1 ms."""


class Stream(Protocol):
    """One whose tokens wait to become text."""

    def make_text(self) -> None:
        """Make text of all tokens that wait. Raises nothing: a failure is the stream's own."""
        ...


class TextTurns(Collector):
    """The streams with tokens that wait, by the time of their oldest one, and how far the router is behind."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: dict[Stream, float] = {}
        """When the stream's oldest waiting token came."""
        self._next: asyncio.Handle | None = None
        self._events = 0
        self._tokens = 0

    def add(self, stream: Stream, tokens: int) -> None:
        """Give a stream a turn, if it does not wait for one already, for so many tokens more."""
        self._tokens += tokens
        self._waiting.setdefault(stream, self._clock())
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._take_turns)

    def leave(self, stream: Stream) -> None:
        """Take a stream's turn away: it has made its text by itself, or wants none any more."""
        if self._waiting.pop(stream, None) is not None:
            self._events += 1

    @property
    def behind_s(self) -> float:
        """How long the oldest token has waited."""
        return self._clock() - next(iter(self._waiting.values())) if self._waiting else 0.0

    def _take_turns(self) -> None:
        ends_s = self._clock() + SLICE_S
        while self._waiting and self._clock() < ends_s:
            stream = next(iter(self._waiting))
            self.leave(stream)
            stream.make_text()
        self._next = asyncio.get_running_loop().call_soon(self._take_turns) if self._waiting else None

    def collect(self) -> Iterator[Metric]:
        """Yield the series; prometheus-client calls it at each scrape."""
        yield CounterMetricFamily(
            "ridgeline_text_tokens", "Tokens that this router has made text of, turn by turn", value=self._tokens
        )
        yield CounterMetricFamily(
            "ridgeline_text_events",
            "Turns in which it did so, each an event of one stream; more than 1.2 tokens an event: the router is the "
            "bottleneck, and router.processes should be raised",
            value=self._events,
        )
        yield GaugeMetricFamily(
            "ridgeline_text_wait_seconds",
            "How long the oldest token that a worker has sent has waited in this router to become text",
            value=self.behind_s,
        )
