"""A core belongs to one worker of its node, until the last of its processes has ended."""

import subprocess
import sys

import pytest

from cluster.node_cores import CoresTaken, hold_cores, taken_cores, this_machine

CORES = (9001, 9002, 9003)
"""No machine has them, so nobody else holds them."""


def test_cores_that_nobody_holds_are_free():
    assert taken_cores(CORES) == frozenset()


def test_held_cores_are_taken_until_they_are_let_go():
    with hold_cores(CORES[:2]):
        assert taken_cores(CORES) == set(CORES[:2])
    assert taken_cores(CORES) == frozenset()


def test_one_core_that_is_taken_refuses_all_and_keeps_none_of_them():
    with hold_cores(CORES[1:2]):
        with pytest.raises(CoresTaken, match=r"core 9002 of .* belongs to another worker now"):
            hold_cores(CORES)
        assert taken_cores(CORES) == {CORES[1]}


def test_a_killed_process_holds_nothing():
    code = f"from cluster.node_cores import hold_cores; held = hold_cores({CORES}); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    assert taken_cores(CORES) == set(CORES)
    process.kill()
    process.communicate()
    assert taken_cores(CORES) == frozenset()


def test_all_processes_of_a_machine_give_it_the_same_name():
    code = "from cluster.node_cores import this_machine; print(this_machine())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == f"{this_machine()}\n"
