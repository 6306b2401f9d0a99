"""The SLOs on TTFT and TPOT that a map has."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from loadtest.plan import Slo
from loadtest.run.records import RequestRecord
from loadtest.run.unloaded import Unloaded

TTFT_FACTORS = (1.5, 2.0, 3.0, 5.0, 8.0, 12.0)
TPOT_FACTORS = (1.1, 1.25, 1.5, 2.0, 2.5, 4.0)
"""Limits as multiples of the unloaded figures."""
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.97)
"""Of what was measured in all variants together, where the unloaded figures are not known."""
EQUIVALENT: Final = "equivalent"
UNCLEAR: Final = "unclear"
UNREACHABLE: Final = "unreachable"
PairRecords = Mapping[str, Sequence[RequestRecord]]
"""The records of each variant in one pair; position i is the same request in all variants."""


class Grid(msgspec.Struct, frozen=True):
    """The limits of a map, ascending."""

    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    source: str
    gap_ms: float | None = None
    """The limit on the largest gap in every cell; None if there is none."""


def grid_of(pairs: Sequence[PairRecords], unloaded: Unloaded | None, slo: Slo) -> Grid | None:
    """Return multiples of the unloaded figures, else quantiles of what was measured, with the plan's own limits added.

    None if nothing says what limits make sense.
    """
    if unloaded is not None and unloaded.median_ttft_s > 0 and unloaded.median_tpot_s > 0:
        ttfts_ms = [factor * unloaded.median_ttft_s * 1e3 for factor in TTFT_FACTORS]
        tpots_ms = [factor * unloaded.median_tpot_s * 1e3 for factor in TPOT_FACTORS]
        source = "multiples of the unloaded figures, and the limits of this run"
    else:
        done = [record for pair in pairs for records in pair.values() for record in records if record.ok]
        ttfts = [ttft_s * 1e3 for record in done if (ttft_s := record.ttft_scheduled_s) is not None]
        tpots = [tpot_s * 1e3 for record in done if (tpot_s := record.tpot_s) is not None]
        if not ttfts or not tpots:
            return None
        ttfts_ms, tpots_ms = np.quantile(ttfts, QUANTILES).tolist(), np.quantile(tpots, QUANTILES).tolist()
        source = "quantiles of what was measured in all variants, and the limits of this run"
    return Grid(_limits(ttfts_ms, slo.ttft_ms), _limits(tpots_ms, slo.tpot_ms), source, slo.gap_ms)


def _limits(values_ms: Sequence[float], own_ms: float) -> tuple[float, ...]:
    """Return the limits with three digits, ascending, each once; the comparison's own as it is."""
    rounded = {float(f"{value:.3g}") for value in values_ms if value > 0}
    return tuple(sorted({value for value in rounded if not math.isclose(value, own_ms, rel_tol=0.02)} | {own_ms}))
