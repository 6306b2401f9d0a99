"""A process that computes asks the kernel for the CPU's matrix tiles first."""

import platform

from ridgeline.cluster.doctor.facts import read_cpu_flags
from ridgeline.engine.vllm_workarounds.engine_process import ask_for_tiles


def test_the_kernel_is_asked_as_its_documentation_says():
    asked = []

    def syscall(*numbers):
        asked.append(numbers)
        return 0

    assert ask_for_tiles("x86_64", syscall)
    assert asked == [(158, 0x1023, 18)]


def test_a_refusal_is_told_and_no_other_machine_is_asked():
    assert not ask_for_tiles("x86_64", lambda *_: -1)
    assert not ask_for_tiles("aarch64", lambda *_: 1 / 0)


def test_this_machine_allows_tiles_if_it_has_them():
    assert ask_for_tiles() == (platform.machine() == "x86_64" and "amx_tile" in read_cpu_flags())
