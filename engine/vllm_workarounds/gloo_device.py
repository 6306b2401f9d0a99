"""Lets all process groups of a lone rank share one gloo device.

vLLM makes a dozen process groups, even for a model that is not split. Each makes its own gloo device, and each device a
thread that wakes a hundred times a second whether or not it has a peer: 2.6 % of a core for an idle prefill and decode
worker. A group of one rank never sends anything, so one device serves them all, and its thread may wake late.

Installed by the import of `ridgeline.engine.worker_extension`, which vLLM does before it makes the groups.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d

WITHIN_S = 1800
"""Gloo's own default time limit for an operation, in seconds."""
LATE_BY_NS = 100_000_000
"""How late the kernel may wake the device's thread when it only waits for time to pass; also how much longer the end of
the device may take."""
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
"""Of prctl(2): how late the kernel may end a wait of this thread, and of threads that it starts from now on."""


class LoneGroup(ProcessGroupGloo):
    """A gloo process group that shares a device if it has only one rank."""

    def __init__(
        self,
        store: distributed_c10d.Store,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(seconds=WITHIN_S),
        **others: Any,
    ) -> None:
        if size > 1:
            super().__init__(store, rank, size, timeout=timeout, **others)
            return
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
        options._timeout = timeout
        options._devices = [_device()]
        super().__init__(store, rank, size, options)


@cache
def _device() -> ProcessGroupGloo.Device:
    with _threads_that_may_wake_late():
        return ProcessGroupGloo.create_default_device()


@contextmanager
def _threads_that_may_wake_late() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    before_ns = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(LATE_BY_NS), 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(before_ns), 0, 0, 0)


def share_gloo_device() -> None:
    """Make torch create such groups from now on, in this process."""
    distributed_c10d.ProcessGroupGloo = LoneGroup  # type: ignore[misc] # looked up by this name
