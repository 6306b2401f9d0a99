"""A KV cache that other processes of this host can map: anonymous, opened through /proc, freed with its owner.

An engine on CPUs allocates its cache here (`serving_torch_zeros`) and offers it (`offer`); the decode engine that
fetches from it maps it read-only (`MappedPool`). It is a memfd: unlike a file in /dev/shm it leaves nothing behind
however the process ends, and does not count against the size of /dev/shm, which is 64 MiB in a container by default. A
peer opens it by process id and descriptor, which the kernel allows only to the same user in the same process namespace.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ridgeline.kv_transfer.memory.blocks import CannotOpen, byte_rows
from ridgeline.kv_transfer.memory.host import HostMemory

SMALLEST_BYTES: Final = 1 << 20
"""Smallest allocation that `serving_torch_zeros` serves; smaller tensors are not the cache."""


class SharedOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pool lies, described so that another process can check each claim before it uses it."""

    host: str
    """Boot id and process namespace; equal only for processes that see each other's process ids."""
    pid: int
    descriptor: int
    inode: int
    num_bytes: int
    num_blocks: int
    block_bytes: int
    block_stride_bytes: int
    layer_offsets_bytes: tuple[int, ...]


class SharedMemory:
    """One region of memory that this process owns and others may map."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("ridgeline-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, num_bytes)
        # If a peer could shrink the file we would fault, so forbid that to everybody, including ourselves.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.descriptor, num_bytes)
        with suppress(OSError):  # the kernel has no huge pages for shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.int8)
        """The region as int8 [num_bytes], initially zero; it keeps the mapping alive."""


class KvCacheAllocation:
    """Allocates one KV cache in shared memory and remembers where it is."""

    def __init__(self) -> None:
        self.memory: SharedMemory | None = None

    @contextmanager
    def serving_torch_zeros(self) -> Iterator[None]:
        """Serve the first large `torch.zeros(int8, cpu)` from shared memory while this is active.

        This is how vLLM allocates the one buffer behind all layers. If it allocates in another way, nothing is shared
        and `offer` returns None.
        """
        with _SharedZeros(self):
            yield

    def offer(self, layers: Sequence[torch.Tensor]) -> SharedOffer | None:
        """Describe how to map these layers; None if they do not all lie in the shared memory."""
        if self.memory is None:
            return None
        base = self.memory.tensor.data_ptr()
        rows = [byte_rows(index, layer) for index, layer in enumerate(layers)]
        offsets = tuple(row.data_ptr() - base for row in rows)
        strides, shapes = {row.stride(0) for row in rows}, {tuple(row.shape) for row in rows}
        if len(strides) != 1 or len(shapes) != 1:
            return None
        (stride,), ((num_blocks, block_bytes),) = strides, shapes
        span = stride * (num_blocks - 1) + block_bytes
        if not all(0 <= offset <= self.memory.num_bytes - span for offset in offsets):
            return None
        return SharedOffer(
            host=host_identity(),
            pid=os.getpid(),
            descriptor=self.memory.descriptor,
            inode=os.fstat(self.memory.descriptor).st_ino,
            num_bytes=self.memory.num_bytes,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            block_stride_bytes=stride,
            layer_offsets_bytes=offsets,
        )


class _SharedZeros(TorchFunctionMode):
    def __init__(self, allocation: KvCacheAllocation) -> None:
        super().__init__()
        self._allocation = allocation

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and self._allocation.memory is None and _is_cache(args, kwargs):
            self._allocation.memory = SharedMemory(int(args[0]))
            return self._allocation.memory.tensor
        return func(*args, **kwargs)


def _is_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (
        len(args) == 1
        and isinstance(args[0], int)
        and args[0] >= SMALLEST_BYTES
        and kwargs.get("dtype") is torch.int8
        and torch.device(kwargs.get("device") or "cpu").type == "cpu"
    )


def host_identity() -> str:
    """Return a value that is equal for two processes exactly if a process id means the same to both."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"


class MappedPool:
    """Another process's KV cache, read-only in this one."""

    def __init__(self, offer: SharedOffer) -> None:
        """Map the pool. Raises CannotOpen.

        Every page is entered into our page table now, so that no transfer pays for that.
        """
        require_same_host(offer.host)
        require_inside(
            offer.num_blocks,
            offer.block_bytes,
            offer.block_stride_bytes,
            [(offset, offer.num_bytes) for offset in offer.layer_offsets_bytes],
        )
        self._map = map_memory(offer.pid, offer.descriptor, offer.inode, offer.num_bytes)
        self.pool = HostMemory([self._rows(offer, offset) for offset in offer.layer_offsets_bytes])

    def _rows(self, offer: SharedOffer, offset: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.ndarray(
            (offer.num_blocks, offer.block_bytes),
            dtype=np.uint8,
            buffer=self._map,
            offset=offset,
            strides=(offer.block_stride_bytes, 1),
        )


def require_same_host(host: str) -> None:
    """Raise CannotOpen unless a process that calls itself by this `host_identity` can be looked into from here."""
    if host != host_identity():
        raise CannotOpen("it is on another host, or in another container")


def map_memory(pid: int, descriptor: int, inode: int, num_bytes: int) -> mmap.mmap:
    """Map another process's `SharedMemory` read-only, with all its pages. Raises CannotOpen."""
    name = f"/proc/{pid}/fd/{descriptor}"
    try:
        opened = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CannotOpen(f"{name} cannot be opened ({error.strerror}): does it run as another user?") from error
    try:
        found = os.fstat(opened)
        if (found.st_ino, found.st_size) != (inode, num_bytes):
            raise CannotOpen(f"{name} is not the memory that was offered")
        return mmap.mmap(opened, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    except OSError as error:
        raise CannotOpen(f"{name} cannot be mapped ({error.strerror}): see `ulimit -v`") from error
    finally:
        os.close(opened)


def require_inside(num_blocks: int, block_bytes: int, stride_bytes: int, layers: Sequence[tuple[int, int]]) -> None:
    """Raise CannotOpen for numbers that would make us read outside what is opened.

    `layers` are (offset of the first block, bytes of the memory that it is in).
    """
    span = stride_bytes * (num_blocks - 1) + block_bytes
    if min(num_blocks, block_bytes, len(layers)) <= 0 or stride_bytes < block_bytes:
        raise CannotOpen("its description is not of a KV cache")
    if not all(0 <= offset <= num_bytes - span for offset, num_bytes in layers):
        raise CannotOpen("its description goes beyond its memory")
