"""Where reads land before their blocks are copied to their places: memory that a late read can do no harm to.

A read cannot be aborted, see `agent`. One that nobody waits for any more, because its pull was cancelled or ran out of
time, keeps its room until it has ended by itself; so nothing is written to a KV cache after its pull has returned.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ridgeline.contracts import errors
from ridgeline.kv_transfer.nixl.agent import Agent, Descriptors, Read, descriptors
from ridgeline.kv_transfer.nixl.library import NixlFailed

PIECE_BYTES: Final = 8 << 20
"""Bytes of one read: large beside the work for one, small enough that it takes milliseconds."""
MOST_ABANDONED: Final = 32
"""Reads that nobody waits for, at most; a source that is frozen leaves one for each pull."""


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Registered memory for one read at a time."""

    memory: torch.Tensor
    """uint8 [bytes], on the pool's device."""

    def rows(self, theirs: Descriptors) -> Descriptors:
        """Return where runs of these sizes land here, one after the other."""
        sizes = theirs[:, 1]
        starts = sizes.cumsum(dtype=np.uint64) - sizes + np.uint64(self.memory.data_ptr())
        return descriptors(starts, sizes, self.memory.device.index)


class Staging:
    """The rooms of one agent; grows to as many as there are concurrent reads. Its methods may run on any thread."""

    def __init__(self, agent: Agent, device: torch.device) -> None:
        self._agent = agent
        self._device = device
        self._lock = threading.Lock()
        self._free: list[Room] = []
        self._abandoned: list[tuple[Room, Read]] = []

    @property
    def abandoned(self) -> int:
        """How many reads nobody waits for; `take` looks which of them have ended."""
        return len(self._abandoned)

    def take(self, num_bytes: int) -> Room:
        """Return room for one read, until it is given back or abandoned.

        Raises NixlFailed, and TransferFailed(`busy`) while too much is occupied by abandoned reads.
        """
        with self._lock:
            self._reclaim()
            if len(self._abandoned) >= MOST_ABANDONED:
                raise errors.TransferFailed(errors.BUSY, f"{len(self._abandoned)} reads have not ended")
            for index, room in enumerate(self._free):
                if room.memory.numel() >= num_bytes:
                    return self._free.pop(index)
        with torch.inference_mode(False):
            memory = torch.empty(max(PIECE_BYTES, num_bytes), dtype=torch.uint8, device=self._device)
        self._agent.register(descriptors([memory.data_ptr()], memory.numel(), self._device.index))
        return Room(memory)

    def give_back(self, room: Room) -> None:
        """Take back room in which no read goes on."""
        with self._lock:
            self._free.append(room)

    def abandon(self, room: Room, read: Read) -> None:
        """Keep room for a read that goes on although nobody waits for it."""
        with self._lock:
            self._abandoned.append((room, read))

    def _reclaim(self) -> None:
        abandoned, self._abandoned = self._abandoned, []
        for room, read in abandoned:
            if _ended(read):
                self._free.append(room)
            else:
                self._abandoned.append((room, read))


def _ended(read: Read) -> bool:
    try:
        return read.ended()
    except NixlFailed:
        return True  # an error is an end too
