"""An engine that computes, one that waits for its turn on a core, and one that does nothing, as real processes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from engine.activity import Activity, glance
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


def stands_still(*pids, computes_here=True, looks=4):
    """Whether they stood still in each of some looks after the first one."""
    activity = Activity(computes_here=computes_here, processes=lambda: pids)
    activity.stands_still()
    found = []
    for _ in range(looks):
        time.sleep(0.1)
        found.append(activity.stands_still())
    return found


@pytest.mark.parametrize("code", [COMPUTES, SLEEPS_BESIDE_A_THREAD])
def test_a_process_that_computes_does_not_stand_still(code):
    with running(code) as pid:
        assert not any(stands_still(pid))


def test_one_that_waits_for_its_turn_on_a_core_that_others_have_does_not_stand_still():
    core = min(os.sched_getaffinity(0))
    with running(COMPUTES) as starved, running(COMPUTES) as first, running(COMPUTES) as second:
        for pid in (starved, first, second):
            os.sched_setaffinity(pid, {core})
        psutil.Process(starved).nice(19)
        assert not any(stands_still(starved, looks=20))


def test_one_that_waits_for_something_stands_still():
    with running(SLEEPS) as pid:
        settled_s = time.monotonic() + PATIENCE_S
        while glance([pid]).busy and time.monotonic() < settled_s:
            time.sleep(0.01)
        assert all(stands_still(pid))
        assert not any(stands_still(pid, computes_here=False)), "what computes on a device may wait for it"


@pytest.mark.parametrize("computes_here", [True, False])
def test_of_several_one_that_is_stopped_keeps_all_from_going_on(computes_here):
    with running(COMPUTES) as one, running(SLEEPS) as other:
        os.kill(other, signal.SIGSTOP)
        stopped_s = time.monotonic() + PATIENCE_S
        while not glance([other]).stopped and time.monotonic() < stopped_s:
            time.sleep(0.01)
        assert all(stands_still(one, other, computes_here=computes_here))


def test_processes_that_have_ended_are_no_evidence():
    with running(SLEEPS) as pid:
        pass
    assert glance([pid]) == glance([])
