"""A process that asks for a service and then waits to be killed; its argument `preloaded` makes it have a parent too.

Prints the pids of the service and of a child that the service has forked.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from ridgeline.cluster.runtime.service_process.launch import PRELOADED, preloaded_parent, start_service

MODULES = ["tests.support.example_service"]


async def main() -> None:
    client = await start_service("tests.support.example_service:Example", "t", on_gone=lambda: None)
    print(client.process.pid, await client.call("fork"), flush=True)  # noqa: T201 - for the test that started this
    await asyncio.Event().wait()


if __name__ == "__main__":
    with ExitStack() as stack:
        if "preloaded" in sys.argv[1:]:
            messages = Path(tempfile.gettempdir(), "messages")
            os.environ[PRELOADED] = stack.enter_context(preloaded_parent(MODULES, {}, messages))
        asyncio.run(main())
