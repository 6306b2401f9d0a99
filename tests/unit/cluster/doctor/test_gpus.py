"""The doctor on GPU hosts: what an engine would find out half a minute into its start is a sentence before it."""

import dataclasses

import pytest

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import CheckResult, checks, failures, node_checks
from ridgeline.cluster.doctor.facts import HostFacts, ModelFacts
from ridgeline.cluster.node_gpus import Gpu

GIB = 1024**3
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, (580, 95, 5), (9, 0))
GPU_FLAGS = {f"pools.{pool}.gpus_per_worker": "1" for pool in ("prefill", "decode", "colocated")}
GPU_HOST = HostFacts(
    python_version=(3, 12),
    machine="x86_64",
    cpu_flags=frozenset({"avx2"}),
    cores=32,
    memory_available_bytes=256 * GIB,
    shared_memory_free_bytes=GIB,
    open_files_limit=65536,
    gpus=2,
    gpu_devices=(H100, dataclasses.replace(H100, index=1)),
    packages={"ray": "2.60.0", "torch": "2.13.0", "vllm": "0.32.0"},
    pinned_packages={"ray": "2.60.0", "vllm": "0.32.0"},
    model=ModelFacts("hub"),
)


def on_gpus(**flags: str) -> RidgelineConfig:
    return load_config(None, GPU_FLAGS | {name.replace("__", "."): value for name, value in flags.items()}).config


def host(gpu: Gpu | None = None, **changes) -> HostFacts:
    devices = {} if gpu is None else {"gpu_devices": (gpu,)}
    return dataclasses.replace(GPU_HOST, **devices, **changes)


def result(name: str, facts: HostFacts, config: RidgelineConfig) -> CheckResult:
    return next(one for one in checks(config, facts) if one.name == name)


def test_a_good_gpu_host_has_no_failures_and_no_notes_but_that_of_missing_keys():
    results = checks(on_gpus(), GPU_HOST)
    assert failures(results) == []
    assert [one.name for one in results if one.fix] == []
    assert result("peaks", GPU_HOST, on_gpus()).detail.startswith("h100-sxm: dense bf16 peak 989 TFLOP/s")


@pytest.mark.parametrize(
    ("facts", "fix"),
    [
        (host(gpu_devices=(), gpu_problem="nvidia-smi fails: no driver"), "since nvidia-smi fails: no driver: install"),
        (
            host(dataclasses.replace(H100, driver=(570, 124, 6))),
            "The driver is 570.124.6, and this build of vLLM is for",
        ),
        (host(dataclasses.replace(H100, compute_capability=(7, 0))), "has code for 7.5 and newer: use another GPU"),
        (
            host(dataclasses.replace(H100, free_bytes=60 * GIB)),
            "GPU 0 has 60.0 GiB free, and an engine of prefill wants",
        ),
        (host(c_compiler=False), "Triton compiles small C modules when an engine starts, and a C compiler cannot"),
        (host(c_compiler=False, python_header=False), "a C compiler and Python.h cannot be found: install gcc"),
    ],
)
def test_what_a_gpu_host_lacks_is_a_sentence_that_names_the_fix(facts, fix):
    found = failures(checks(on_gpus(), facts))
    assert any(fix in sentence for sentence in found), found
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in found)


def test_nodes_of_a_joined_cluster_are_checked_alike():
    old = host(dataclasses.replace(H100, driver=(550, 54)))
    joined = on_gpus(ray__address="auto")
    assert failures(checks(joined, old)) == []
    (sentence,) = failures(node_checks(joined, {"decode": 1}, old))
    assert "The driver is 550.54" in sentence


def test_an_older_driver_with_nvidias_compatibility_libraries_is_fine():
    assert failures(checks(on_gpus(), host(dataclasses.replace(H100, driver=(550, 54)), cuda_compat=True))) == []


def test_a_gpu_whose_peaks_are_not_known_is_a_note_and_no_failure():
    unknown = dataclasses.replace(H100, name="NVIDIA X900")
    results = checks(on_gpus(), host(unknown))
    assert failures(results) == []
    assert [one.fix for one in results if one.fix] == [
        "Metrics will have no peaks: no peak FLOP/s and bandwidth are known for 'NVIDIA X900' with 80 GiB: add it to "
        "roofline/hardware.csv."
    ]


