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
from kv_transfer.service import TransferOptions, TransferService
from kv_transfer.shared_pool import KvCacheAllocation
from kv_transfer.transports import TRANSPORT_NAMES, TransportName


def make_service(layers: int, blocks: int, block_bytes: int, transport: TransportName) -> TransferService:
    """A service over a cache of this shape, filled with noise."""
    layout = KvLayout(
        model="measure",
        dtype="bfloat16",
        kv_dtype="auto",
        block_size_tokens=32,
        num_layers=layers,
        num_kv_heads=1,
        block_bytes=block_bytes,
        layout="LBHNC",
        isa="measure",
        engine_version="0",
        tensor_parallel_size=1,
    )
    allocation = KvCacheAllocation()
    with allocation.serving_torch_zeros():
        buffer = torch.zeros(layers * blocks * block_bytes, dtype=torch.int8, device="cpu")
    tensors = buffer.view(torch.uint8).view(layers, blocks, block_bytes)
    tensors.random_(0, 255)
    cache = {f"layer{index}": layer for index, layer in enumerate(tensors)}
    shared = allocation.offer(list(tensors))
    return TransferService(cache, layout, TransferOptions(host="127.0.0.1", transport=transport), shared)


def serve(
    pipe: Connection, shape: tuple[int, int, int], rounds: int, core: int | None, transport: TransportName
) -> None:
    """The child: publish one hand-off for each round, keep serving until told to stop."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    service = make_service(*shape, transport)
    service.start()
    layers, blocks, block_bytes = shape
    for index in range(rounds):
        handoff = KvHandoff(
            handoff_id=new_handoff_id(),
            addresses=(service.address,),
            num_blocks=blocks,
            num_tokens=blocks * 32,
            compatibility_hash="",
            lease_s=30.0,
            num_bytes=layers * blocks * block_bytes,
        )
        service.publish(f"request-{index}", handoff.handoff_id, list(reversed(range(blocks))), handoff.num_tokens)
        pipe.send(handoff.to_params())
    pipe.recv()
    service.close()


def fetch_once(service: TransferService, request_id: str, handoff: KvHandoff) -> float:
    """Seconds from asking to the completion that the engine's step loop sees."""
    started_s = time.perf_counter()
    service.start_fetch(request_id, handoff, 0, range(handoff.num_blocks))
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
    parser.add_argument("--transport", default="auto", choices=TRANSPORT_NAMES)
    options = parser.parse_args()
    transport: TransportName = options.transport
    shape = (options.layers, options.blocks, options.block_bytes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(
        daemon=True, target=serve, args=(theirs, shape, options.rounds, 1 if options.pin else None, transport)
    )
    child.start()
    if options.pin:
        os.sched_setaffinity(0, {0})
    service = make_service(*shape, transport)
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
        f"{transport}: {num_bytes / 1e6:.1f} MB per hand-off: "
        f"median {num_bytes / median_s / 1e9:.2f} GB/s ({median_s * 1e3:.1f} ms), "
        f"best {num_bytes / min(seconds) / 1e9:.2f} GB/s, first {seconds[0] * 1e3:.1f} ms, "
        f"fetcher CPU {cpu_s * 1e3:.1f} ms; memcpy {memcpy_gb_s(num_bytes):.1f} GB/s\n"
    )


if __name__ == "__main__":
    main()
