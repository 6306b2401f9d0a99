"""The block pool on a real GPU: are the bytes right, and how fast do they move? Needs torch and numpy, no engine.

Run from the repository root on a machine with CUDA: `python -m tests.gpu.check_block_pool`. Exits 0 if all is right, 1
if not, 77 if there is no CUDA device, in which case nothing was checked.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from ridgeline.kv_transfer.memory.device import pool_of

LAYERS, BLOCKS, HEADS, TOKENS, CHANNELS = 16, 512, 8, 16, 256
BLOCK_BYTES = HEADS * TOKENS * CHANNELS * 2
LAYOUTS = {
    "LBHNC": ((LAYERS, BLOCKS, HEADS, TOKENS, CHANNELS), (0, 1, 2, 3, 4)),
    "LBNHC": ((LAYERS, BLOCKS, TOKENS, HEADS, CHANNELS), (0, 1, 3, 2, 4)),
    "BLHNC": ((BLOCKS, LAYERS, HEADS, TOKENS, CHANNELS), (1, 0, 2, 3, 4)),
}
"""Shape of the storage, and the permutation that makes each layer [blocks, heads, tokens, channels]."""
FRAME_SIZES = (2 << 20, 16 << 20)
"""What transports read and write at a time, and what would be better for the bus alone."""
NO_CUDA = 77


def make_cache(order: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A cache of arbitrary bits, NaNs among them: the storage as int16 [layer, block, words], and the bf16 layers."""
    shape, permutation = LAYOUTS[order]
    storage = torch.randint(-(1 << 15), 1 << 15, (prod(shape),), dtype=torch.int16, device="cuda").view(shape)
    layers = list(storage.view(torch.bfloat16).permute(permutation))
    by_layer = storage if order != "BLHNC" else storage.transpose(0, 1)
    torch.cuda.synchronize()  # the pool waits for no kernel: in an engine, the sampled token on the host is the proof
    return by_layer.flatten(2), layers


def some_blocks(count: int) -> list[int]:
    """Distinct, scattered, in no order."""
    return torch.randperm(BLOCKS)[:count].tolist()


def payload_of(words: torch.Tensor) -> bytes:
    """The bytes of some blocks, by another way than the pool's."""
    return words.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def check_bytes(order: str) -> None:
    """What is read is there; what is written arrives, and nothing else changes."""
    words, layers = make_cache(order)
    expected = words.clone()
    torch.cuda.synchronize()
    pool = pool_of(layers)
    assert (pool.num_layers, pool.num_blocks, pool.block_bytes) == (LAYERS, BLOCKS, BLOCK_BYTES)
    for layer in range(LAYERS):
        for count in (1, 2, 37, 300, 5):
            source, target = some_blocks(count), some_blocks(count)
            payload = b"".join(pool.read(layer, source))
            assert payload == payload_of(expected[layer, source]), f"{order}: layer {layer} reads {count} blocks wrong"
            pool.write(layer, target, memoryview(payload))
            expected[layer, target] = expected[layer, source]
    assert torch.equal(words, expected), f"{order}: the cache is not what was written"


def check_threads(order: str, threads: int = 8) -> None:
    """Threads that copy disjoint blocks at once, while the engine's stream is busy, do not disturb each other."""
    words, layers = make_cache(order)
    expected = words.clone()
    pool = pool_of(layers)
    shares = torch.randperm(BLOCKS).view(threads, 2, -1).tolist()
    busy = torch.randn(8192, 8192, device="cuda")

    def copy(share: list[list[int]]) -> None:
        source, target = share
        for layer in range(LAYERS):
            pool.write(layer, target, memoryview(b"".join(pool.read(layer, source))))

    torch.cuda.synchronize()
    for _ in range(50):
        busy = busy @ busy
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(copy, shares))
    for source, target in shares:
        expected[:, target] = expected[:, source]
    assert torch.equal(words, expected), f"{order}: threads disturbed each other"


def check_inference_mode() -> None:
    """A cache that the engine allocated in inference mode is written from threads that are not in it."""
    with torch.inference_mode():
        words, layers = make_cache("LBHNC")
        pool = pool_of(layers)
    payload = payload_of(words[0, [3]])
    with ThreadPoolExecutor(1) as executor:
        executor.submit(pool.write, 0, [7], memoryview(payload)).result()
    assert payload_of(words[0, [7]]) == payload


def gb_s(work: Callable[[], object], num_bytes: int) -> float:
    """The median of 30 runs, after 5 to warm up."""
    seconds = []
    for _ in range(35):
        started_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_s)
    return num_bytes / statistics.median(seconds[5:]) / 1e9


def bus_gb_s(num_bytes: int) -> tuple[float, float]:
    """One plain copy of page-locked memory from the GPU and to it: no pool can be faster."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return gb_s(lambda: copy(host, device), num_bytes), gb_s(lambda: copy(device, host), num_bytes)


def report(order: str, frame_bytes: int) -> None:
    """GB/s of one thread, the copies on the host included."""
    pool = pool_of(make_cache(order)[1])
    block_ids = some_blocks(frame_bytes // BLOCK_BYTES)
    payload = memoryview(b"".join(pool.read(0, block_ids)))
    read = gb_s(lambda: pool.read(0, block_ids), frame_bytes)
    write = gb_s(lambda: pool.write(0, block_ids, payload), frame_bytes)
    from_gpu, to_gpu = bus_gb_s(frame_bytes)
    sys.stdout.write(
        f"{order}, {frame_bytes >> 20:2} MiB in blocks of {BLOCK_BYTES >> 10} KiB: "
        f"read {read:5.1f} GB/s (bus {from_gpu:5.1f}), write {write:5.1f} GB/s (bus {to_gpu:5.1f})\n"
    )


def main() -> int:
    """Check all layouts, then measure them."""
    if not torch.cuda.is_available():
        sys.stderr.write("SKIPPED: no CUDA device, so NOTHING was checked of the block pool on GPUs\n")
        return NO_CUDA
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    for order in LAYOUTS:
        check_bytes(order)
        check_threads(order)
        sys.stdout.write(f"{order}: bytes are right, with one thread and with eight\n")
    check_inference_mode()
    for order in LAYOUTS:
        for frame_bytes in FRAME_SIZES:
            report(order, frame_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
