"""The `cuda-ipc` transport's receiving end: this GPU reads the source's memory and writes to its own.

It is `shm` for GPUs of one host. The copy is one or two kernels for some 32 MiB of a hand-off, all layers of its blocks
together, on a stream of high priority, and a pull's thread sleeps until their event; no byte passes through the host.
See `pinned` for what keeps the blocks meanwhile.

What the source announces is in its GPU's memory already: a block is announced when a token that was computed after it
is on the source's host, and never in the middle of a step there (`engine.connector.worker_side`). In the other
direction, the pin ends only after the kernels that read under it: a cancelled copy waits for them too.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from kv_transfer.fetch.control import GrpcControl
from kv_transfer.fetch.pinned import Copy, PinnedPuller, copy_out_of
from kv_transfer.interfaces import Pull
from kv_transfer.memory.ipc import IpcOffer, OpenedPool


class IpcPuller(PinnedPuller[OpenedPool]):
    """The `cuda-ipc` transport; keeps the memory of each source process open."""

    name = "cuda-ipc"
    not_offered = "its KV cache is not in the memory of a GPU"

    def __init__(self, control: GrpcControl, device: torch.device) -> None:
        """`device` is where our own cache lies."""
        super().__init__(control, "kv-ipc")
        self._device = device

    def open(self, offer: dict[str, Any]) -> OpenedPool:
        return OpenedPool(msgspec.convert(offer, IpcOffer), self._device)

    def copier(self, opened: OpenedPool, pull: Pull) -> Copy:
        return copy_out_of(opened.pool, pull)
