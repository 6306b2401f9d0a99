"""Two processes on one device: the second maps the first one's cache by its IPC handle and copies blocks out of it.

This is what a CUDA-IPC transport would do between a prefill and a decode worker of one host. Torch's own sharing of
tensors carries the handle; in a dry run the same code shares host memory.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import multiprocessing

from kv_transfer.memory.device import gather_rows, scatter_rows
from tools.gpu.machine import Machine
from tools.gpu.result import Row

SECTION = "CUDA IPC between two processes"
ANSWER_S = 120.0
ROW_BYTES = 8 * 32 * 256 * 2
"""One layer of a block of a Llama-3.1-8B."""


def check(machine: Machine, copy_bytes_per_s: float) -> Iterator[Row]:
    """Check that the other process gets these bits and no others, and how fast."""
    layers, num_blocks = machine.size(32, 2), machine.size(256, 16)
    cache = machine.noise(layers * num_blocks, ROW_BYTES)
    blocks = torch.randperm(num_blocks)[: num_blocks // 2]
    machine.synchronize()
    spawn = multiprocessing.get_context("spawn")
    questions: Any = spawn.Queue()
    answers: Any = spawn.Queue()
    rows = torch.cat([layer * num_blocks + blocks for layer in range(layers)])
    wanted = cache[rows.to(machine.device)].cpu()
    other = spawn.Process(target=_other_process, args=(questions, answers, machine.dry), daemon=True)
    other.start()
    try:
        questions.put((cache, rows.tolist()))
        answer = _answer(answers, other)
    finally:
        questions.put(None)  # until then the other keeps its mapping: our memory must outlive that
        other.join(10)
        if other.is_alive():
            other.kill()
    if isinstance(answer, str):
        yield Row(SECTION, "the other process", note=answer, ok=False)
        return
    copied, seconds = answer
    size = rows.numel() * ROW_BYTES
    yield Row(SECTION, "the mapped blocks are these, bit for bit", ok=torch.equal(copied, wanted),
              note=f"{size / 2**20:.0f} MiB in {rows.numel()} rows of {ROW_BYTES >> 10} KiB")  # fmt: skip
    rate = size / seconds
    yield Row(SECTION, "gather from the mapping, scatter into the own cache", rate / 1e9, "GB/s",
              f"{100 * 4 * rate / copy_bytes_per_s:.0f} % of the device's copies")  # fmt: skip


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


def _other_process(questions: Any, answers: Any, dry: bool) -> None:
    """Map the cache, copy the rows into a cache of our own on the same device, answer with what is there then."""
    try:
        cache, rows = questions.get()
        machine = Machine(cache.device, dry)
        own = torch.zeros_like(cache)
        indices = torch.tensor(rows, device=cache.device)
        staged = torch.empty(len(rows), cache.shape[1], dtype=torch.uint8, device=cache.device)

        def hand_off() -> None:
            gather_rows(cache, indices, staged)
            scatter_rows(own, indices, staged)

        seconds = machine.seconds(hand_off)
        machine.synchronize()
        answers.put((own[indices].cpu(), seconds))
        questions.get()
    except Exception as error:  # noqa: BLE001  whatever it is, the first process reports it
        answers.put(f"{type(error).__name__}: {error}")
        questions.get()
