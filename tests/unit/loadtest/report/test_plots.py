"""The plots of a report, as figures."""

from typing import Any

import pytest

from ridgeline.loadtest.report.page import WINNER_COLORS
from ridgeline.loadtest.report.plots import STAGE_COLORS, VARIANT_COLORS, roofline


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


def _luminance(color: str) -> float:
    """Of `#rrggbb`, as https://www.w3.org/TR/WCAG22/#dfn-relative-luminance has it."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("card", ["#ffffff", "#171e27"])
def test_every_color_can_be_seen_on_a_light_and_on_a_dark_page(card: str):
    colors = (*VARIANT_COLORS, *STAGE_COLORS.values(), *WINNER_COLORS.values())
    for color in colors:
        if color.startswith("#"):  # others follow the page
            light, dark = sorted((_luminance(color), _luminance(card)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) > 1.2, color
