"""Ending processes: stopped ones too, with all below them, and never a stranger with the same number."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ridgeline.cluster.runtime.processes import ProcessId, _runs, end_processes, semaphores_of, this_process
from tests.support.patience import PATIENCE_S

SLEEP = "import time; time.sleep(60)"
FAMILY = f"""
import subprocess, sys
subprocess.Popen([sys.executable, '-c', {SLEEP!r}])
print(1, flush=True)
{SLEEP}
"""


def test_a_stopped_process_and_its_child_are_gone_on_return():
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        [child] = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGSTOP)
        assert end_processes([ProcessId.of(psutil.Process(parent.pid))]) == []
        assert parent.wait(PATIENCE_S) == -signal.SIGKILL
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


HALF_GONE = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(1, flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_alone_has_ended_still_holds_what_it_had():
    with subprocess.Popen([sys.executable, "-c", HALF_GONE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found, give_up_s = psutil.Process(process.pid), time.monotonic() + PATIENCE_S
        while found.status() != psutil.STATUS_ZOMBIE and time.monotonic() < give_up_s:
            time.sleep(0.01)
        assert found.status() == psutil.STATUS_ZOMBIE
        assert _runs(found)
        assert end_processes([ProcessId.of(found)]) == []
        assert not _runs(found), "nobody has collected it yet, and it holds nothing"


def test_a_process_that_has_just_ended_holds_no_semaphores_and_is_no_error():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(PATIENCE_S)
    assert semaphores_of((process.pid, os.getpid())) == semaphores_of((os.getpid(),))


def test_a_process_that_took_over_the_number_of_one_that_ended_is_left_alone():
    me = this_process()
    assert end_processes([ProcessId(me.pid, me.started_s - 3600.0)]) == []


def test_a_process_that_is_gone_already_is_no_error():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        name = ProcessId.of(psutil.Process(process.pid))
        process.wait(PATIENCE_S)
    assert end_processes([name]) == []


def test_a_semaphore_of_a_process_whose_tracker_was_killed_too_does_not_stay():
    code = "import multiprocessing, time; lock = multiprocessing.get_context('spawn').Lock(); print(1, flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        [semaphore] = semaphores_of((process.pid,))
        for tracker in psutil.Process(process.pid).children():
            tracker.kill()
        assert Path(semaphore).exists()
        assert end_processes([ProcessId.of(psutil.Process(process.pid))], [semaphore]) == []
        assert not Path(semaphore).exists()
        process.wait(PATIENCE_S)


SHARES_GPU_MEMORY = """
import os, time
for name in (f"torch_{os.getpid()}_519115585_0", f"cuda.shm.0.{os.getpid():x}.1"):
    open(f"/dev/shm/{name}", "x").close()
print(1, flush=True)
"""


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_files_with_which_a_process_shared_gpu_memory_go_with_it(ends_by_itself):
    code = SHARES_GPU_MEMORY + ("" if ends_by_itself else "time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        one = ProcessId.of(psutil.Process(process.pid))
        process.stdout.readline()
        files = [Path(f"/dev/shm/torch_{one.pid}_519115585_0"), Path(f"/dev/shm/cuda.shm.0.{one.pid:x}.1")]
        assert all(file.exists() for file in files)
        if ends_by_itself:
            process.wait(PATIENCE_S)
        else:
            end_processes([replace(one, started_s=one.started_s - 3600.0)])
            assert all(file.exists() for file in files), "the number is now another process's"
        assert end_processes([one]) == []
    assert not any(file.exists() for file in files)


def test_the_temporary_files_of_a_process_go_with_it(tmp_path):
    folder = tmp_path / "ridgeline-abcdefgh"
    folder.mkdir()
    (folder / "0d7eb2ab-socket").touch()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        one = replace(ProcessId.of(psutil.Process(process.pid)), folder=str(folder))
        assert end_processes([one]) == []
    assert not folder.exists()
