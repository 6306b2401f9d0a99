"""A KV cache in a GPU's memory that other processes of this host can open: CUDA IPC.

The source exports the allocations in which its layers lie (`IpcExport`), and a peer opens them on its own GPU
(`OpenedPool`), which then reads them over NVLink or PCIe as if they were its own. Torch carries the handles, with the
functions that its own sharing of tensors uses. Three things differ from memory of the host:

- `CUDA_VISIBLE_DEVICES` gives each process other numbers for the same GPUs, so a GPU is named by its UUID, and memory
  is opened on the peer's own device, whether or not it sees the other GPU.
- A handle cannot be opened in the process that made it. There, the pool itself is what is opened.
- A driver may say that two GPUs reach each other where what is read is wrong (an IOMMU in between). So a few random
  bytes are exported beside the cache, and opening fails unless these are what the peer reads.

Memory of a virtual address range (expandable segments) or of another allocator may have no handle; `export` says so.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Final
from weakref import WeakValueDictionary

import msgspec
import torch

from ridgeline.contracts import errors
from ridgeline.kv_transfer.memory.blocks import CannotOpen, byte_rows
from ridgeline.kv_transfer.memory.device import DeviceMemory
from ridgeline.kv_transfer.memory.shared import host_identity, require_inside, require_same_host

PROOF_BYTES: Final = 64


class CannotExport(Exception):
    """No other process can open this cache; the message says why."""


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation of torch on a GPU, as `UntypedStorage._share_cuda_` describes it."""

    num_bytes: int
    handle: bytes
    offset_bytes: int
    """Where it begins in what the handle opens."""
    counter_handle: bytes
    counter_offset: int


class IpcOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pool lies, described so that another process can check each claim before it uses it."""

    host: str
    """Boot id and process namespace, see `shared.host_identity`."""
    pid: int
    device: str
    """The GPU's UUID."""
    regions: tuple[Region, ...]
    layers: tuple[tuple[int, int], ...]
    """For each layer, the index of its region and the offset of its first block in it, in bytes."""
    num_blocks: int
    block_bytes: int
    block_stride_bytes: int
    proof: bytes
    """What the region `proof_region` holds."""
    proof_region: Region


class IpcExport:
    """This process's pool, which others can open while this object lives."""

    def __init__(self, offer: IpcOffer, layers: Sequence[torch.Tensor], keeps: object) -> None:
        """Called by `export`; `keeps` is what the offer's handles live as long as."""
        self.offer = offer
        self.layers = tuple(layers)
        """The layers, as uint8 [num_blocks, block_bytes]."""
        self._keeps = keeps
        _exports[offer.proof] = self


_exports: Final[WeakValueDictionary[bytes, IpcExport]] = WeakValueDictionary()
"""What this process has exported, by the proof, of which there is one each."""


def export(layers: Sequence[torch.Tensor]) -> IpcExport:
    """Export layers on one CUDA device. Raises CannotExport, or ValueError if they are not layers of blocks."""
    rows = [byte_rows(index, layer) for index, layer in enumerate(layers)]
    _require_one_gpu(rows)
    device, strides, shapes = rows[0].device, {row.stride(0) for row in rows}, {tuple(row.shape) for row in rows}
    if len(strides) != 1 or len(shapes) != 1:
        raise CannotExport("its layers are laid out in different ways")
    (stride,), ((num_blocks, block_bytes),) = strides, shapes
    storages = {row.untyped_storage().data_ptr(): row.untyped_storage() for row in rows}
    numbers = {address: number for number, address in enumerate(storages)}
    secret = secrets.token_bytes(PROOF_BYTES)
    proof = torch.tensor(list(secret), dtype=torch.uint8, device=device)  # returns when it is there
    try:
        shared = [*map(_alias, storages.values()), proof.untyped_storage()]
        *regions, proof_region = map(_share, shared)
    except RuntimeError as error:
        raise CannotExport(_why_not_exported(errors.first_line(error))) from error
    offer = IpcOffer(
        host=host_identity(),
        pid=os.getpid(),
        device=gpu_uuid(device),
        regions=tuple(regions),
        layers=tuple((numbers[row.untyped_storage().data_ptr()], int(row.storage_offset())) for row in rows),
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        block_stride_bytes=stride,
        proof=secret,
        proof_region=proof_region,
    )
    return IpcExport(offer, rows, (proof, shared))


