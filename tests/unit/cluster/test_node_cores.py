"""A core belongs to one worker of its node, until the last of its processes has ended."""

import asyncio
import subprocess
import sys

import pytest

from ridgeline.cluster.node_cores import CoresTaken, hold_cores, hold_cores_soon, taken_cores, this_machine

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
        with pytest.raises(CoresTaken, match=r"core 9002 of .* belongs to another worker: "):
            hold_cores(CORES)
        assert taken_cores(CORES) == {CORES[1]}


def test_a_killed_process_holds_nothing():
    code = (
        f"from ridgeline.cluster.node_cores import hold_cores; held = hold_cores({CORES}); print(flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    assert taken_cores(CORES) == set(CORES)
    process.kill()
    process.communicate()
    assert taken_cores(CORES) == frozenset()


def test_all_processes_of_a_machine_give_it_the_same_name():
    code = "from ridgeline.cluster.node_cores import this_machine; print(this_machine())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == f"{this_machine()}\n"


async def test_cores_that_come_free_soon_are_waited_for():
    with hold_cores(CORES[1:2]):
        asking = asyncio.create_task(hold_cores_soon(CORES))
        await asyncio.sleep(0)
        assert not asking.done()
    with await asking:
        assert taken_cores(CORES) == set(CORES)


async def test_cores_that_stay_taken_are_told_with_who_may_have_them():
    with hold_cores(CORES[1:2]), pytest.raises(CoresTaken, match=r"\(`ridgeline status` shows them\)"):
        await hold_cores_soon(CORES, within_s=0.0)


def test_to_look_which_cores_are_taken_takes_none(monkeypatch):
    def hold(core):
        raise AssertionError("a worker that begins now would find it taken")

    monkeypatch.setattr("ridgeline.cluster.node_cores._hold", hold)
    assert taken_cores(CORES) == frozenset()
