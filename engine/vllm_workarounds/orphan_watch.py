"""Ends a child process when its parent is gone.

vLLM's engine process does not watch the process that started it: after a SIGKILL of the worker it would keep its memory
and its core forever. The connector starts the watch in that process and, if there are several ranks, in the process of
each rank: ranks would notice only between two steps.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

_POLL_S = 0.5
_started = threading.Event()


def exit_with_parent() -> None:
    """Start the watch, once per process; it ends this process within a second of the parent's end."""
    if _started.is_set():
        return
    _started.set()
    # Not getppid(): a parent that died while the model was loading would already have been replaced.
    parent = multiprocessing.parent_process()
    expected = os.getppid() if parent is None or parent.pid is None else parent.pid
    threading.Thread(target=_watch, args=(expected,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    # There is nothing to clean up for: the parent is dead, and leases and streams end with the sockets.
    os._exit(1)
