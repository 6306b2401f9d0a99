"""Measures how fast KV is encoded and decoded: GB of raw bytes per second of one core. No engine, a few seconds.

usage: python -m tools.bench.codec_speed
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from contracts.handoff import KvLayout
from kv_transfer.wire.codec import ELEMENT_TYPES, make_codec
from kv_transfer.wire.frames import TARGET_FRAME_BYTES

HEADS, HEAD_ELEMENTS = 3, 2 * 32 * 64
"""The heads of SmolLM2-135M in blocks of 32 tokens."""
ROUNDS = 51


def cpu_s(work: Callable[[], object]) -> float:
    """Return the median of this thread's own CPU time, on which other load has little influence."""
    work()
    seconds = []
    for _ in range(ROUNDS):
        began_s = time.thread_time()
        work()
        seconds.append(time.thread_time() - began_s)
    return statistics.median(seconds)


def measure(wire_dtype: str, kv_dtype: str) -> str:
    """Measure one codec on a frame of scattered blocks of noise; return the result as a line."""
    kind = ELEMENT_TYPES[kv_dtype]
    block_bytes = HEADS * HEAD_ELEMENTS * kind.num_bytes
    layout = KvLayout(
        model="measure",
        dtype=kv_dtype,
        kv_dtype=kv_dtype,
        block_size_tokens=32,
        num_layers=1,
        num_kv_heads=HEADS,
        block_bytes=block_bytes,
        layout="LBHNC",
        isa="measure",
        engine_version="0",
        tensor_parallel_size=1,
    )
    count = TARGET_FRAME_BYTES // block_bytes
    noise = torch.randn(4 * count, HEADS * HEAD_ELEMENTS).to(kind.torch_dtype).view(torch.uint8).numpy()
    blocks = [memoryview(noise[index]) for index in torch.randperm(4 * count)[:count].tolist()]
    codec = make_codec(wire_dtype, layout, block_bytes)
    payload = memoryview(b"".join(codec.encode(blocks)))
    gb = count * block_bytes / 1e9
    encode_s, decode_s = cpu_s(lambda: codec.encode(blocks)), cpu_s(lambda: codec.decode(payload, count))
    return (
        f"{wire_dtype:5s} {kv_dtype:9s} encode {gb / encode_s:5.2f} GB/s, decode {gb / decode_s:5.2f} GB/s, "
        f"{payload.nbytes / gb / 1e9:.3f} of the bytes"
    )


def main() -> None:
    """Measure all combinations."""
    for wire_dtype in ("int8", "fp8"):
        for kv_dtype in ELEMENT_TYPES:
            sys.stdout.write(measure(wire_dtype, kv_dtype) + "\n")


if __name__ == "__main__":
    main()