def test_bfloat16_is_refused_where_the_gpu_has_none_and_auto_is_left_to_the_engine():
    turing = host(dataclasses.replace(H100, name="Tesla T4", compute_capability=(7, 5)))
    assert failures(checks(on_gpus(), turing)) == []
    (sentence,) = failures(checks(on_gpus(model__dtype="bfloat16"), turing))
    assert sentence == "Tesla T4 (compute capability 7.5) has no bfloat16: set model.dtype to float16 or auto."


def test_a_smaller_part_of_the_memory_needs_less_of_it_free():
    half_free = host(dataclasses.replace(H100, free_bytes=41 * GIB))
    assert failures(checks(on_gpus(engine_args__gpu_memory_utilization="0.5"), half_free)) == []


SHARED = {
    "ray__share_gpus": "true",
    "engine_args__gpu_memory_utilization": "0.45",
    **{f"pools__{pool}__kv_cache_memory_bytes": "8 GiB" for pool in ("prefill", "decode", "colocated")},
}


def test_two_workers_that_share_a_gpu_need_one_and_the_memory_of_both():
    assert failures(checks(on_gpus(**SHARED), host(H100, gpus=1))) == []
    half_free = host(dataclasses.replace(H100, free_bytes=41 * GIB), gpus=1)
    found = failures(checks(on_gpus(**SHARED), half_free))
    assert any("two engines of prefill want 72.0 GiB" in sentence for sentence in found), found


MPS = SHARED | {"pools__prefill__mps_active_thread_percent": "70", "pools__decode__mps_active_thread_percent": "30"}


def test_engines_with_shares_of_a_gpu_need_a_daemon_of_mps():
    assert result("mps", host(H100, gpus=1), on_gpus(**MPS)).detail == "daemon answers"
    without = host(H100, gpus=1, mps_problem="nvidia-cuda-mps-control says: Cannot find MPS control daemon process")
    (sentence,) = failures(checks(on_gpus(**MPS), without))
    assert "Cannot find MPS control daemon process: run `nvidia-cuda-mps-control -d`" in sentence
    assert failures(checks(on_gpus(**SHARED), without)) == []


def test_whole_replicas_that_share_a_gpu_are_warned_of_and_one_or_another_mode_is_not():
    two = {**SHARED, "mode": "colocated", "pools__colocated__gpus_per_worker": "1", "pools__colocated__workers": "2"}
    shared = result("gpus", host(H100, gpus=1), on_gpus(**two))
    assert shared.ok
    assert "halve each other's speed" in shared.fix
    for settings in ({**two, "pools__colocated__workers": "1"}, {**two, "mode": "adaptive"}, SHARED):
        assert result("gpus", host(H100, gpus=1), on_gpus(**settings)).fix == ""


def test_weights_that_do_not_fit_their_ranks_are_a_failure_and_more_ranks_are_the_fix():
    large = ModelFacts(parameters=70_000_000_000)
    found = failures(checks(on_gpus(), host(model=large)))
    assert found[0] == (
        "A GPU of prefill would hold weights of 130.4 GiB, and has 80.0 GiB: raise pools.prefill.gpus_per_worker (one "
        "rank on each), lower kv_cache_memory_bytes, or serve a smaller model."
    )
    two = {f"pools__{pool}__gpus_per_worker": "2" for pool in ("prefill", "decode")}
    assert failures(checks(on_gpus(**two), host(model=large, gpus=4))) == []


def test_cuda_ipc_on_a_machine_without_gpus_is_told_of_shared_memory():
    none = host(gpus=0, gpu_devices=(), gpu_problem="there is no nvidia-smi")
    found = failures(checks(on_gpus(transfer__transport="cuda-ipc"), none))
    assert any("transfer.transport has to be shm instead of cuda-ipc." in sentence for sentence in found)
    assert not any("cuda-ipc" in sentence for sentence in failures(checks(on_gpus(), none)))


def test_each_rank_of_an_engine_on_gpus_needs_host_memory():
    one, two = on_gpus(), on_gpus(**{f"pools__{pool}__gpus_per_worker": "2" for pool in ("prefill", "decode")})
    needed = [float(result("memory", host(gpus=4), config).detail.split()[0]) for config in (one, two)]
    assert needed[1] - needed[0] == pytest.approx(8, abs=0.1)


def test_a_driver_that_tells_no_memory_is_not_judged_by_it():
    silent = dataclasses.replace(H100, memory_bytes=0, free_bytes=0, compute_capability=(0, 0))
    assert failures(checks(on_gpus(), host(silent))) == []
