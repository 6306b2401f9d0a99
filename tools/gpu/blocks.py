"""Blocks of real caches, gathered and scattered by the product's own code: every bit, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ridgeline.kv_transfer.memory import rows
from ridgeline.kv_transfer.memory.blocks import BlockPool, byte_rows
from ridgeline.kv_transfer.memory.device import DeviceMemory
from tools.gpu.machine import Machine, wall_seconds
from tools.gpu.result import Row

SECTION = "blocks, bit for bit"
SPEED = "GB/s of blocks"


@dataclass(frozen=True)
class CacheShape:
    """A cache as vLLM lays it out on a GPU for one rank: layers x blocks x heads x tokens x content (LBHNC)."""

    name: str
    layers: int
    heads: int
    tokens: int
    content: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.heads * self.tokens * self.content * torch.empty(0, dtype=self.dtype).element_size()


SHAPES = (
    CacheShape("Llama-3.1-8B, bfloat16, blocks of 32", 32, 8, 32, 256, torch.bfloat16),
    CacheShape("Llama-3.1-70B, bfloat16, 1 of 8 ranks", 80, 1, 32, 256, torch.bfloat16),
    CacheShape("Qwen3-8B, fp8", 36, 8, 32, 256, torch.float8_e4m3fn),
    CacheShape("gpt-oss-120b, bfloat16, heads of 64", 36, 8, 16, 128, torch.bfloat16),
    CacheShape("DeepSeek-V3 (MLA), bfloat16, blocks of 64", 61, 1, 64, 576, torch.bfloat16),
    CacheShape("DeepSeek-V3 (MLA), fp8 with scales", 61, 1, 64, 656, torch.uint8),
    CacheShape("odd size: rows that are no words of 8 bytes", 3, 1, 5, 3, torch.bfloat16),
)


def make_layers(machine: Machine, shape: CacheShape, num_blocks: int) -> list[torch.Tensor]:
    """Return a cache's layers with any bits, as views of one storage."""
    cache = machine.noise(shape.layers, num_blocks, shape.heads, shape.tokens, shape.content, dtype=shape.dtype)
    machine.synchronize()  # the pool waits for no kernel of others: in an engine, a token on the host is the proof
    return list(cache)


def pool_of(layers: Iterable[torch.Tensor], *, may_use_kernel: bool = True) -> BlockPool:
    """Return the pool for a GPU's memory, in a dry run too."""
    made = [byte_rows(index, layer) for index, layer in enumerate(layers)]
    return DeviceMemory(made, may_use_kernel=may_use_kernel)


def check(machine: Machine) -> Iterator[Row]:
    """Check each shape: what is read is there, what is written arrives, and nothing else changes."""
    found = rows.kernel_for(machine.device, rows.WIDEST_BYTES) is not None
    yield Row(SECTION, "blocks are copied by", note="one Triton kernel" if found else "torch.index_select, index_copy_",
              ok=None if machine.dry else found)  # fmt: skip
    for shape in SHAPES:
        layers, blocks = machine.size(shape.layers, 2), machine.size(64, 8)
        small = CacheShape(shape.name, layers, shape.heads, shape.tokens, shape.content, shape.dtype)
        wrong = problems(machine, small, blocks)
        yield Row(SECTION, shape.name, note="; ".join(wrong) or f"{layers} layers, {shape.block_bytes} B a block",
                  ok=not wrong)  # fmt: skip


