"""The plots of a report, as figures."""

from typing import Any

from ridgeline.loadtest.report.plots import roofline


def _pool(**busy_s: float) -> dict[str, Any]:
    bounds = {"prefill": "compute", "mixed": "compute", "decode": "memory"}
    kinds = {
        step: {"bound": bounds[step], "busy_seconds": seconds, "flops": 1e12, "arithmetic_intensity": 10.0}
        | {"mfu": 0.5, "mbu": 0.5}
        for step, seconds in busy_s.items()
    }
    whole = {"arithmetic_intensity": 10.0, "flops": 2e12, "roof_seconds": 1.0}
    return whole | {"ridge": 28.0, "peak_flops": 4e11, "peak_bytes_per_second": 1.4e10, "step_kinds": kinds}


def test_the_roofline_names_each_kind_of_step_once_at_its_largest_dot():
    variants = {
        "a": {"label": "colocated", "pools": {"colocated": _pool(prefill=1.0, decode=90.0, mixed=46.0)}},
        "b": {"label": "disaggregated", "pools": {"prefill": _pool(prefill=47.0), "decode": _pool(decode=72.0)}},
        "c": {"label": "adaptive", "pools": {"adaptive": _pool(prefill=2.0, decode=85.0, mixed=50.0)}},
    }
    figure = roofline(variants)
    assert figure is not None
    shown = [(trace.name, text) for trace in figure.data for text in trace.text or () if text]
    assert sorted(shown) == [
        ("adaptive", "mixed: compute"),
        ("colocated", "decode: memory"),
        ("disaggregated", "prefill: compute"),
    ]
