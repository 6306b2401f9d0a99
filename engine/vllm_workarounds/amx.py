"""Asks the kernel for the CPU's matrix tiles (AMX) before a process computes.

Linux lets a process use tiles only once it has asked; without that their first use is SIGILL, which ends the engine at
its first step in bfloat16. vLLM's kernels use them unasked. oneDNN asks, when something of it happens to run first.
Called at the start of each process of an engine by `ridgeline.engine.vllm_workarounds.engine_process`.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

SYS_ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18
"""Of arch_prctl(2) on x86-64; the same three numbers are in the kernel's documentation, arch/x86/xstate.rst."""


def ask_for_tiles(machine: str | None = None, syscall: Callable[[int, int, int], int] | None = None) -> bool:
    """Ask; returns whether this process may use tiles from now on. Without AMX the kernel refuses, and nothing changes.

    Its threads and what it forks may then use them too; a program that it starts asks anew.
    """
    if (machine or platform.machine()) != "x86_64":
        return False
    ask = syscall or ctypes.CDLL(None).syscall
    return ask(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
