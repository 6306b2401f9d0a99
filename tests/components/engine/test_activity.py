"""An engine that computes, one that waits for its turn on a core, and one that does nothing, as real processes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from ridgeline.engine.stall import Activity, glance
from tests.support.patience import PATIENCE_S

COMPUTES = "print(1, flush=True)\nwhile True: pass"
SLEEPS = "import time; print(1, flush=True); time.sleep(600)"
SLEEPS_BESIDE_A_THREAD = (
    "import threading, time\ndef compute():\n    while True: pass\n"
    "threading.Thread(target=compute, daemon=True).start(); print(1, flush=True); time.sleep(600)"
)


@contextmanager
def running(code):
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def doing(*pids, computes_here=True, looks=4):
    """What they did in each of some looks after the first one."""
    activity = Activity(computes_here=computes_here, processes=lambda: pids)
    activity.doing()
    found = []
    for _ in range(looks):
        time.sleep(0.1)
        found.append(activity.doing())
    return found


@pytest.mark.parametrize("code", [COMPUTES, SLEEPS_BESIDE_A_THREAD])
def test_a_process_that_computes_does_not_stand_still(code):
    with running(code) as pid:
        assert "nothing" not in doing(pid)


def test_one_that_has_a_core_computes():
    with running(COMPUTES) as pid:
        os.sched_setaffinity(pid, {max(os.sched_getaffinity(0))})
        psutil_time = psutil.Process(pid).cpu_times
        activity = Activity(computes_here=True, processes=lambda: [pid], clock=lambda: psutil_time().user)
        activity.doing()
        end_s = psutil_time().user + 0.5
        while psutil_time().user < end_s:  # however busy the machine is
            time.sleep(0.01)
        assert activity.doing() == "computes"


def test_one_that_gets_a_part_of_each_of_its_cores_is_slow_and_one_that_gets_them_all_computes():
    """Eight threads that get a tenth of eight cores use most of one core, and take ten times as long."""
    with running(COMPUTES) as pid:
        psutil_time = psutil.Process(pid).cpu_times
        for cores, expected in ((1, "computes"), (2, "waits")):
            os.sched_setaffinity(pid, sorted(os.sched_getaffinity(0))[:cores])
            activity = Activity(computes_here=True, processes=lambda: [pid], clock=lambda: psutil_time().user)
            activity.doing()
            end_s = psutil_time().user + 0.5
            while psutil_time().user < end_s:
                time.sleep(0.01)
            assert activity.doing() == expected


def test_one_with_a_device_that_gets_no_core_waits_for_it():
    with running(COMPUTES) as pid:
        times_s = iter((0.0, 1000.0))
        activity = Activity(computes_here=False, processes=lambda: [pid], clock=lambda: next(times_s))
        assert [activity.doing() for _ in range(2)] == ["waits", "waits"]


def test_one_that_got_little_of_a_core_waits_for_it_and_one_whose_compilers_come_and_go_waits_for_them():
    with running(COMPUTES) as pid, running(SLEEPS) as compiler:
        times_s = iter((0.0, 1000.0, 1000.0, 1000.1))
        activity = Activity(computes_here=True, processes=lambda: [pid], clock=lambda: next(times_s))
        assert [activity.doing() for _ in range(2)] == ["waits", "waits"]
        pids = iter(([pid], [pid, compiler], [pid]))
        activity = Activity(computes_here=False, processes=lambda: next(pids))
        assert [activity.doing() for _ in range(3)] == ["waits", "waits", "waits"]


def test_one_that_waits_for_its_turn_on_a_core_that_others_have_does_not_stand_still():
    core = min(os.sched_getaffinity(0))
    with running(COMPUTES) as starved, running(COMPUTES) as first, running(COMPUTES) as second:
        for pid in (starved, first, second):
            os.sched_setaffinity(pid, {core})
        psutil.Process(starved).nice(19)
        assert "nothing" not in doing(starved, looks=20)


def test_one_that_waits_for_something_stands_still():
    with running(SLEEPS) as pid:
        settled_s = time.monotonic() + PATIENCE_S
        while glance([pid]).busy and time.monotonic() < settled_s:
            time.sleep(0.01)
        assert set(doing(pid)) == {"nothing"}
        assert set(doing(pid, computes_here=False)) == {"computes"}, "what computes on a device may wait for it"


@pytest.mark.parametrize("computes_here", [True, False])
def test_of_several_one_that_is_stopped_keeps_all_from_going_on(computes_here):
    with running(COMPUTES) as one, running(SLEEPS) as other:
        os.kill(other, signal.SIGSTOP)
        stopped_s = time.monotonic() + PATIENCE_S
        while not glance([other]).stopped and time.monotonic() < stopped_s:
            time.sleep(0.01)
        assert set(doing(one, other, computes_here=computes_here)) == {"nothing"}


def test_processes_that_have_ended_are_no_evidence():
    with running(SLEEPS) as pid:
        pass
    gone, none = glance([pid]), glance([])
    assert (gone.stopped, gone.busy, gone.ticks) == (none.stopped, none.busy, none.ticks)
