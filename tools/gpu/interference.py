"""Decode steps beside transfers: a loop of the products of a decode step, alone and while blocks come and go.

A step is the weights of some layers of a Qwen3-8B against a batch, captured in a CUDA graph as an engine captures its
own. Rounds with and without transfers alternate, so that a clock that warms up counts on both sides.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from tools.gpu.blocks import SHAPES, CacheShape, make_layers, pool_of
from tools.gpu.machine import Machine
from tools.gpu.result import Row

SECTION = "decode steps beside transfers"
ROUNDS = 4
BATCH = 32


def check(machine: Machine) -> Iterator[Row]:
    """Measure the step alone, and beside one and four threads that send, receive, or copy on the device."""
    step = _decode_step(machine)
    num_blocks = machine.size(512, 16)
    shape = SHAPES[0]
    small = CacheShape(shape.name, 2, shape.heads, shape.tokens, shape.content, shape.dtype)
    pool = pool_of(make_layers(machine, small, num_blocks))
    count = machine.size(16, 2)
    payload = memoryview(bytearray(count * shape.block_bytes))
    alone = _round(machine, step)[0]
    yield Row(SECTION, f"step of {BATCH} sequences, alone", alone * 1e3, "ms")

    def copy_there_and_back(ids: list[int]) -> None:
        pool.scatter(range(1, 2), ids, pool.gather(range(1), ids))

    kinds: dict[str, Callable[[list[int]], object]] = {
        "blocks to the host": lambda ids: pool.read(0, ids),
        "blocks from the host": lambda ids: pool.write(1, ids, payload),
        "blocks copied on the device": copy_there_and_back,
    }
    for what, one in kinds.items():
        for threads in (1, 4):
            yield _compared(machine, step, f"{what}, {threads} thread{'s' if threads > 1 else ''}", one, threads, count)


def _compared(
    machine: Machine,
    step: Callable[[], object],
    what: str,
    one: Callable[[list[int]], object],
    threads: int,
    count: int,
) -> Row:
    quiet: list[float] = []
    beside: list[float] = []
    slowest: list[float] = []
    moved, taken_s = 0, 0.0
    for _ in range(machine.size(ROUNDS, 1)):
        quiet.append(_round(machine, step)[0])
        began_s = time.perf_counter()
        with _running(one, threads, count) as calls:
            median, worst = _round(machine, step)
        taken_s += time.perf_counter() - began_s
        moved += sum(calls)
        beside.append(median)
        slowest.append(worst)
    before, after = statistics.median(quiet), statistics.median(beside)
    rate = moved * count * SHAPES[0].block_bytes / taken_s
    note = (
        f"{100 * (after / before - 1):+.1f} % of {before * 1e3:.3g} ms alone; slowest {max(slowest) * 1e3:.3g} ms; "
        f"{rate / 1e9:.2f} GB/s moved"
    )
    return Row(SECTION, what, after * 1e3, "ms a step", note)


@contextmanager
def _running(one: Callable[[list[int]], object], threads: int, count: int) -> Iterator[list[int]]:
    """Call it again and again in threads of their own; yields how often each has, complete at the end."""
    stop = threading.Event()
    calls = [0] * threads

    def work(index: int) -> None:
        ids = list(range(index * count, (index + 1) * count))
        while not stop.is_set():
            one(ids)
            calls[index] += 1

    with ExitStack() as ended:
        running = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(threads)]
        for thread in running:
            thread.start()
            ended.callback(thread.join)
        ended.callback(stop.set)
        yield calls


def _round(machine: Machine, step: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the slowest of many steps, each waited for as an engine waits for its tokens."""
    taken = []
    for _ in range(machine.size(200, 4)):
        began_s = time.perf_counter()
        step()
        machine.synchronize_step()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken), max(taken)


def _decode_step(machine: Machine) -> Callable[[], object]:
    hidden, mlp, layers = machine.size(4096, 64), machine.size(12288, 128), machine.size(8, 1)
    dtype = torch.bfloat16
    sizes = [(hidden, hidden + hidden // 2), (hidden, hidden), (hidden, 2 * mlp), (mlp, hidden)] * layers
    weights = [torch.randn(*size, device=machine.device).to(dtype) for size in sizes]
    inputs = {width: torch.randn(BATCH, width, device=machine.device).to(dtype) for width in (hidden, mlp)}

    def products() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[0]], weight)

    if machine.dry:
        return products
    for _ in range(3):
        products()
    machine.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return graph.replay
