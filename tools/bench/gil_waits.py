"""Measures for how long transfers keep an engine's thread from Python's interpreter lock, at both ends.

An engine's step is thousands of calls that give the lock up and take it again, and each may have to wait for a thread
that moves KV. A probe does the same in the process that fetches and in the one that is fetched from: it sleeps for
`PAUSE_S`, which gives the lock up. What it comes back later than that, less what it waited for its core, is its wait
for the lock, with what the kernel's timer adds (see the figures without transfers). `--lanes` hand-offs are on their
way all the time, and each end has one core, as engines have.

usage: python -m tools.bench.gil_waits [--transports grpc shm] [--lanes 24] [--seconds 10] [--blocks 8]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
from contextlib import closing
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Final, TextIO

from contracts.handoff import KvHandoff
from kv_transfer.bench.source_process import Cache, CacheShape, offer
from kv_transfer.names import TransportName
from kv_transfer.service import TransferService

PAUSE_S: Final = 0.0002
LAYERS: Final = 30
BLOCK_BYTES: Final = 24 << 10
START_S: Final = 120.0
DEADLINE_S: Final = 30.0


class Probe:
    """A thread that gives the interpreter lock up and takes it again, all the time, while the block runs."""

    def __init__(self) -> None:
        self.waits_ms: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe")

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat", encoding="ascii") as schedstat:
            while not self._stopped.is_set():
                queued_s, began_s = _queued_s(schedstat), time.perf_counter()
                time.sleep(PAUSE_S)
                late_s = time.perf_counter() - began_s - PAUSE_S
                self.waits_ms.append(1e3 * max(0.0, late_s - (_queued_s(schedstat) - queued_s)))


def _queued_s(schedstat: TextIO) -> float:
    """Return the seconds that the thread has waited for a core so far."""
    schedstat.seek(0)
    return int(schedstat.read().split()[1]) / 1e9


def told(waits_ms: list[float]) -> str:
    """Return a probe's figures."""
    ordered = sorted(waits_ms)
    at = {name: ordered[int(part * len(ordered))] for name, part in (("p99", 0.99), ("p99.9", 0.999))}
    percentiles = ", ".join(f"{name} {value:.2f}" for name, value in at.items())
    over = sum(wait > 1.0 for wait in ordered)
    return (
        f"p50 {statistics.median(ordered):.2f}, {percentiles}, longest {ordered[-1]:.2f} ms, "
        f"{over} of {len(ordered)} above 1 ms"
    )


def _shape(lanes: int, blocks: int) -> CacheShape:
    return CacheShape(LAYERS, lanes * blocks, BLOCK_BYTES)


def _source(pipe: Connection, transport: TransportName, lanes: int, blocks: int, core: int) -> None:
    """Publish a hand-off for each lane number that comes, until there comes none; then send the probe's waits."""
    os.sched_setaffinity(0, {core})
    shape = _shape(lanes, blocks)
    with closing(Cache(shape, 1).service(transport)) as service:
        service.start()
        pipe.send(service.address)
        with Probe() as probe:
            for number in count():
                while not pipe.poll():
                    service.wait(0.001)
                    service.poll()
                if (lane := pipe.recv()) is None:
                    break
                pipe.send(offer(service, f"r{number}", _blocks_of(lane, blocks), shape).to_params())
        pipe.send(probe.waits_ms)


def _blocks_of(lane: int, blocks: int) -> list[int]:
    return list(range(lane * blocks, (lane + 1) * blocks))


def measure(transport: TransportName, lanes: int, seconds: float, blocks: int, cores: list[int]) -> None:
    """Print the figures of both ends, first without and then with hand-offs."""
    context = multiprocessing.get_context("spawn")
    pipe, childs_end = context.Pipe()
    child = context.Process(target=_source, args=(childs_end, transport, max(1, lanes), blocks, cores[0]), daemon=True)
    child.start()
    os.sched_setaffinity(0, {cores[1]})
    if not pipe.poll(START_S):
        raise SystemExit(f"the source did not start within {START_S:.0f} s")
    address = pipe.recv()
    with closing(Cache(_shape(max(1, lanes), blocks)).service(transport)) as service:
        service.start()
        refused = service.pair([address]).result(DEADLINE_S)[address]
        if isinstance(refused, str):
            raise SystemExit(f"{transport} does not work here: {refused}")
        with Probe() as probe:
            moved_bytes = _fetch(service, pipe, lanes, seconds, blocks)
        pipe.send(None)
        source_ms: Any = pipe.recv()
    child.join(DEADLINE_S)
    what = f"{transport}, {lanes} lanes, {moved_bytes / 1e9 / seconds:.2f} GB/s" if lanes else f"{transport}, nothing"
    sys.stdout.write(f"{what}: fetching end {told(probe.waits_ms)}\n{what}: source {told(source_ms)}\n")
    sys.stdout.flush()


def _fetch(service: TransferService, pipe: Connection, lanes: int, seconds: float, blocks: int) -> int:
    """Keep a hand-off on its way in each lane; return the bytes that came."""
    until_s, moved_bytes, numbers = time.monotonic() + seconds, 0, count()
    lane_of: dict[str, int] = {}

    def start(lane: int) -> None:
        pipe.send(lane)
        request_id = f"r{next(numbers)}"
        lane_of[request_id] = lane
        service.start_fetch(request_id, KvHandoff.from_params(pipe.recv()), 0, _blocks_of(lane, blocks))

    for lane in range(lanes):
        start(lane)
    while time.monotonic() < until_s or lane_of:
        service.wait(0.05)
        for request_id, receipt in service.poll().receipts.items():
            if receipt.outcome != "ok":
                raise SystemExit(f"a hand-off failed: {receipt.message}")
            moved_bytes += receipt.num_bytes
            lane = lane_of.pop(request_id)
            if time.monotonic() < until_s:
                start(lane)
        if time.monotonic() > until_s + DEADLINE_S:
            raise SystemExit("hand-offs did not end")
    return moved_bytes


def main() -> None:
    """Measure each transport, without hand-offs and with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--transports", nargs="+", choices=("grpc", "shm", "collective", "nixl"), default=["grpc", "shm"]
    )
    parser.add_argument("--lanes", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--blocks", type=int, default=8, help="of a hand-off, 24 KiB in each of 30 layers")
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores, one for each end")
    for transport in asked.transports:
        for lanes in (0, asked.lanes):
            measure(transport, lanes, asked.seconds, asked.blocks, cores)


if __name__ == "__main__":
    main()
