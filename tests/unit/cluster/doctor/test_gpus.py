"""The doctor on GPU hosts: what an engine would find out half a minute into its start is a sentence before it."""

import dataclasses

import pytest

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import CheckResult, checks, failures, node_checks
from ridgeline.cluster.doctor.facts import HostFacts, ModelFacts
from ridgeline.cluster.node_gpus import Gpu
from tests.unit.cluster.doctor.test_checks import GIB, GOOD_CPU_HOST, GPU_FLAGS

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, (580, 95, 5), (9, 0))
GPU_HOST = dataclasses.replace(
    GOOD_CPU_HOST,
    cpu_flags=frozenset({"avx2"}),
    cores=32,
    memory_available_bytes=256 * GIB,
    gpus=2,
    gpu_devices=(H100, dataclasses.replace(H100, index=1)),
    packages={"ray": "2.60.0", "torch": "2.13.0", "vllm": "0.32.0"},
    model=ModelFacts("hub"),
)
SHARED = {
    "ray.share_gpus": "true",
    "engine_args.gpu_memory_utilization": "0.45",
    **{f"pools.{pool}.kv_cache_memory_bytes": "8 GiB" for pool in ("prefill", "decode", "colocated")},
}
MPS = SHARED | {f"pools.{pool}.mps_active_thread_percent": "50" for pool in ("prefill", "decode")}
TWO_EACH = {f"pools.{pool}.gpus_per_worker": "2" for pool in ("prefill", "decode")}
REPLICAS = SHARED | {"mode": "colocated", "pools.colocated.gpus_per_worker": "1", "pools.colocated.workers": "2"}
LARGE = ModelFacts(parameters=70_000_000_000)
OLD = {"driver": (550, 54)}
NONE = {"gpus": 0, "gpu_devices": (), "gpu_problem": "there is no nvidia-smi"}


def on_gpus(flags=()) -> RidgelineConfig:
    return load_config(None, GPU_FLAGS | dict(flags)).config


def host(gpu=None, **changes) -> HostFacts:
    devices = {} if gpu is None else {"gpu_devices": (dataclasses.replace(H100, **gpu),)}
    return dataclasses.replace(GPU_HOST, **devices, **changes)


def result(name: str, facts: HostFacts, flags=()) -> CheckResult:
    return next(one for one in checks(on_gpus(flags), facts) if one.name == name)


@pytest.mark.parametrize(
    ("facts", "flags", "fixes"),
    [
        pytest.param(host(gpu_devices=(), gpu_problem="no driver"), {}, ["no driver", "580"], id="no_driver"),
        pytest.param(host({"driver": (570, 124, 6)}), {}, ["570.124.6", "580"], id="old_driver"),
        pytest.param(host({"compute_capability": (7, 0)}), {}, ["7.5"], id="old_gpu"),
        pytest.param(host({"free_bytes": 60 * GIB}), {}, ["60.0 GiB", "gpu_memory_utilization"], id="memory"),
        pytest.param(
            host({"free_bytes": 41 * GIB}, gpus=1), SHARED, ["two engines of prefill want 72.0 GiB"], id="memory_of_two"
        ),
        pytest.param(host(c_compiler=False), {}, ["C compiler"], id="compiler"),
        pytest.param(host(c_compiler=False, python_header=False), {}, ["C compiler and Python.h"], id="header"),
        pytest.param(host(gpus=1), {}, ["2 GPUs", "gpus_per_worker in pools.prefill or pools.decode"], id="too_few"),
        pytest.param(
            host({"name": "Tesla T4", "compute_capability": (7, 5)}),
            {"model.dtype": "bfloat16"},
            ["model.dtype to float16"],
            id="no_bfloat16",
        ),
        pytest.param(host({}, gpus=1, mps_problem="no daemon"), MPS, ["no daemon", "-control -d"], id="mps"),
        pytest.param(host(model=LARGE), {}, ["130.4 GiB", "pools.prefill.gpus_per_worker"], id="weights"),
        pytest.param(host(**NONE), {"transfer.transport": "cuda-ipc"}, ["shm instead of cuda-ipc"], id="cuda_ipc"),
    ],
)
def test_what_a_gpu_host_lacks_is_a_sentence_that_names_the_fix(facts, flags, fixes):
    found = failures(checks(on_gpus(flags), facts))
    assert all(any(fix in sentence for sentence in found) for fix in fixes), found
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in found)


@pytest.mark.parametrize(
    ("facts", "flags"),
    [
        pytest.param(GPU_HOST, {}, id="good"),
        pytest.param(host(OLD, cuda_compat=True), {}, id="compatibility_libraries"),
        pytest.param(host(OLD), {"ray.address": "auto"}, id="engines_elsewhere"),
        pytest.param(host({"compute_capability": (7, 5)}), {}, id="auto_is_left_to_the_engine"),
        pytest.param(host({"free_bytes": 41 * GIB}), {"engine_args.gpu_memory_utilization": "0.5"}, id="half_of_it"),
        pytest.param(host({}, gpus=1), SHARED, id="one_for_two"),
        pytest.param(host({}, gpus=1, mps_problem="no daemon"), SHARED, id="no_mps"),
        pytest.param(host(model=LARGE, gpus=4), TWO_EACH, id="more_ranks"),
        pytest.param(
            host({"memory_bytes": 0, "free_bytes": 0, "compute_capability": (0, 0)}),
            {},
            id="a_driver_that_tells_nothing",
        ),
    ],
)
def test_what_is_good_enough_is_no_failure(facts, flags):
    assert failures(checks(on_gpus(flags), facts)) == []


def test_a_good_gpu_host_has_no_notes_and_known_peaks():
    assert [one.name for one in checks(on_gpus(), GPU_HOST) if one.fix] == []
    assert result("peaks", GPU_HOST).detail.startswith("h100-sxm")
    assert result("mps", host({}, gpus=1), MPS).ok


def test_nodes_of_a_joined_cluster_are_checked_alike():
    (sentence,) = failures(node_checks(on_gpus({"ray.address": "auto"}), {"decode": 1}, host(OLD)))
    assert "550.54" in sentence


def test_a_gpu_whose_peaks_are_not_known_is_a_note_and_no_failure():
    results = checks(on_gpus(), host({"name": "NVIDIA X900"}))
    assert failures(results) == []
    [note] = [one.fix for one in results if one.fix]
    assert "NVIDIA X900" in note


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (REPLICAS, True),
        (REPLICAS | {"pools.colocated.workers": "1"}, False),
        (REPLICAS | {"mode": "adaptive"}, False),
        (SHARED, False),
    ],
    ids=["two", "one", "adaptive", "split"],
)
def test_whole_replicas_that_share_a_gpu_are_warned_of(flags, warned):
    shared = result("gpus", host({}, gpus=1), flags)
    assert (shared.ok, "ray.share_gpus" in shared.fix) == (True, warned)


def test_each_rank_of_an_engine_on_gpus_needs_host_memory():
    needed = [float(result("memory", host(gpus=4), flags).detail.split()[0]) for flags in ({}, TWO_EACH)]
    assert needed[1] - needed[0] == pytest.approx(8, abs=0.1)