def problems(machine: Machine, shape: CacheShape, num_blocks: int) -> list[str]:
    """Return what is wrong with reads, writes, gathers, scatters and parts of blocks; by other means than theirs."""
    source, target = (make_layers(machine, shape, num_blocks) for _ in range(2))
    before = [_bytes(layer) for layer in target]
    ids = torch.randperm(num_blocks)[: num_blocks // 2].tolist()
    places = torch.randperm(num_blocks)[: num_blocks // 2].tolist()
    from_pool, to_pool = pool_of(source), pool_of(target)
    found = []
    for layer, tensor in enumerate(source):
        wanted = _bytes(tensor)[ids]
        if b"".join(from_pool.read(layer, ids)) != wanted.numpy().tobytes():
            found.append(f"read of layer {layer}")
        only = range(layer, layer + 1)
        gathered = from_pool.gather(only, ids)
        if not torch.equal(gathered.cpu()[0], wanted):
            found.append(f"gather of layer {layer}")
        if layer % 2:
            to_pool.scatter(only, places, gathered)
        else:
            to_pool.write(layer, places, memoryview(wanted.numpy().tobytes()))
        expected = before[layer].clone()
        expected[places] = wanted
        if not torch.equal(_bytes(target[layer]), expected):
            found.append(f"write of layer {layer}")
    every = from_pool.gather(from_pool.layers, ids)
    if not torch.equal(every.cpu(), torch.stack([_bytes(tensor)[ids] for tensor in source])):
        found.append("gather of all layers")
    to_pool.scatter(to_pool.layers, ids, every)
    if any(not torch.equal(_bytes(there)[ids], _bytes(here)[ids]) for here, there in zip(source, target, strict=True)):
        found.append("write of all layers")
    if shape.block_bytes % 2 == 0:
        half = shape.block_bytes // 2
        read = b"".join(from_pool.part(half, half).read(0, ids))
        if read != _bytes(source[0])[ids][:, half:].contiguous().numpy().tobytes():
            found.append("the second half of each block, as for one of two ranks")
    return found


def _bytes(layer: torch.Tensor) -> torch.Tensor:
    """Return a layer's blocks as bytes on the host, without the pool's code."""
    return layer.cpu().contiguous().view(torch.uint8).reshape(layer.shape[0], -1)


def speeds(machine: Machine, copy_bytes_per_s: float) -> Iterator[Row]:
    """Measure blocks of a Llama-3.1-8B in one copy of each size, against the device's own copies."""
    shape = SHAPES[0]
    num_blocks = machine.size(512, 16)
    layers = make_layers(machine, CacheShape(shape.name, 2, shape.heads, shape.tokens, shape.content, shape.dtype),
                         num_blocks)  # fmt: skip
    for count in (16, 128) if not machine.dry else (4,):  # 2 MiB, as a frame has today, and 16 MiB
        ids = torch.randperm(num_blocks)[:count].tolist()
        yield from _speeds_of(machine, layers, ids, copy_bytes_per_s)


def _speeds_of(machine: Machine, layers: list[torch.Tensor], ids: list[int], copy_bytes_per_s: float) -> Iterator[Row]:
    """Measure with the kernel, and with torch's functions, which serve where it cannot."""
    for way, may_use_kernel in (("", True), (", torch", False)):
        pool = pool_of(layers, may_use_kernel=may_use_kernel)
        size = len(ids) * pool.block_bytes
        payload = memoryview(bytearray(size))
        staged = pool.gather(range(1), ids)
        work: dict[str, Callable[[], object]] = {
            "to the host (what gRPC sends)": lambda pool=pool: pool.read(0, ids),  # type: ignore[misc]
            "from the host (what gRPC gets)": lambda pool=pool, from_=payload: pool.write(0, ids, from_),  # type: ignore[misc]
            "gathered on the device": lambda pool=pool: pool.gather(range(1), ids),  # type: ignore[misc]
            "scattered on the device": lambda pool=pool, from_=staged: pool.scatter(range(1, 2), ids, from_),  # type: ignore[misc]
        }
        for what, one in work.items():
            taken_s = wall_seconds(machine, one, rounds=50)
            note = f"{taken_s * 1e6:.0f} us"
            if "device" in what:
                note += f", {100 * 2 * size / taken_s / copy_bytes_per_s:.0f} % of the device's copies"
            yield Row(SPEED, f"{size / 2**20:.3g} MiB {what}{way}", size / taken_s / 1e9, "GB/s", note)
