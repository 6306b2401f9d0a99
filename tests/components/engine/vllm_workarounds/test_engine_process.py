"""What each process of an engine does before vLLM's own code, in processes of its own."""

import multiprocessing
import os
import platform
import signal
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
from vllm.renderers.hf import HfRenderer
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor import uniproc_executor
from vllm.v1.executor.multiproc_executor import WorkerProc

from ridgeline.cluster.doctor.facts import read_cpu_flags
from ridgeline.engine.vllm_workarounds import engine_process
from ridgeline.engine.vllm_workarounds.engine_process import ask_for_tiles, forget_queue_names, one_tokenizer
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly
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


# --- the CPU's matrix tiles


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


# --- the tokenizer of the front end


@pytest.fixture
def rendered():
    """Make vLLM's renderer for a small tokenizer; returns the tokenizer that it holds."""
    made = []

    def make():
        model_config = SimpleNamespace(renderer_num_workers=1, hf_config=None, supports_multimodal_inputs=False)
        config = SimpleNamespace(model_config=model_config, parallel_config=SimpleNamespace(_api_process_rank=0))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
        made.append(HfRenderer(config, tokenizer))
        return made[-1].tokenizer

    yield make
    for renderer in made:
        renderer.shutdown()


def test_a_front_end_keeps_its_tokenizer_which_still_works(rendered):
    with one_tokenizer():
        tokenizer = rendered()
    assert not isinstance(tokenizer, ThreadSafeHFTokenizerMixin)
    assert tokenizer.convert_tokens_to_ids(["b", "a"]) == [1, 0]


def test_every_other_renderer_has_its_copies(rendered):
    with one_tokenizer():
        pass
    assert isinstance(rendered(), ThreadSafeHFTokenizerMixin)


# --- queues between an engine process and its ranks


def test_the_name_goes_and_the_queue_goes_on_in_both_directions_and_is_closed_without_complaint():
    queue = ShmRingBuffer(n_reader=1, max_chunk_bytes=1024, max_chunks=2)
    name = Path("/dev/shm") / queue.shared_memory.name.lstrip("/")
    reader = ShmRingBuffer(*queue.handle())
    assert name.exists()
    forget_queue_names()
    assert not name.exists()
    with queue.get_data(1) as written:
        written[:5] = b"hello"
    with reader.get_data(1) as read:
        assert bytes(read[:5]) == b"hello"
    forget_queue_names()  # there is nothing left to do
    queue.__del__()
    reader.__del__()
