"""Process groups of one rank: one device, so one thread that wakes, and all collectives work as before."""

import ctypes
import subprocess
import sys
import threading

import pytest
from torch.distributed import ProcessGroupGloo

from ridgeline.engine.vllm_workarounds import gloo_device
from ridgeline.engine.vllm_workarounds.gloo_device import LATE_BY_NS, PR_GET_TIMERSLACK

MANY_GROUPS = """
import os, sys

import torch
from torch import distributed

if sys.argv[1] == "shared":
    from ridgeline.engine.vllm_workarounds.gloo_device import share_gloo_device

    share_gloo_device()
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
groups = [distributed.new_group([0], backend="gloo") for _ in range(4)]
tensor, gathered, objects = torch.ones(3), [torch.zeros(3)], [None]
distributed.all_reduce(tensor, group=groups[0])
distributed.broadcast(tensor, 0, group=groups[1])
distributed.all_gather(gathered, tensor, group=groups[2])
distributed.all_gather_object(objects, "word", group=groups[3])
distributed.monitored_barrier(group=groups[0])
assert gathered[0].tolist() == [1.0, 1.0, 1.0] and objects == ["word"]
print(len(os.listdir("/proc/self/task")))
os._exit(0)
"""


def threads(how: str) -> int:
    """All of the process: a thread exists when its group is made, and has gloo's name only once it has run."""
    ended = subprocess.run([sys.executable, "-c", MANY_GROUPS, how], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


@pytest.mark.slow
def test_the_process_groups_of_a_lone_rank_share_one_device():
    assert threads("as torch does") - threads("shared") == 4, "one device for five groups; else torch does so by itself"


def slack_ns():
    return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)


@pytest.fixture
def device_thread(monkeypatch):
    """Stand for gloo: a device starts a thread, which notes how late it may wake."""
    found = []

    def create():
        thread = threading.Thread(target=lambda: found.append(slack_ns()))
        thread.start()
        thread.join()

    monkeypatch.setattr(ProcessGroupGloo, "create_default_device", create)
    return found


def test_the_thread_of_the_device_may_wake_late_and_the_one_that_made_it_may_not(device_thread):
    before = slack_ns()
    gloo_device._device.__wrapped__()
    assert device_thread == [LATE_BY_NS]
    assert slack_ns() == before < LATE_BY_NS
