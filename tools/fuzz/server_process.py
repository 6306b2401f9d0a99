"""Starts the server under test and observes it from outside."""

from __future__ import annotations

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

REPOSITORY = Path(__file__).parents[2]
START_S = 240.0
STOP_S = 30.0
LOG_TAIL_BYTES = 4000


@dataclass(frozen=True)
class ServerUnderTest:
    """The server's addresses, process and log."""

    url: str
    prefill: str
    decode: str
    kv: str
    process: subprocess.Popen[str]
    log: IO[str]

    @property
    def pid(self) -> int:
        """The id of its one process."""
        return self.process.pid

    @property
    def port(self) -> int:
        """The port of the router's HTTP server, on 127.0.0.1."""
        return int(self.url.rpartition(":")[2])

    def require_alive(self) -> None:
        """Raise AssertionError, with the end of its log, if the server has ended."""
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{_tail(self.log)}"


@contextmanager
def serving(model: Path) -> Iterator[ServerUnderTest]:
    """Run `server.py` for as long as the block runs."""
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.fuzz.server", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield ServerUnderTest(**_addresses(process, process.stdout, log), process=process, log=log)
        finally:
            process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _addresses(process: subprocess.Popen[str], stdout: IO[str], log: IO[str]) -> dict[str, str]:
    """Read lines until one is JSON: imported libraries may print others first."""
    while select.select([stdout], [], [], START_S)[0] and (line := stdout.readline()):
        if line.startswith("{"):
            addresses: dict[str, str] = json.loads(line)
            return addresses
    process.kill()
    raise AssertionError(f"the server did not start:\n{_tail(log)}")


def _tail(log: IO[str]) -> str:
    log.flush()
    log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
    return log.read()
