"""A pair group: two ranks of torch.distributed, the source (0) and the fetcher (1), that move bytes between them.

It is built directly from a store, not by `init_process_group`: the engine has already initialised this process's
default group, and there may be one pair group for each peer. The backend follows the memory: `nccl` for a CUDA pool,
`gloo` for host memory. `_Gloo` and `_Nccl` contain everything that differs between them.

Gloo has run, between threads and between processes of one host. NCCL has not: `_Nccl` was written against its
documentation and never executed, and neither were CUDA tensors on this path.

A group that failed or was abandoned during a transfer cannot be used again, because nothing in it says which bytes
come next. It is dropped, and the next fetch forms another one.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed

from ridgeline.contracts import errors
from ridgeline.contracts.rpc.address import join_host_port
from ridgeline.kv_transfer.memory.device import TRANSFER_PRIORITY

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

SOURCE_RANK: Final = 0
FETCHER_RANK: Final = 1
FORM_S: Final = 5.0
"""How long each end waits for the other when a group is formed."""

_WATCHDOG_S: Final = 3600.0
"""Longer than any fetch: NCCL's own timeout ends the whole process, while ours ends one fetch."""
_DATA_TAG: Final = 0
_NEVER_SENT_TAG: Final = 1
_POLL_S: Final = 50e-6
_BACKLOG: Final = 64
_ASYNC_ERRORS: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_construct: Final = threading.Lock()
_c10d: Final[Any] = distributed  # its exports depend on the build, and its type hints do not say so


def backend_for(device: torch.device) -> str | None:
    """Return the backend that moves tensors of this device; None if this build of torch has none."""
    if not distributed.is_available():
        return None
    if device.type == "cuda":
        return "nccl" if distributed.is_nccl_available() else None
    return "gloo" if distributed.is_gloo_available() else None


def host_store(host: str) -> TCPStore:
    """Open the store where the two ends of each of a source's groups meet, on a free port of this interface only.

    Raises OSError if `host` is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return _store(host, port, is_master=True, master_listen_fd=listener.detach())


def join_store(host: str, port: int) -> TCPStore:
    """Connect to another source's store. Raises TransferFailed if it cannot be reached."""
    try:
        return _store(host, port, is_master=False)
    except RuntimeError as error:
        raise errors.TransferFailed(
            errors.UNREACHABLE, f"the store at {join_host_port(host, port)}: {errors.first_line(error)}"
        ) from error


def _store(host: str, port: int, **options: Any) -> TCPStore:
    store: TCPStore = _c10d.TCPStore(host, port, timeout=timedelta(seconds=FORM_S), wait_for_workers=False, **options)
    return store


class PairGroup:
    """One end of a pair. It runs one transfer at a time; `break_off` may be called from any other thread."""

    def __init__(self, end: _Gloo | _Nccl, peer: str) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._end: _Gloo | _Nccl | None = end

    @classmethod
    def form(cls, rank: int, key: str, store: Store, host: str, device: torch.device, peer: str) -> PairGroup:
        """Meet the other end under `key`; blocks up to a few times FORM_S. `peer` is used in messages only.

        `host` is this machine's address to use. Raises TransferFailed if the other end did not come.
        """
        store = _c10d.PrefixStore(key, store)
        try:
            end: _Gloo | _Nccl = _Nccl(store, rank, device) if device.type == "cuda" else _Gloo(store, rank, host)
        except RuntimeError as error:
            sentence = f"no pair group with {peer}: {errors.first_line(error)}"
            raise errors.TransferFailed(errors.UNREACHABLE, sentence) from error
        group = cls(end, peer)
        try:
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            byte.tolist()  # on a GPU, wait until this memory is free of earlier work: the group's stream does not
            group._greet(rank, byte, time.monotonic() + FORM_S)
        except errors.TransferFailed:
            group.break_off()
            raise
        return group

    @property
    def broken(self) -> bool:
        """Whether this end is closed, by a failure or by `break_off`."""
        return self._end is None

    def send(self, tensor: torch.Tensor, deadline_s: float) -> None:
        """Send a contiguous tensor, and return when it has left, which takes until the other end receives it.

        Raises TransferFailed, after which the group is broken. `deadline_s` is on time.monotonic's scale.
        """
        with self._failures(deadline_s) as end:
            end.wait(end.post_send(tensor), deadline_s)

    def receive(self, tensor: torch.Tensor, deadline_s: float) -> None:
        """Fill a contiguous tensor with the next one sent; raises like `send`."""
        with self._failures(deadline_s) as end:
            end.wait(end.post_receive(tensor), deadline_s)

    def break_off(self) -> None:
        """Close this end, from any thread. Calls that wait in it, here or at the peer, raise TransferFailed.

        Calling it again does nothing.
        """
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end.close()

    def _greet(self, rank: int, byte: torch.Tensor, deadline_s: float) -> None:
        """Send one byte each way: both ends are there, and a backend that connects on first use has connected."""
        if rank == SOURCE_RANK:
            self.send(byte, deadline_s)
            self.receive(byte, deadline_s)
        else:
            self.receive(byte, deadline_s)
            self.send(byte, deadline_s)

    @contextmanager
    def _failures(self, deadline_s: float) -> Iterator[_Gloo | _Nccl]:
        if (end := self._end) is None:
            raise errors.TransferFailed(errors.UNREACHABLE, f"the pair group with {self._peer} was broken off")
        try:
            yield end
        except RuntimeError as error:  # torch raises nothing more specific: its subclasses carry no more information
            reason = errors.TIMEOUT if time.monotonic() >= deadline_s else errors.UNREACHABLE
            self.break_off()
            raise errors.TransferFailed(reason, f"{self._peer}: {errors.first_line(error)}") from error


