"""Process groups of one rank: one device, so one thread that wakes, and all collectives work as before."""

import subprocess
import sys

MANY_GROUPS = """
import os, sys

import torch
from torch import distributed

if sys.argv[1] == "shared":
    from engine.vllm_workarounds.gloo_device import share_gloo_device

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


def test_the_process_groups_of_a_lone_rank_share_one_device():
    assert threads("as torch does") - threads("shared") == 4, "one device for five groups; else torch does so by itself"
