"""Streams take turns in becoming text, a slice of the event loop's time at once.

A turn makes one event of all tokens of its stream that have come by then. While the router keeps up that is one token;
when it is behind it is several, which cost little more than one. So throughput grows where tokens are late anyway.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.router.live.samples import Text

SLICE_S = 0.002
"""After so long the loop reads what workers and clients have sent. A message of 256 tokens is read in about 1 ms."""
LOOK_EVERY_S = 10.0
"""Long beside a burst of requests, which makes any router late for a moment."""
TOKENS_AN_EVENT = 1.2
"""Tokens of an event above which a router counts as late: then every sixth token or more has waited for a later one."""
EVENTS_LOOKED_AT = 1000
"""With fewer in `LOOK_EVERY_S`, a hundred a second, tokens came together for another reason."""
TOLD_EVERY_S = 300.0
"""A router may be late for hours, and says the same each time."""
logger = logging.getLogger(__name__)


Stream = Callable[[], None]
"""Makes text of all tokens of one stream that wait. Raises nothing: a failure is the stream's own."""


class TextTurns(Collector):
    """The streams with tokens that wait, by the time of their oldest one, and how far the router is behind."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: dict[Stream, float] = {}
        """When the stream's oldest waiting token came."""
        self._next: asyncio.Handle | None = None
        self._events = 0
        self._tokens = 0
        self._held_s = 0.0
        self._looked_at = (0, 0)
        self._told_s = float("-inf")
        self.late = ""
        """Says that this router is the bottleneck, if it was at the last look."""

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

    def sent(self) -> Text:
        """Return what this router has sent so far."""
        return Text(self._tokens, self._events)

    def _take_turns(self) -> None:
        ends_s = self._clock() + SLICE_S
        while self._waiting:
            stream, came_s = next(iter(self._waiting.items()))
            self.leave(stream)
            stream()
            now_s = self._clock()
            self._held_s += now_s - came_s
            if now_s >= ends_s:  # after a stream's turn: a process that had to wait still goes on
                break
        self._next = asyncio.get_running_loop().call_soon(self._take_turns) if self._waiting else None

    async def watch(self) -> None:
        """Look every ten seconds whether this router is the bottleneck, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Say whether the tokens since the last look were late; log it every five minutes."""
        events, tokens = self._events - self._looked_at[0], self._tokens - self._looked_at[1]
        self._looked_at = self._events, self._tokens
        self.late = ""
        if events < EVENTS_LOOKED_AT or tokens < TOKENS_AN_EVENT * events:
            return
        self.late = (
            f"this router is the bottleneck: it sends {tokens / events:.1f} tokens in each event, "
            f"{tokens / LOOK_EVERY_S:,.0f} tokens/s in all; add one to router.processes for each free core"
        )
        if self._clock() >= self._told_s + TOLD_EVERY_S:
            self._told_s = self._clock()
            logger.warning(self.late)

    def collect(self) -> Iterator[Metric]:
        """Yield the series; prometheus-client calls it at each scrape."""
        yield CounterMetricFamily(
            "ridgeline_text_tokens",
            "Tokens that this router has turned into text by turns; streams with a stop string take none",
            value=self._tokens,
        )
        yield CounterMetricFamily(
            "ridgeline_text_events",
            "Events of streams in which it has sent them. With more than 1.2 tokens an event the router is the "
            "bottleneck: raise router.processes",
            value=self._events,
        )
        yield CounterMetricFamily(
            "ridgeline_text_seconds",
            "Time from a worker's oldest token being read by this router to its event's text being made, added up over "
            "events; JSON and the write to the client follow",
            value=self._held_s,
        )
        yield GaugeMetricFamily(
            "ridgeline_text_wait_seconds",
            "How long the oldest token that a worker has sent has waited in this router to become text",
            value=self.behind_s,
        )
