"""Measures how fast gRPC's Python streams can move a hand-off at most, whatever a transport does with its bytes.

Two processes, one core each, and 39.8 MB, as in `ridgeline bench transfer`. `bare` yields the same message again and
again and drops what comes: what is left is gRPC itself and the kernel. `copied` makes each message from memory and
writes it to its place, which is the least that a KV transport must do; `checked` computes the checksums of
`kv_transfer.wire.frames` as well. Sizes of messages, numbers of channels and kinds alternate round by round.

usage: python -m tools.bench.grpc_ceiling [--rounds 20] [--message-kib 1296 8192 32768] [--channels 1 2]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Final

import grpc
import numpy as np
import xxhash

from kv_transfer.memory.glibc import keep_freed_memory
from kv_transfer.wire import grpc_methods

HANDOFF_BYTES: Final = 54 * 30 * (24 << 10)
MOST_MESSAGE_BYTES: Final = 256 << 20
KINDS: Final = ("bare", "copied", "checked")
METHOD: Final = "/ceiling/stream"


class _Source:
    """Streams a share of a hand-off. A request names the kind, the first byte, the number of bytes and of a message."""

    def __init__(self) -> None:
        self._memory = np.random.default_rng(0).integers(0, 255, HANDOFF_BYTES, dtype=np.uint8)
        self._made: dict[int, bytes] = {}

    def stream(self, request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the messages."""
        kind, first, num_bytes, message_bytes = request.decode().split()
        begin, end, step = int(first), int(first) + int(num_bytes), int(message_bytes)
        for at in range(begin, end, step):
            size = min(step, end - at)
            if kind == "bare":
                if size not in self._made:
                    self._made[size] = self._memory[:size].tobytes()
                yield self._made[size]
                continue
            blocks = memoryview(self._memory[at : at + size])
            digest = xxhash.xxh3_64(blocks).digest() if kind == "checked" else bytes(8)
            yield b"".join((digest, blocks))


def _serve(pipe: Connection, core: int) -> None:
    os.sched_setaffinity(0, {core})
    keep_freed_memory()
    handler = grpc.unary_stream_rpc_method_handler(_Source().stream)
    server = grpc.server(ThreadPoolExecutor(8), options=grpc_methods.server_options(MOST_MESSAGE_BYTES))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ceiling", {"stream": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    while pipe.poll(600) and pipe.recv():
        pipe.send(time.process_time())
    server.stop(None)


class _Reader:
    def __init__(self, port: int, most_channels: int) -> None:
        keep_freed_memory()
        options = grpc_methods.channel_options(MOST_MESSAGE_BYTES)
        self._target = np.zeros(HANDOFF_BYTES, dtype=np.uint8)
        self._channels = [
            # Without an option of its own each, they would share one connection.
            grpc.insecure_channel(f"127.0.0.1:{port}", options=[*options, ("grpc.use_local_subchannel_pool", 1)])
            for _ in range(most_channels)
        ]
        for channel in self._channels:
            grpc.channel_ready_future(channel).result(30)

    def read(self, kind: str, message_bytes: int, channels: int) -> float:
        """Return the seconds of one hand-off over so many channels at the same time."""
        share = HANDOFF_BYTES // channels
        threads = [
            threading.Thread(target=self._share, args=(number, kind, number * share, share, message_bytes))
            for number in range(channels)
        ]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began_s

    def _share(self, number: int, kind: str, first: int, num_bytes: int, message_bytes: int) -> None:
        call: Any = self._channels[number].unary_stream(METHOD)
        at = first
        for message in call(f"{kind} {first} {num_bytes} {message_bytes}".encode(), timeout=30):
            if kind == "bare":
                at += len(message)
                continue
            payload = memoryview(message)[8:]
            if kind == "checked" and xxhash.xxh3_64(payload).digest() != message[:8]:
                raise SystemExit("a message is not what was sent")
            self._target[at : at + len(payload)] = np.frombuffer(payload, dtype=np.uint8)
            at += len(payload)
        if at != first + num_bytes:
            raise SystemExit(f"{at - first} of {num_bytes} bytes came")


def main() -> None:
    """Print GB/s at the median and CPU seconds per GB of each combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--message-kib", type=int, nargs="+", default=[1296, 8192, 32768])
    parser.add_argument("--channels", type=int, nargs="+", default=[1, 2])
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores, one for each side")
    context = multiprocessing.get_context("spawn")
    pipe, childs_end = context.Pipe()
    child = context.Process(target=_serve, args=(childs_end, cores[0]), daemon=True)
    child.start()
    os.sched_setaffinity(0, {cores[1]})
    if not pipe.poll(60):
        raise SystemExit("the source process did not start within 60 s")
    reader = _Reader(pipe.recv(), max(asked.channels))
    turns = [(kind, kib, channels) for kind in KINDS for kib in asked.message_kib for channels in asked.channels]
    took_s: dict[tuple[str, int, int], list[float]] = {turn: [] for turn in turns}
    cpu_s: dict[tuple[str, int, int], list[float]] = {turn: [] for turn in turns}
    for number in range(-1, asked.rounds):
        for turn in turns if number % 2 else reversed(turns):
            pipe.send(True)
            used_s = pipe.recv() + time.process_time()
            seconds = reader.read(turn[0], turn[1] << 10, turn[2])
            pipe.send(True)
            used_s = pipe.recv() + time.process_time() - used_s
            if number >= 0:
                took_s[turn].append(seconds)
                cpu_s[turn].append(used_s)
    pipe.send(False)
    child.join(10)
    for kind, kib, channels in turns:
        seconds = statistics.median(took_s[kind, kib, channels])
        used_s = statistics.mean(cpu_s[kind, kib, channels])
        print(  # noqa: T201
            f"{kind}, messages of {kib} KiB, {channels} channels: {HANDOFF_BYTES / 1e9 / seconds:.2f} GB/s, "
            f"{used_s / HANDOFF_BYTES * 1e9:.2f} CPU s/GB"
        )


if __name__ == "__main__":
    main()
