"""Waits for other tasks, threads or processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0
"""Ends a test that would hang. It decides nothing else: longer than any machine needs, even if it stalls."""


async def eventually(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    """Wait until other tasks make the condition true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        await asyncio.sleep(0.002)


def in_the_end(condition: Callable[[], Any]) -> None:
    """Wait without a loop until threads or processes make the condition true."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.002)
