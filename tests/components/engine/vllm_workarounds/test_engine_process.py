"""What each process of an engine does before vLLM's own code, in processes of its own."""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor import uniproc_executor
from vllm.v1.executor.multiproc_executor import WorkerProc

from ridgeline.engine.vllm_workarounds import engine_process
from tests.support.patience import PATIENCE_S

CONFIG = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="worker-1-1"))


def run_in_a_process(target):
    process = multiprocessing.get_context("fork").Process(target=target, kwargs={"vllm_config": CONFIG})
    process.start()
    process.join(PATIENCE_S)
    return process.exitcode


@pytest.fixture
def _folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize(
    ("target", "inner"), [(engine_process.run_engine, "_run_engine_core"), (engine_process.run_rank, "_make_rank")]
)
def test_tiles_are_asked_for_before_vllm_runs_and_an_error_is_left(monkeypatch, tmp_path, target, inner):
    def ask():
        (tmp_path / "asked").touch()
        return True

    def fail(*args, **kwargs):
        assert (tmp_path / "asked").exists()
        raise FileNotFoundError("no model.safetensors")

    monkeypatch.setattr(engine_process, "ask_for_tiles", ask)
    monkeypatch.setattr(engine_process, inner, fail)
    monkeypatch.setattr(engine_process, "_run_rank", lambda **given: WorkerProc(**given))
    assert run_in_a_process(target) == 1
    assert engine_process.cause_file(CONFIG).read() == "FileNotFoundError: no model.safetensors"


@pytest.mark.usefixtures("_folder")
def test_vllm_begins_its_process_with_ours_and_leaves_the_file_of_its_groups_in_its_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(EngineCoreProc, "run_engine_core", EngineCoreProc.run_engine_core)
    monkeypatch.setattr(CoreEngineProcManager, "finished_procs", CoreEngineProcManager.finished_procs)

    def run(**kwargs):
        path = uniproc_executor.get_file_store_init_method()
        raise SystemExit(0 if path.startswith(f"file://{tmp_path}/vllm_dist_") else 3)

    monkeypatch.setattr(engine_process, "_run_engine_core", run)
    engine_process.prepare_engine_processes()
    assert run_in_a_process(EngineCoreProc.run_engine_core) == 0


@pytest.mark.usefixtures("_folder")
def test_an_engine_that_has_lost_its_gpu_ends_and_leaves_why():
    """As a thread that moves KV would end it; the front end then reads that its process has ended."""

    def lose(vllm_config):
        end = engine_process.end_process(engine_process.cause_file(vllm_config))
        threading.Thread(target=end, args=(RuntimeError("CUDA error: an illegal memory access"),)).start()
        threading.Event().wait(PATIENCE_S)

    assert run_in_a_process(lose) == os.EX_SOFTWARE
    assert engine_process.cause_file(CONFIG).read() == "RuntimeError: CUDA error: an illegal memory access"


def test_a_process_that_is_just_ending_is_asked_how_once_it_has_ended():
    """Its pipe is closed first, as the kernel does when it is killed: vLLM then found no exit code."""

    def end():
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=end, name="EngineCore")
    not_started = multiprocessing.get_context("fork").Process(target=end, name="later")
    manager = CoreEngineProcManager.__new__(CoreEngineProcManager)
    manager.processes = [process, not_started]
    process.start()
    assert wait([process.sentinel], PATIENCE_S)
    assert engine_process._finished_procs(manager) == {}, "vLLM's own"
    assert engine_process.finished_processes(manager) == {"EngineCore": -signal.SIGKILL}
