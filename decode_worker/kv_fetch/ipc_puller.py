"""The `cuda-ipc` transport's receiving end: this GPU reads the source's memory and writes to its own.

It is `shm` for GPUs of one host. The copy is one or two kernels for some 32 MiB of a hand-off, all layers of its blocks
together, on a stream of high priority, and a pull's thread sleeps until their event; no byte passes through the host.
See `pinned` for what keeps the blocks meanwhile.

What the source announces is in its GPU's memory already: a block is announced when a token that was computed after it
is on the source's host, and never in the middle of a step there (`ridgeline.engine.connector.worker_side`). In the
other direction, the pin ends only after the kernels that read under it: a cancelled copy waits for them too.

While a peer has it open, a GPU's memory outlives the process that allocated it, and that process's successor is to be
loaded into it. So the puller watches each source process, and drops its memory when the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Generator
from typing import Any

import msgspec
import torch

from ridgeline.contracts import errors
from ridgeline.decode_worker.kv_fetch.pinned import Copy, PinnedPuller, Readable, copy_out_of
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.interfaces import Pull, SourceDescription
from ridgeline.kv_transfer.memory.blocks import CannotOpen
from ridgeline.kv_transfer.memory.ipc import IpcOffer, OpenedPool, gpu_uuid
from ridgeline.kv_transfer.memory.shared import require_same_host

log = logging.getLogger(__name__)


class IpcPuller(PinnedPuller[OpenedPool]):
    """The `cuda-ipc` transport; keeps the memory of each source process open."""

    name = "cuda-ipc"
    not_offered = "its KV cache is not in the memory of a GPU"
    failures = (RuntimeError,)  # torch's for whatever CUDA refuses

    def __init__(self, control: GrpcControl, device: torch.device, *, any_gpu: bool = True) -> None:
        """`device` is where our own cache lies.

        Without `any_gpu`, caches on other GPUs are left to other transports, and so is a source from which a copy has
        failed.
        """
        super().__init__(control, "kv-ipc")
        self._device = device
        self._any_gpu = any_gpu
        self._failed: dict[str, str] = {}
        """By incarnation, what CUDA said against a copy."""
        self._watched: dict[str, int] = {}
        """By incarnation, a descriptor that is readable once the process has ended."""

    def unsupported_reason(self, source: SourceDescription) -> str | None:
        if not self._any_gpu and (failed := self._failed.get(source.incarnation)) is not None:
            return failed
        known = source.incarnation in self._opened
        why = super().unsupported_reason(source)
        if known or why is not None:
            return why
        try:
            descriptor = os.pidfd_open(self._opened[source.incarnation].pid)
        except ProcessLookupError:
            self.forget(source)
            return "its process has ended"
        except OSError as error:  # a container may forbid it; then its memory is dropped when workers pair anew
            log.info("the end of a process whose KV cache is open here will not be noticed at once: %s", error)
            return None
        self._watched[source.incarnation] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self.forget, source)
        return None

    def forget(self, source: SourceDescription) -> None:
        self._end_watch(source.incarnation)
        super().forget(source)

    async def close(self) -> None:
        for incarnation in list(self._watched):
            self._end_watch(incarnation)
        await super().close()

    def _end_watch(self, incarnation: str) -> None:
        if (descriptor := self._watched.pop(incarnation, None)) is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def open(self, offer: dict[str, Any]) -> OpenedPool:
        described = msgspec.convert(offer, IpcOffer)
        require_same_host(described.host)
        if not self._any_gpu and described.device != gpu_uuid(self._device):
            raise CannotOpen(
                "its KV cache is on another GPU, and between two GPUs this has not run yet; "
                "transfer.transport: cuda-ipc tries it"
            )
        return OpenedPool(described, self._device)

    def copier(self, opened: OpenedPool, pull: Pull) -> Copy:
        copy = copy_out_of(opened.pool, pull)

        def noted(readable: Readable) -> Generator[int, None, None]:
            try:
                yield from copy(readable)
            except self.failures as error:
                self._failed[pull.source.incarnation] = f"a copy failed ({errors.first_line(error)})"
                raise

        return noted
