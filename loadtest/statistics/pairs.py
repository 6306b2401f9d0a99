"""What one pair of rounds says: the same requests at the same times in variant a and in variant b."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal

import msgspec

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.statistics.proportions import PairedCounts

Latency = Literal["ttft", "ttst", "tpot", "largest_gap"]
LATENCIES: dict[Latency, Callable[[RequestRecord], float | None]] = {
    "ttft": lambda record: record.ttft_scheduled_s,
    "ttst": lambda record: record.ttst_s,
    "tpot": lambda record: record.tpot_s,
    "largest_gap": lambda record: record.largest_gap_s,
}


class PairDifference(msgspec.Struct, frozen=True):
    """Variant b against variant a in one pair: differences are b - a, ratios are ln(b / a)."""

    counts: PairedCounts
    attainment: float
    """Difference of the shares of requests that met the SLOs."""
    goodput: float | None
    """Log ratio of the requests per second that met the SLOs; None if in one variant none did."""
    latencies: dict[Latency, float]
    """Mean log ratio of each latency over requests that finished in both variants; those without any are left out."""
    compared: int
    """Requests that finished in both variants."""


def pair_difference(a: Sequence[RequestRecord], b: Sequence[RequestRecord], slo: Slo) -> PairDifference:
    """Compare request by request; position i is the same request in both variants."""
    limits = slo.in_seconds()
    found = attainment_difference([one.meets(*limits) for one in a], [one.meets(*limits) for one in b])
    done = [(one, other) for one, other in zip(a, b, strict=True) if one.ok and other.ok]
    good_a, good_b = found.counts.both + found.counts.only_a, found.counts.both + found.counts.only_b
    return msgspec.structs.replace(
        found,
        goodput=math.log(good_b / good_a) if good_a and good_b else None,
        latencies={name: mean for name, of in LATENCIES.items() if (mean := _mean_log_ratio(done, of)) is not None},
        compared=len(done),
    )


def attainment_difference(a: Sequence[bool], b: Sequence[bool]) -> PairDifference:
    """Compare which requests met the SLOs, and nothing else."""
    met = Counter(zip(a, b, strict=True))
    counts = PairedCounts(met[True, True], met[True, False], met[False, True], met[False, False])
    return PairDifference(counts, (counts.only_b - counts.only_a) / counts.total, None, {}, 0)


def _mean_log_ratio(
    done: Sequence[tuple[RequestRecord, RequestRecord]], of: Callable[[RequestRecord], float | None]
) -> float | None:
    values = ((of(one), of(other)) for one, other in done)
    ratios = [math.log(in_b / in_a) for in_a, in_b in values if in_a and in_b]
    return fmean(ratios) if ratios else None
