"""How fast one hand-off moves between two processes on this host: `python -m kv_transfer.measure`.

A child process owns the source, this one the target; both through `TransferService`, as in production. Prints GB/s
beside memcpy, because a transfer can be no better than one copy of its bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection

import torch

from kv_transfer.handoff import KvHandoff, KvLayout, new_handoff_id
from kv_transfer.service import TransferService


def make_service(layers: int, blocks: int, block_bytes: int) -> TransferService:
    """A service over a cache of this shape, filled with noise."""
    layout = KvLayout(
        model="measure",
        dtype="bfloat16",
        kv_dtype="auto",
        block_size_tokens=32,
        num_layers=layers,
        block_bytes=block_bytes,
        layout="LBHNC",
        isa="measure",
        engine_version="0",
        tensor_parallel_size=1,
    )
    cache = {
        f"layer{index}": torch.randint(0, 255, (blocks, block_bytes), dtype=torch.uint8) for index in range(layers)
    }
    return TransferService(cache, layout, "127.0.0.1", 0)


def serve(pipe: Connection, shape: tuple[int, int, int], rounds: int, core: int | None) -> None:
    """The child: publish one hand-off for each round, keep serving until told to stop."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    service = make_service(*shape)
    service.start()
    layers, blocks, block_bytes = shape
    for index in range(rounds):
        handoff = KvHandoff(
            handoff_id=new_handoff_id(),
            address=service.address,
            block_ids=tuple(reversed(range(blocks))),
            num_tokens=blocks * 32,
            compatibility_hash="",
            lease_s=30.0,
            num_bytes=layers * blocks * block_bytes,
        )
        service.publish(f"request-{index}", handoff.handoff_id, handoff.block_ids, handoff.num_tokens)
        pipe.send(handoff.to_params())
    pipe.recv()
    service.close()


def fetch_once(service: TransferService, request_id: str, handoff: KvHandoff) -> float:
    """Seconds from asking to the completion that the engine's step loop sees."""
    started_s = time.perf_counter()
    service.start_fetch(request_id, handoff, 0, range(len(handoff.block_ids)))
    while True:
        service.wait(1.0)
        completed = service.poll()
        if request_id in completed.failed:
            raise RuntimeError(completed.receipts[request_id].message)
        if request_id in completed.received:
            return time.perf_counter() - started_s


def memcpy_gb_s(num_bytes: int) -> float:
    """One copy on this core."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    torch.set_num_threads(1)
    seconds = []
    for _ in range(9):
        started_s = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started_s)
    return num_bytes / statistics.median(seconds) / 1e9


def main() -> None:
    """Parse, run, print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=54)
    parser.add_argument("--block-bytes", type=int, default=24 << 10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pin", action="store_true", help="one core for each side, as in production")
    options = parser.parse_args()
    shape = (options.layers, options.blocks, options.block_bytes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs, shape, options.rounds, 1 if options.pin else None))
    child.start()
    if options.pin:
        os.sched_setaffinity(0, {0})
    service = make_service(*shape)
    service.start()
    handoffs = [KvHandoff.from_params(ours.recv()) for _ in range(options.rounds)]
    before_s = time.process_time()
    seconds = [fetch_once(service, f"request-{index}", handoff) for index, handoff in enumerate(handoffs)]
    cpu_s = (time.process_time() - before_s) / len(seconds)
    ours.send("stop")
    child.join()
    service.close()
    num_bytes = handoffs[0].num_bytes
    median_s = statistics.median(seconds)
    sys.stdout.write(
        f"{num_bytes / 1e6:.1f} MB per hand-off: "
        f"median {num_bytes / median_s / 1e9:.2f} GB/s ({median_s * 1e3:.1f} ms), "
        f"best {num_bytes / min(seconds) / 1e9:.2f} GB/s, first {seconds[0] * 1e3:.1f} ms, "
        f"fetcher CPU {cpu_s * 1e3:.1f} ms; memcpy {memcpy_gb_s(num_bytes):.1f} GB/s\n"
    )


if __name__ == "__main__":
    main()
