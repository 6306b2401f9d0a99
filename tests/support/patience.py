"""Waiting for what other tasks, threads or processes bring about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0
"""Ends a test that would never end. Decides nothing: longer than any machine needs, however long it stands still."""


async def eventually(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    """Wait for something that other tasks bring about."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        await asyncio.sleep(0.002)


def in_the_end(condition: Callable[[], Any]) -> None:
    """The same without a loop, for what threads and processes bring about."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.002)
