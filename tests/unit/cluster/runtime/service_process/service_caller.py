"""A process that asks for a service and then waits to be killed; its argument `preloaded` makes it have a parent too.

An argument such as `worker-0.log` is the service's log, in which it then says that it begins.

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
    log = next((word for word in sys.argv[1:] if word.endswith(".log")), "")
    client = await start_service("tests.support.example_service:Example", "t", on_gone=lambda: None, log=log)
    if log:
        await client.call("say", "begins")
    print(client.process.pid, await client.call("fork"), flush=True)  # noqa: T201 - for the test that started this
    await asyncio.Event().wait()


if __name__ == "__main__":
    with ExitStack() as stack:
        if "preloaded" in sys.argv[1:]:
            messages = Path(tempfile.gettempdir(), "messages")
            os.environ[PRELOADED] = stack.enter_context(preloaded_parent(MODULES, {}, messages))
        asyncio.run(main())
