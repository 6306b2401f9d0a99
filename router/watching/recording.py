"""Streams what happens to the scheduler of this process, as lines, to somebody who records it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec

from ridgeline.contracts.vocabulary import Mode
from ridgeline.router.scheduler.adaptive import Adaptive
from ridgeline.router.scheduler.features import FleetModel
from ridgeline.router.scheduler.recorded_events import AnyEvent, FleetSeen, ModeBecame, Stopped, line_of
from ridgeline.router.scheduler.traffic import Traffic

LOOK_EVERY_S: Final = 0.25
FLEET_EVERY_S: Final = 10.0
MOST_UNREAD_BYTES: Final = 16 << 20
"""A reader that is so far behind gets no more."""


class Wanted(msgspec.Struct, frozen=True):
    """How much to record."""

    seconds: float
    most_bytes: int


class _Unread:
    """Lines that the reader has not taken."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self.size_bytes = 0
        self.is_behind = False

    def add(self, event: AnyEvent) -> None:
        """Add a line, unless the reader is too far behind."""
        if self.size_bytes > MOST_UNREAD_BYTES:
            self.is_behind = True
            return
        line = line_of(event)
        self._lines.append(line)
        self.size_bytes += len(line)

    def take(self) -> bytes:
        """Return all of them."""
        lines, self._lines, self.size_bytes = b"".join(self._lines), [], 0
        return lines


async def recording(
    wanted: Wanted,
    policy: Adaptive,
    traffic: Traffic,
    mode: Callable[[], Mode],
    fleet: Callable[[], FleetModel | None],
) -> AsyncGenerator[bytes, None]:
    """Yield lines until so much is recorded, or the reader leaves; the last one says why it ended."""
    unread, now_mode, fleet_s = _Unread(), mode(), traffic.clock()
    unread.add(policy.state(now_mode))
    traffic.listeners.append(unread.add)
    sent_bytes, ends_s = 0, traffic.clock() + wanted.seconds
    try:
        while True:
            if mode() != now_mode:
                now_mode = mode()
                unread.add(ModeBecame(traffic.clock(), now_mode))
            if traffic.clock() >= fleet_s + FLEET_EVERY_S and (known := fleet()):
                fleet_s = traffic.clock()
                unread.add(FleetSeen(fleet_s, known))
            if lines := unread.take():
                sent_bytes += len(lines)
                yield lines
            why = _why_ended(unread, sent_bytes >= wanted.most_bytes, traffic.clock() >= ends_s)
            if why:
                yield line_of(Stopped(traffic.clock(), why))
                return
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        traffic.listeners.remove(unread.add)


def _why_ended(unread: _Unread, is_full: bool, is_over: bool) -> str:
    if unread.is_behind:
        return "the reader was too slow"
    return "the limit of bytes" * is_full or "the time is over" * is_over
