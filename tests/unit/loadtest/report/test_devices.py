"""Figures per device and cost, worked by hand."""

import pytest

from ridgeline.loadtest.report.pools import per_device
from ridgeline.loadtest.variants import Devices

ARM = {
    "request_throughput": 3.0,
    "request_goodput": 1.5,
    "output_throughput": 120.0,
    "pools": {"prefill": {"busy_seconds": 10.0}, "decode": {"busy_seconds": 40.0}},
}
DEVICES = Devices("core", 6, {"prefill": 2, "decode": 1, "colocated": 3})


def test_figures_are_divided_by_devices_and_not_by_workers():
    found = per_device(ARM, DEVICES, 0.9)
    assert found["requests_per_device"] == pytest.approx(0.5)
    assert found["goodput_per_device"] == pytest.approx(0.25)
    assert found["output_tokens_per_device"] == pytest.approx(20)
    assert found["busy_seconds_per_device"] == pytest.approx((10 * 2 + 40) / 6)
    assert found["cost_per_million_output_tokens"] == pytest.approx(0.9 * 6 / (120 * 3600) * 1e6)


def test_what_is_not_known_is_none_and_not_zero():
    assert per_device(ARM, DEVICES, None)["cost_per_million_output_tokens"] is None
    assert per_device(ARM | {"output_throughput": 0.0}, DEVICES, 0.9)["cost_per_million_output_tokens"] is None
    assert per_device(ARM | {"pools": {}}, DEVICES, None)["busy_seconds_per_device"] is None
    foreign = ARM | {"pools": {"encode": {"busy_seconds": 3.0}}}
    assert per_device(foreign, DEVICES, None)["busy_seconds_per_device"] is None
