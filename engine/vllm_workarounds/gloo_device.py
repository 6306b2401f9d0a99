"""Lets all process groups of a lone rank share one gloo device.

vLLM makes a dozen process groups, even for a model that is not split. Each makes its own gloo device, and each device a
thread that wakes a hundred times a second whether or not it has a peer: 2.6 % of a core for an idle prefill and decode
worker. A group of one rank never sends anything, so one device serves them all.

Installed by the import of `engine.worker_extension`, which vLLM does before it makes the groups.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d

WITHIN_S = 1800
"""Gloo's own default time limit for an operation, in seconds."""


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
    return ProcessGroupGloo.create_default_device()


def share_gloo_device() -> None:
    """Make torch create such groups from now on, in this process."""
    distributed_c10d.ProcessGroupGloo = LoneGroup  # type: ignore[misc] # looked up by this name