class _Gloo:
    """Sockets between host memories. A send ends only when the other side receives, which is the back-pressure.

    After any RuntimeError the group cannot be used any more.
    """

    def __init__(self, store: Store, rank: int, host: str) -> None:
        backend = _c10d.ProcessGroupGloo
        options = backend._Options()
        options._devices = [backend.create_device(hostname=host)]
        options._threads = 1
        options._timeout = timedelta(seconds=FORM_S)
        self._group = backend(store, rank, 2, options)
        self._peer = 1 - rank

    def post_send(self, tensor: torch.Tensor) -> Any:
        return self._group.send([tensor], self._peer, _DATA_TAG)

    def post_receive(self, tensor: torch.Tensor) -> Any:
        return self._group.recv([tensor], self._peer, _DATA_TAG)

    def wait(self, work: Any, deadline_s: float) -> None:
        # Torch truncates the timeout to whole milliseconds, and a wait must not end before its time is up.
        left_ms = math.ceil(1e3 * (deadline_s - time.monotonic()))
        work.wait(timedelta(milliseconds=max(1, left_ms)))

    def close(self) -> None:
        """Close the connection by letting a wait time out: Gloo's own `abort` leaves waiting threads waiting."""
        nothing = torch.empty(1, dtype=torch.uint8)
        with suppress(RuntimeError):
            self._group.recv([nothing], self._peer, _NEVER_SENT_TAG).wait(timedelta(milliseconds=1))


class _Nccl:
    """The same for GPUs, on a separate stream, so that the engine's stream never waits for a peer.

    Never executed: see above.
    """

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        backend = _c10d.ProcessGroupNCCL
        options = backend.Options()
        options._timeout = timedelta(seconds=_WATCHDOG_S)
        options.is_high_priority_stream = True  # of another pool than the engine's streams: see memory/device.py
        with _errors_are_ours():
            self._group = backend(store, rank, 2, options)
        self._peer = 1 - rank
        self._stream = torch.cuda.Stream(device, priority=TRANSFER_PRIORITY)  # type: ignore[no-untyped-call]

    def post_send(self, tensor: torch.Tensor) -> Any:
        with torch.cuda.stream(self._stream):
            return self._group.send([tensor], self._peer, _DATA_TAG)

    def post_receive(self, tensor: torch.Tensor) -> Any:
        with torch.cuda.stream(self._stream):
            return self._group.recv([tensor], self._peer, _DATA_TAG)

    def wait(self, work: Any, deadline_s: float) -> None:
        """Poll rather than synchronise, so that a peer that never comes ends in a timeout."""
        with torch.cuda.stream(self._stream):
            work.wait()  # makes the stream wait, not this thread
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= deadline_s:
                raise RuntimeError("the other end did not take part in time")
            time.sleep(_POLL_S)
        if work.exception() is not None:  # an aborted kernel ends as well, without having moved anything
            raise RuntimeError("the transfer was aborted")

    def close(self) -> None:
        with suppress(RuntimeError):
            self._group.abort()


@contextmanager
def _errors_are_ours() -> Iterator[None]:
    """Disable NCCL's reaction to a dead peer, read when a group is made: by default it ends this process."""
    with _construct:
        before = os.environ.get(_ASYNC_ERRORS)
        os.environ[_ASYNC_ERRORS] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ASYNC_ERRORS]
            else:
                os.environ[_ASYNC_ERRORS] = before
