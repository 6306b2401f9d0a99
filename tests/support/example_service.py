"""Services without an engine, for tests of the processes that run services; quick to import."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

from tests.support.patience import PATIENCE_S


class CannotBeRead(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Example:
    OFF_LOOP = frozenset({"pulse"})

    def __init__(self) -> None:
        self.free = threading.Event()

    async def add(self, one: int, two: int) -> int:
        return one + two

    async def fail(self, kind: str) -> None:
        raise CannotBeRead(1, 2) if kind == "cannot be read" else ValueError("no such thing")

    async def block(self) -> str:
        """Hold the event loop until `pulse` was answered."""
        return "freed" if self.free.wait(PATIENCE_S) else "never freed"

    def pulse(self) -> str:
        self.free.set()
        return "alive"

    async def lambda_of(self, number: int) -> Any:
        return lambda: number

    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    async def say(self, change: str) -> None:
        """Log it, and print as a library does."""
        logging.getLogger("ridgeline.worker_runtime.host").info(change, extra={"worker": "worker-0"})
        print("a library says", flush=True)  # noqa: T201 - that is what it is about

    async def fork(self) -> int:
        """Make a child that waits for a signal, as an engine that still loads; returns its pid."""
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # so that it ends if what should end it does not
            signal.pause()
        return pid

    async def end(self) -> None:
        """End as a crash would."""
        os._exit(3)


class Broken:
    OFF_LOOP: frozenset[str] = frozenset()

    def __init__(self) -> None:
        raise RuntimeError("the model is not there")
