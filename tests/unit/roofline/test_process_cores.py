"""How many cores a container's CPU quota leaves: groups of both versions, also where they are nested."""

import math
import os

import pytest

from ridgeline.roofline import process_cores
from ridgeline.roofline.process_cores import cpu_quota, usable_cores

IN_A_POD = "0::/kubepods/pod1/one\n"
V1 = "4:memory:/elsewhere\n1:cpu,cpuacct:/docker/one\n0::/\n"


@pytest.mark.parametrize(
    ("mine", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {}, math.inf),
        (IN_A_POD, {"kubepods/pod1/one/cpu.max": "max 100000", "kubepods/pod1/cpu.max": "300000 100000"}, 3),
        (IN_A_POD, {"cpu.max": "150000 100000"}, 1.5),  # a container that sees the machine's names and its own files
        (V1, {"cpu/docker/one/cpu.cfs_quota_us": "200000", "cpu/docker/one/cpu.cfs_period_us": "100000"}, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        (V1, {"cpu/elsewhere/cpu.cfs_quota_us": "1000", "cpu/elsewhere/cpu.cfs_period_us": "100000"}, math.inf),
        (V1, {"cpu/cpu.cfs_quota_us": "no number"}, math.inf),
    ],
)
def test_the_least_quota_of_all_groups_of_the_process_counts(mine, files, quota, tmp_path):
    (tmp_path / "mine").write_text(mine)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert cpu_quota(tmp_path / "groups", tmp_path / "mine") == quota


def test_without_groups_there_is_no_quota(tmp_path):
    assert cpu_quota(tmp_path, tmp_path / "none") == math.inf


@pytest.mark.parametrize(("quota", "usable"), [(math.inf, [1, 2, 4]), (2.5, [1, 2]), (0.5, []), (8.0, [1, 2, 4])])
def test_cores_are_those_of_the_affinity_and_as_many_as_are_paid_for_whole(quota, usable, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 1, 2})
    monkeypatch.setattr(process_cores, "cpu_quota", lambda: quota)
    assert usable_cores() == usable
