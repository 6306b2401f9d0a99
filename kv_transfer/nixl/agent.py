"""A NIXL agent: a name, memory registered with UCX, and the peers that it can read from.

One thread at a time is in NIXL, so that UCX needs no locks of its own. NIXL lets go of the GIL during its calls. The
agent of a source has a thread that answers readers where the hardware does not (TCP); it sleeps between messages. That
of a reader has none: whoever waits for a read drives it.

UCX cannot abort a read: NIXL's `releaseXferReq` returns while the bytes may still come. So a `Read` must be kept, with
the memory it writes to, until `ended` says so.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.kv_transfer.nixl.library import NixlFailed, failures, load

BACKEND: Final = "UCX"
ANSWER_POLL_US: Final = 3000
"""Longest sleep of the answering thread: for some events UCX does not wake it. Takes 1 % of a core when idle."""

Descriptors = npt.NDArray[np.uint64]
"""Runs of bytes: [number, 3], each row the address, the bytes and the device's index."""


def descriptors(addresses: npt.ArrayLike, num_bytes: npt.ArrayLike, device_index: int | None) -> Descriptors:
    """Return a row for each of these runs, on one device; an index of None is 0."""
    starts = np.asarray(addresses, dtype=np.uint64)
    rows: Descriptors = np.empty((len(starts), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = starts, num_bytes, device_index or 0
    return rows


class Agent:
    """One agent. Its methods may be called from any thread; each raises NixlFailed if NIXL refuses."""

    def __init__(self, name: str, device: torch.device, *, answers: bool) -> None:
        """`device` is where its memory lies; with `answers`, it has a thread that serves readers."""
        self._nixl = load()
        self._failures = failures()
        self._any_failure: tuple[type[Exception], ...] = (NixlFailed, *self._failures)
        self._device = device
        self._kind = self._nixl.VRAM_SEG if device.type == "cuda" else self._nixl.DRAM_SEG
        self._lock = threading.RLock()  # reentrant, as a peer may be dropped by a garbage collection in here
        self._met: Counter[bytes] = Counter()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = answers
        config.useListenThread = False
        config.pthrDelay = ANSWER_POLL_US
        with self._calling("start UCX"):
            self._agent = self._nixl.nixlAgent(name, config)
            self._backend = self._agent.createBackend(BACKEND, {})

    def register(self, regions: Descriptors) -> None:
        """Register memory that must outlive the agent; regions must not overlap."""
        with self._calling("register memory"):
            self._agent.registerMem(self._nixl.nixlRegDList(self._kind, regions), [self._backend])

    def metadata(self) -> bytes:
        """Return how peers reach this agent and its registered memory."""
        with self._calling("describe this agent"):
            return bytes(self._agent.getLocalMD())

    def meet(self, metadata: bytes) -> bytes:
        """Connect to the agent that this is the metadata of, and return its name; `part` with it as often."""
        with self._calling("connect"):
            name = bytes(self._agent.loadRemoteMD(metadata))
            self._met[name] += 1
            return name

    def part(self, name: bytes) -> None:
        """Disconnect from a peer once all who met it have parted. Reads that were begun still go on."""
        with self._calling("disconnect"):
            self._met[name] -= 1
            if self._met[name] <= 0:
                del self._met[name]
                self._agent.invalidateRemoteMD(name)

    def read(self, peer: bytes, theirs: Descriptors, ours: Descriptors) -> Read:
        """Begin to read `theirs` into `ours`, row by row of the same size; over shared memory it ends in here."""
        lists = [self._nixl.nixlXferDList(self._kind, rows) for rows in (ours, theirs)]
        with self._calling("read"):
            handle = self._agent.createXferReq(self._nixl.NIXL_READ, *lists, peer, b"", [self._backend])
            try:
                return Read(self, handle, self._ended(self._agent.postXferReq(handle, b"")))
            except self._any_failure:
                self._agent.releaseXferReq(handle)
                raise

    def poll(self, handle: int) -> bool:
        """Return whether a read has ended; this also drives it. Raises NixlFailed if it ended with an error."""
        with self._calling("read"):
            return self._ended(self._agent.getXferStatus(handle))

    def release(self, handle: int) -> None:
        """Free what a read that has ended occupies."""
        with self._calling("release a read"):
            self._agent.releaseXferReq(handle)

    def _ended(self, status: Any) -> bool:
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise NixlFailed(f"NIXL could not read: {status}")
        return bool(status == self._nixl.NIXL_SUCCESS)

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        with self._lock:
            try:
                if self._device.type == "cuda":
                    with torch.cuda.device(self._device):  # UCX works in the calling thread's CUDA context
                        yield
                else:
                    yield
            except self._failures as error:
                raise NixlFailed(f"NIXL could not {what}: {error}") from error


class Read:
    """A read that was begun. Its methods must not run concurrently."""

    def __init__(self, agent: Agent, handle: int, ended: bool) -> None:
        self._agent = agent
        self._handle: int | None = handle
        if ended:
            self._release()

    def ended(self) -> bool:
        """Return whether nothing will be written any more. Raises NixlFailed, once, if it ended with an error."""
        if self._handle is None:
            return True
        try:
            if not self._agent.poll(self._handle):
                return False
        except NixlFailed:
            self._release()
            raise
        self._release()
        return True

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        assert handle is not None
        self._agent.release(handle)


def merged(regions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (address, bytes) of the same memory without overlaps, in ascending order.

    Neighbours that only touch stay apart: they may be different allocations, which UCX registers one by one.
    """
    joined: list[tuple[int, int]] = []
    for address, num_bytes in sorted(regions):
        if joined and address < sum(joined[-1]):
            start, known_bytes = joined[-1]
            joined[-1] = (start, max(known_bytes, address + num_bytes - start))
        else:
            joined.append((address, num_bytes))
    return joined
