"""Two processes on one device: the second opens the first one's cache and copies blocks out of it, as `cuda-ipc` does.

The export, its checks and the copy are the product's own. In a dry run there is nothing to export.
"""

from __future__ import annotations

import gc
import queue
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import torch
from torch import multiprocessing

from ridgeline.kv_transfer.memory.ipc import IpcOffer, OpenedPool, export
from tools.gpu.blocks import pool_of
from tools.gpu.machine import Machine, wall_seconds
from tools.gpu.result import Row

SECTION = "CUDA IPC between two processes"
ANSWER_S = 120.0
ROW_BYTES = 8 * 32 * 256 * 2
"""One layer of a block of a Llama-3.1-8B."""


def check(machine: Machine, copy_bytes_per_s: float) -> Iterator[Row]:
    """Check that the other process gets these bits and no others, and how fast."""
    if machine.dry:
        yield Row(SECTION, "not without a GPU")
        return
    layers, num_blocks = 32, 256
    cache = machine.noise(layers, num_blocks, ROW_BYTES)
    machine.synchronize()
    exported = export(list(cache))
    scattered = torch.randperm(num_blocks)[: num_blocks // 2].tolist()
    adjacent = list(range(num_blocks // 2))
    spawn = multiprocessing.get_context("spawn")
    questions: Any = spawn.Queue()
    answers: Any = spawn.Queue()
    other = spawn.Process(target=_other_process, args=(questions, answers, machine), daemon=True)
    other.start()
    try:
        questions.put((msgspec.msgpack.encode(exported.offer), scattered, adjacent))
        answer = _answer(answers, other)
    finally:
        questions.put(None)  # until then the other has our memory open, which must outlive that
        other.join(10)
        if other.is_alive():
            other.kill()
    if isinstance(answer, str):
        yield Row(SECTION, "the other process", note=answer, ok=False)
        return
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    copied, seconds = answer
    size = layers * len(scattered) * ROW_BYTES
    right = all(torch.equal(one, cache[:, scattered].cpu()) for one in copied)
    yield Row(SECTION, "the opened blocks are these, bit for bit", ok=right,
              note=f"{size / 2**20:.0f} MiB in {layers} layers of {len(scattered)} blocks")  # fmt: skip
    for what, taken_s in seconds.items():
        rate = size / taken_s
        yield Row(SECTION, what, rate / 1e9, "GB/s",
                  f"{100 * 2 * rate / copy_bytes_per_s:.0f} % of the device's copies")  # fmt: skip


def _answer(answers: Any, other: Any) -> Any:
    """Return what the other process says, or a sentence if it ends or takes too long without saying anything."""
    give_up_s = time.monotonic() + ANSWER_S
    while time.monotonic() < give_up_s:
        try:
            return answers.get(timeout=1.0)
        except queue.Empty:
            if not other.is_alive():
                return f"it ended with status {other.exitcode} and without an answer"
    return f"no answer within {ANSWER_S:.0f} s"


def _copy(pool: Any, opened: Any, ids: list[int], targets: list[int]) -> None:
    sum(pool.copies_from(opened, ids, targets))


def _other_process(questions: Any, answers: Any, machine: Machine) -> None:
    """Open the cache, copy blocks into a cache of our own on the same device, answer with what is there then."""
    try:
        offer, scattered, adjacent = questions.get()
        opened = OpenedPool(msgspec.msgpack.decode(offer, type=IpcOffer), machine.device).pool
        shape = (opened.num_layers, opened.num_blocks, opened.block_bytes)
        own = torch.zeros(shape, dtype=torch.uint8, device=machine.device)
        machine.synchronize()
        targets = list(reversed(scattered))
        seconds, copied = {}, []
        for way, may_use_kernel in (("", True), (", torch", False)):
            pool = pool_of(own, may_use_kernel=may_use_kernel)
            for what, ids in (("adjacent", adjacent), ("scattered", scattered)):
                one = partial(_copy, pool, opened, ids, targets)
                seconds[f"{what} blocks into the own cache{way}"] = wall_seconds(machine, one)
            copied.append(own[:, targets].cpu())
            own.zero_()
            machine.synchronize()
        # Closed before the first process frees it: else torch warns, and has aborted at that process's end.
        del opened, pool, one
        gc.collect()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        answers.put((torch.stack(copied), seconds))
        questions.get()
    except Exception as error:  # noqa: BLE001  whatever it is, the first process reports it
        answers.put(f"{type(error).__name__}: {error}")
        questions.get()
