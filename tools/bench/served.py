"""Serves an aiohttp application from a process of its own.

Used by `tools.bench.null_server` and `tools.bench.slow_proxy`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from aiohttp import web

REPOSITORY: Final = Path(__file__).parents[2]


async def serve_until_closed(app: web.Application, port: int = 0) -> None:
    """Serve on this machine, print the URL, and end when whoever started this process closes its input, or dies."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    sys.stdout.write(f"url http://127.0.0.1:{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


@contextmanager
def served(module: str, *arguments: str) -> Iterator[str]:
    """Run a module that serves until its input is closed while the block runs; yield its URL."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.stdin.close()
