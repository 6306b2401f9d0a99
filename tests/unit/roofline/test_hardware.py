"""Hardware peaks as published, and this host's as measured."""

import pytest

from ridgeline.roofline import calibration
from ridgeline.roofline.errors import ModelConfigError, UnknownNameError
from ridgeline.roofline.hardware import KNOWN_HARDWARE, Hardware, hardware_by_name


@pytest.mark.parametrize(
    ("name", "ridge"),
    [
        ("h100-sxm", 295),
        ("a100-sxm", 153),
        ("h200-sxm", 206),
        ("b200-sxm", 281),
        ("mi300x", 247),
        ("l40s", 419),
        ("h100-pcie", 378),
        ("h100-sxm-fp8", 591),
    ],
)
def test_ridges_match_the_checked_figures(name, ridge):
    assert hardware_by_name(name).ridge == pytest.approx(ridge, abs=0.6)


def test_every_entry_states_its_peak_and_its_bandwidth():
    for name, hardware in KNOWN_HARDWARE.items():
        assert hardware.name == name
        assert "TFLOP/s" in hardware.source
        assert "GB/s" in hardware.source


@pytest.mark.parametrize("name", ["H100", "h100_sxm", "H100 SXM"])
def test_usual_spellings_find_the_sxm_entry(name):
    assert hardware_by_name(name) is KNOWN_HARDWARE["h100-sxm"]
    assert hardware_by_name("h100-fp8") is KNOWN_HARDWARE["h100-sxm-fp8"]


def test_an_unknown_device_is_refused_with_the_valid_names():
    with pytest.raises(UnknownNameError, match=r"valid names: a10, .*mi300x"):
        hardware_by_name("h900")


def test_several_devices_keep_the_ridge_of_one():
    eight = hardware_by_name("h100").times(8)
    assert eight.ridge == hardware_by_name("h100").ridge
    assert eight.memory_bytes == 640e9


def test_peaks_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        Hardware("broken", 0.0, 1.0, "")


@pytest.fixture
def quick_calibration(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(calibration, "_GEMM_BUDGET_S", 0.3)
    monkeypatch.setattr(calibration, "_STREAM_BUDGET_S", 0.1)
    monkeypatch.setattr(calibration, "_GEMM_SHAPES", calibration._GEMM_SHAPES[:2])
    for name in ("_MIN_ARRAY_BYTES", "_MAX_ARRAY_BYTES"):
        monkeypatch.setattr(calibration, name, 32 << 20)


def test_a_calibrated_host_is_plausible_and_leaves_torch_as_it_was(quick_calibration):
    import torch

    threads = torch.get_num_threads()
    host = calibration.calibrate_host(1, "float32")
    assert torch.get_num_threads() == threads
    assert 1e9 < host.peak_flops < 1e14
    assert 5e8 < host.peak_bytes_per_s < 1e12
    assert host.name == "host-float32-1t"
    assert "1 thread" in host.source


def test_a_dtype_that_does_not_exist_is_refused(quick_calibration):
    with pytest.raises(ModelConfigError, match="float99"):
        calibration.calibrate_host(1, "float99")


@pytest.fixture
def counted_calibration(monkeypatch):
    pytest.importorskip("torch")
    calls = []

    def fake(num_threads, dtype):
        calls.append((num_threads, dtype))
        return Hardware(f"host-{len(calls)}", 1e12, 1e10, "measured", 1e9)

    monkeypatch.setattr(calibration, "calibrate_host", fake)
    return calls


def test_a_calibration_is_measured_once_per_threads_and_dtype(counted_calibration, tmp_path):
    cache = tmp_path / "new" / "cache"
    first = calibration.load_or_calibrate_host(cache, 1, "bfloat16")
    assert calibration.load_or_calibrate_host(cache, 1, "torch.bfloat16") == first
    calibration.load_or_calibrate_host(cache, 2, "bfloat16")
    calibration.load_or_calibrate_host(cache, 1, "float32")
    assert counted_calibration == [(1, "bfloat16"), (2, "bfloat16"), (1, "float32")]
    assert len(list(cache.iterdir())) == 3


def test_force_measures_again_and_replaces_the_cached_value(counted_calibration, tmp_path):
    calibration.load_or_calibrate_host(tmp_path, 1, "float32")
    forced = calibration.load_or_calibrate_host(tmp_path, 1, "float32", force=True)
    assert forced.name == "host-2"
    assert calibration.load_or_calibrate_host(tmp_path, 1, "float32") == forced


@pytest.mark.parametrize("content", ["", "{}", '{"key": {}, "hardware": {}}', "[]"])
def test_a_broken_cache_file_is_measured_over(counted_calibration, tmp_path, content):
    calibration.load_or_calibrate_host(tmp_path, 1, "float32")
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert calibration.load_or_calibrate_host(tmp_path, 1, "float32").name == "host-2"
