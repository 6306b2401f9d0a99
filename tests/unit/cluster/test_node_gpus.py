"""GPUs as nvidia-smi lists them, and the peaks they stand for: what is not known is said, and stops nothing."""

import dataclasses

import pytest

from ridgeline.cluster.node_gpus import (
    FIELDS,
    Gpu,
    NoGpus,
    UnknownHardware,
    mps_problem,
    peaks_of,
    read_gpus,
    worker_hardware,
)
from ridgeline.cluster.runtime.deployment import known_peaks
from ridgeline.roofline.hardware import hardware_of_gpu
from ridgeline.router.settings import PoolHardware

MIB = 1024**2
H100_LINE = "{index}, GPU-{index}abc, NVIDIA H100 80GB HBM3, 81559, 80994, 580.95.05, 9.0, Disabled"
TWO_H100 = "\n".join(H100_LINE.format(index=index) for index in (0, 1))
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * MIB, 80994 * MIB, (580, 95, 5), (9, 0))


def test_gpus_are_read_with_memory_driver_and_capability():
    assert len(H100_LINE.split(",")) == len(FIELDS)
    first, second = read_gpus(lambda: TWO_H100, {})
    assert (first, second.index) == (H100, 1)
    (unknown,) = read_gpus(lambda: "0, GPU-0, NVIDIA GB10, [N/A], [N/A], 580.95, 12.1, [N/A]", {})
    assert (unknown.memory_bytes, unknown.partitioned) == (0, False)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ('read asked; test "$asked" = get_server_list', ""),
        ("echo Cannot find MPS control daemon; exit 1", "nvidia-cuda-mps-control says: Cannot find MPS control"),
        (None, "there is no nvidia-cuda-mps-control, which comes with NVIDIA's driver"),
    ],
)
def test_a_daemon_of_mps_is_asked_whether_it_runs(tmp_path, monkeypatch, script, problem):
    if script is not None:
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mps_problem().startswith(problem)
    assert bool(mps_problem()) == bool(problem)


CUT = TWO_H100.replace("Disabled", "Enabled")


@pytest.mark.parametrize(
    ("answer", "visible", "indices"),
    [(TWO_H100, "1", [1]), (TWO_H100, "GPU-0abc", [0]), (TWO_H100, "0,1", [0, 1]), (CUT, "MIG-8a4b", [0, 1])],
)
def test_only_the_gpus_that_the_environment_leaves_count(answer, visible, indices):
    gpus = read_gpus(lambda: answer, {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.index for gpu in gpus] == indices
    assert all(gpu.partitioned is (answer == CUT) for gpu in gpus)


@pytest.mark.parametrize(
    ("answer", "visible", "part"),
    [
        ("", None, "no GPU"),
        (TWO_H100, "", "CUDA_VISIBLE_DEVICES"),
        (TWO_H100, "MIG-8a4b", "CUDA_VISIBLE_DEVICES"),
        ("No devices were found", None, "No devices"),
        (None, None, "nvidia-smi"),
    ],
)
def test_no_gpu_is_an_error_that_says_why(answer, visible, part, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    ask = None if answer is None else lambda: answer
    with pytest.raises(NoGpus, match=part):
        read_gpus(ask, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize(
    ("name", "memory_mib", "entry"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-sxm"),
        ("NVIDIA A100-PCIE-40GB", 40960, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-pcie"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
        ("NVIDIA H100 NVL", 95830, "h100-nvl"),
        ("NVIDIA H200", 143771, "h200-sxm"),
        ("NVIDIA H200 NVL", 143771, "h200-nvl"),
        ("NVIDIA GH200 480GB", 97871, "gh200-96gb"),
        ("NVIDIA GH200 144G HBM3e", 147427, "gh200-144gb"),
        ("NVIDIA H20", 97871, "h20"),
        ("NVIDIA B200", 183359, "b200-sxm"),
        ("NVIDIA B300 SXM6 AC", 275040, "b300-sxm"),
        ("NVIDIA GB200", 189471, "gb200"),
        ("NVIDIA GB300", 284208, "gb300"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA L40", 46068, "l40"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA A10G", 23028, "a10g"),
        ("NVIDIA A10", 23028, "a10"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
        # Not these: other chips with a known name in theirs, another size, a part of one.
        ("NVIDIA GeForce RTX 4090 D", 24564, None),
        ("NVIDIA A100-SXM-64GB", 65536, None),
        ("NVIDIA L40S-48Q", 49152, None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9856, None),
        ("Tesla V100-SXM2-16GB", 16384, None),
    ],
)
def test_the_whole_name_and_the_memory_decide_the_entry(name, memory_mib, entry):
    found = hardware_of_gpu(name, memory_mib * MIB)
    assert (found.name if found else None) == entry


def test_a_model_in_fp8_has_the_fp8_peak_where_there_is_one():
    a100 = dataclasses.replace(H100, name="NVIDIA A100-SXM4-80GB")
    assert peaks_of([H100], "bfloat16", fp8=True).name == "h100-sxm-fp8"
    assert peaks_of([H100], "bfloat16").name == "h100-sxm"
    assert peaks_of([a100], "bfloat16", fp8=True).name == "a100-sxm"


@pytest.mark.parametrize(
    ("gpus", "dtype", "sentence"),
    [
        ([dataclasses.replace(H100, name="NVIDIA X900")], "bfloat16", "known for 'NVIDIA X900' with 80 GiB: add it to"),
        ([H100, dataclasses.replace(H100, name="NVIDIA L4")], "bfloat16", "several kinds, NVIDIA H100 80GB HBM3 and"),
        ([dataclasses.replace(H100, partitioned=True)], "bfloat16", "cut into MIG instances"),
        ([H100], "float32", "model.dtype is float32"),
    ],
)
def test_peaks_that_are_not_published_are_not_guessed(gpus, dtype, sentence):
    with pytest.raises(UnknownHardware, match=sentence):
        peaks_of(gpus, dtype)


def test_a_gpu_without_known_peaks_is_a_sentence_and_the_pools_that_have_some_stay(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    known, unknown = PoolHardware("h100-sxm", 1.0, 1.0, "data sheet"), worker_hardware("bfloat16", 8, 1)
    assert "nvidia-smi" in unknown
    assert known_peaks({"prefill": known, "decode": unknown}, said.append) == {"prefill": known}
    assert len(said) == 1
    assert unknown in said[0]
