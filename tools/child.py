"""Runs a server of these tools in a process of its own, which ends with its standard input."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).parents[1]
START_S = 240.0
STOP_S = 30.0
LOG_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Child:
    """The process, what it said once it served, and its log."""

    process: subprocess.Popen[str]
    told: dict[str, str]
    log: IO[str]

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self.process.pid

    def require_alive(self) -> None:
        """Raise AssertionError, with the end of its log, if it has ended."""
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{_tail(self.log)}"


@contextmanager
def running(module: str, *arguments: str, core: int | None = None) -> Iterator[Child]:
    """Run this module for as long as the block runs, on one core or all of them."""
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*pinned, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONWARNINGS": "ignore", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Child(process, _told(process.stdout, log), log)
        finally:
            process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _told(stdout: IO[str], log: IO[str]) -> dict[str, str]:
    """Read lines until one is JSON: imported libraries may print others first."""
    while select.select([stdout], [], [], START_S)[0] and (line := stdout.readline()):
        if line.startswith("{"):
            told: dict[str, str] = json.loads(line)
            return told
    raise AssertionError(f"the server did not start:\n{_tail(log)}")


def _tail(log: IO[str]) -> str:
    log.flush()
    log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
    return log.read()


async def serve_until_stdin_ends(**told: str) -> None:
    """Say in the child's process that it serves, and where; return when the parent wants it to end."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
