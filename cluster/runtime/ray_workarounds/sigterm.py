"""Lets an async actor decide what SIGTERM means.

Signal handlers belong to the main thread, and no code of an async actor runs there: `signal.signal` and
`loop.add_signal_handler` are refused. Ray's own handler runs there and ends the process through one function, which it
looks up by name at that moment; that name is given another function here. A test with a real actor watches over it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray._private.worker

_END = "raise_sys_exit_with_custom_error_message"


def on_sigterm(call: Callable[[], Any]) -> None:
    """Have SIGTERM run `call` in this event loop, and end nothing by itself. The latest call counts."""
    loop = asyncio.get_running_loop()
    if not hasattr(ray._private.worker, _END):  # another Ray: SIGTERM then ends the process, as a crash would
        return

    def instead(*args: Any, **kwargs: Any) -> None:
        loop.call_soon_threadsafe(call)

    setattr(ray._private.worker, _END, instead)
