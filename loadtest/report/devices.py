"""What a variant gets from each of its cores or GPUs, and what its tokens cost at the load that was offered."""

from collections.abc import Mapping
from typing import Any

from ridgeline.loadtest.report.pools import ratio
from ridgeline.loadtest.variants import Devices

DEVICE_FORMULAS = {
    "requests_per_device": "completed / (window x devices)",
    "goodput_per_device": "requests that met every SLO / (window x devices)",
    "output_tokens_per_device": "output tokens of completed requests / (window x devices)",
    "busy_seconds_per_device": "busy seconds of each pool's workers x devices of a worker, added over pools / devices",
    "cost_per_million_output_tokens": "price of a device's hour x devices x window / 3600 / output tokens x 1,000,000; "
    "of all devices, busy or not, at this load",
}


def per_device(variant: Mapping[str, Any], devices: Devices, price_per_hour: float | None) -> dict[str, Any]:
    """Return the figures of a variant's summary for each device; a figure that cannot be computed is None, never 0."""
    tokens_per_hour = variant["output_throughput"] * 3600
    cost_per_token = ratio(price_per_hour and price_per_hour * devices.count, tokens_per_hour)
    return {
        "unit": devices.unit,
        "devices": devices.count,
        "requests_per_device": variant["request_throughput"] / devices.count,
        "goodput_per_device": variant["request_goodput"] / devices.count,
        "output_tokens_per_device": variant["output_throughput"] / devices.count,
        "busy_seconds_per_device": _busy_seconds(variant["pools"], devices),
        "cost_per_million_output_tokens": None if cost_per_token is None else cost_per_token * 1e6,
    }


def _busy_seconds(pools: Mapping[str, Mapping[str, Any]], devices: Devices) -> float | None:
    if not pools or not pools.keys() <= devices.per_worker.keys():
        return None
    busy_s: float = sum(pool["busy_seconds"] * devices.per_worker[name] for name, pool in pools.items())
    return busy_s / devices.count