class OpenedPool:
    """Another process's KV cache, which this process's device can read. Nothing is ever written to it."""

    def __init__(self, offer: IpcOffer, device: torch.device) -> None:
        """Open the pool on `device`, that of our own. Raises CannotOpen."""
        self.pid = offer.pid
        """The process whose pool it is."""
        require_same_host(offer.host)
        if not all(0 <= region < len(offer.regions) for region, _ in offer.layers):
            raise CannotOpen("its description names memory that it does not offer")
        require_inside(
            offer.num_blocks,
            offer.block_bytes,
            offer.block_stride_bytes,
            [(offset, offer.regions[region].num_bytes) for region, offset in offer.layers],
        )
        require_access(offer.device, device)
        if offer.pid == os.getpid():
            self.pool = _own_pool(offer)
            return
        proof = _open(offer.proof_region, device)
        if bytes(DeviceMemory([proof[None]]).read(0, [0])[0]) != offer.proof:
            raise CannotOpen("what is read of its memory is not what is there: is there an IOMMU between the GPUs?")
        memory = [_open(region, device) for region in offer.regions]
        shape, strides = (offer.num_blocks, offer.block_bytes), (offer.block_stride_bytes, 1)
        self.pool = DeviceMemory([memory[region].as_strided(shape, strides, offset) for region, offset in offer.layers])


def require_access(theirs: str, ours: torch.device) -> None:
    """Raise CannotOpen if memory of the device `theirs` cannot be read on `ours`, as far as the driver tells us.

    Of a GPU that this process does not see, only opening its memory tells.
    """
    if ours.type != "cuda":
        raise CannotOpen("one of the KV caches is on a GPU and the other is not")
    for index in range(torch.cuda.device_count()):
        if gpu_uuid(torch.device("cuda", index)) == theirs != gpu_uuid(ours):
            if not torch.cuda.can_device_access_peer(ours, index):
                raise CannotOpen("the two GPUs cannot read each other's memory (nvidia-smi topo -p2p r)")
            return


def gpu_uuid(device: torch.device) -> str:
    """Return the name of a GPU that is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _why_not_exported(words: str) -> str:
    """Return what torch or CUDA says against an export as a sentence that names what to look at."""
    if "shm" in words or "shared memory" in words or "No space left" in words:
        fix = "torch needs a page of /dev/shm for it; is that full, or missing in this container?"
    else:
        fix = "does PYTORCH_CUDA_ALLOC_CONF ask for expandable segments, or is it a part of a GPU (MIG)?"
    return f"CUDA does not export its KV cache ({words}): {fix}"


def _require_one_gpu(rows: Sequence[torch.Tensor]) -> None:
    if {row.device.type for row in rows} != {"cuda"} or len({row.device for row in rows}) != 1:
        raise CannotExport("its KV cache is not on one GPU")


class _Alias:
    """Another storage of the same memory, of which nothing but the share is kept."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage  # whoever has the alias reads it
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def _alias(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return what to share in a storage's stead: torch ties the share to the life of what it is asked for.

    The engine may keep its cache to the last moment, and torch would warn. If this fails, the storage does it.
    """
    try:
        alias = torch.as_tensor(_Alias(storage), device=storage.device).untyped_storage()
    except (RuntimeError, TypeError, ValueError):
        return storage
    return alias if alias.data_ptr() == storage.data_ptr() else storage


def _share(storage: torch.UntypedStorage) -> Region:
    """Describe memory to other processes, for as long as this storage lives.

    Torch counts one receiver of each share, and keeps the memory for it until it has come and gone. Here any number
    may come, or none, and they leave before the memory goes (see `fetch.ipc_puller`): so the count is taken back at
    once, without which torch would warn at the end.
    """
    _, handle, num_bytes, offset, counter, counter_offset, _, _ = storage._share_cuda_()  # type: ignore[no-untyped-call]
    torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)
    return Region(
        num_bytes=num_bytes,
        handle=handle,
        offset_bytes=offset,
        counter_handle=counter,
        counter_offset=counter_offset,
    )


def _open(region: Region, device: torch.device) -> torch.Tensor:
    """Return the region's bytes as uint8 [num_bytes] on `device`."""
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index,
            region.handle,
            region.num_bytes,
            region.offset_bytes,
            region.counter_handle,
            region.counter_offset,
            b"",
            False,  # there is no event to wait for, which torch would leave open: what is read is announced first
        )
    except RuntimeError as error:
        raise CannotOpen(f"CUDA does not open its KV cache here ({errors.first_line(error)})") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _own_pool(offer: IpcOffer) -> DeviceMemory:
    ours = _exports.get(offer.proof)
    if ours is None:
        raise CannotOpen("it is of this process, and no longer exported")
    return DeviceMemory(ours.layers)
