"""States which mode won, under which limits, by how much and how surely, and how long the longest gaps were.

Called by `loadtest.compare`.

Request i of round r is the same request in both modes, so the modes are compared request by request.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from loadtest.plan import COLOCATED, DISAGGREGATED, Mode, Slo
from loadtest.report.bootstrap import Floats, paired_ratio_interval
from loadtest.run.records import RequestRecord

Basis = Literal["goodput", "latency"]
Ends = tuple[float | None, float | None]
MODES: tuple[Mode, ...] = (COLOCATED, DISAGGREGATED)


class GapTail(msgspec.Struct, frozen=True):
    """The longest gaps between tokens in one mode, in seconds, over all its finished requests."""

    p99_s: float
    largest_s: float


class Verdict(msgspec.Struct, frozen=True):
    """The verdict; `ratio` is disaggregated over colocated, None if infinite. No `winner` means no clear difference.

    `sentence` begins with `headline` and `tail`, which names the longest gaps between tokens; it is empty, and
    `gap_tails` lacks a mode, if no answer of a mode had two tokens.
    """

    sentence: str
    headline: str
    tail: str
    winner: Mode | None
    basis: Basis
    ratio: float | None
    ci95: Ends | None
    gap_tails: dict[Mode, GapTail]


def judge(colocated: Sequence[RequestRecord], disaggregated: Sequence[RequestRecord], slo: Slo, seed: int) -> Verdict:
    """Compare goodput; if neither mode met the limits for any request, state latencies only.

    The gaps' tail is always named: a stall hardly moves a request's TPOT, and the modes differ most in stalls.
    """
    limits = slo.ttft_ms / 1e3, slo.tpot_ms / 1e3
    good_colocated = [float(record.meets(*limits)) for record in colocated]
    good_disaggregated = [float(record.meets(*limits)) for record in disaggregated]
    tails = gap_tails({COLOCATED: colocated, DISAGGREGATED: disaggregated})
    tail, medians = _tails_text(tails), _medians_text(colocated, disaggregated, seed)

    def verdict(headline: str, winner: Mode | None, basis: Basis, ratio: float | None, ci95: Ends | None) -> Verdict:
        sentence = " ".join(filter(None, (headline, tail, medians)))
        return Verdict(sentence, headline, tail, winner, basis, ratio, ci95, tails)

    if not any(good_colocated) and not any(good_disaggregated):
        headline = f"Neither mode met {slo} for any request, so goodput cannot tell them apart."
        return verdict(headline, None, "latency", None, None)
    ratio = sum(good_disaggregated) / sum(good_colocated) if any(good_colocated) else math.inf
    ends = paired_ratio_interval(good_disaggregated, good_colocated, _mean, seed) or (ratio, ratio)
    ci95 = _finite(ends[0]), _finite(ends[1])
    if ends[0] <= 1 <= ends[1]:
        headline = _draw_text(good_colocated, good_disaggregated, slo, ratio, ends)
        return verdict(headline, None, "goodput", _finite(ratio), ci95)
    winner = DISAGGREGATED if ratio > 1 else COLOCATED
    headline = _win_text(winner, good_colocated, good_disaggregated, slo, ends)
    return verdict(headline, winner, "goodput", _finite(ratio), ci95)


def gap_tails(records: Mapping[Mode, Sequence[RequestRecord]]) -> dict[Mode, GapTail]:
    """Return the tail of the gaps between tokens in each mode."""
    gaps_s = {mode: [gap_s for one in found if one.ok for gap_s in one.itls_s] for mode, found in records.items()}
    return {mode: GapTail(float(np.percentile(gaps, 99)), max(gaps)) for mode, gaps in gaps_s.items() if gaps}


def _tails_text(tails: Mapping[Mode, GapTail]) -> str:
    if len(tails) < len(MODES):
        return ""
    p99s = " and ".join(f"{_ms(tails[mode].p99_s)} {mode}" for mode in MODES)
    largest = " and ".join(_ms(tails[mode].largest_s) for mode in MODES)
    return f"1 % of the gaps between tokens lasted longer than {p99s}; the longest lasted {largest}."


def _draw_text(
    colocated: list[float], disaggregated: list[float], slo: Slo, ratio: float, ends: tuple[float, float]
) -> str:
    if all(colocated) and all(disaggregated):
        return f"No clear difference in goodput: both modes met {slo} for every request."
    return (
        f"No clear difference in goodput under {slo}: disaggregated met both for {np.mean(disaggregated):.0%} of "
        f"requests, colocated for {np.mean(colocated):.0%} (ratio {_number(ratio)}, 95 % interval {_span(ends)}, "
        "which includes 1)."
    )


def _win_text(
    winner: Mode, colocated: list[float], disaggregated: list[float], slo: Slo, ends: tuple[float, float]
) -> str:
    more, fewer = disaggregated, colocated
    if winner == COLOCATED:
        more, fewer, ends = colocated, disaggregated, (_inverse(ends[1]), _inverse(ends[0]))
    shares = f"it met both for {np.mean(more):.0%} of requests against {np.mean(fewer):.0%}"
    factor = (
        f", {_number(sum(more) / sum(fewer))} times the goodput (95 % interval {_span(ends)})" if any(fewer) else ""
    )
    return f"{winner.capitalize()} won under {slo}: {shares}{factor}."


def _medians_text(colocated: Sequence[RequestRecord], disaggregated: Sequence[RequestRecord], seed: int) -> str:
    parts = [
        text
        for name, attribute in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
        if (text := _median_text(name, attribute, colocated, disaggregated, seed))
    ]
    return " ".join(parts)


def _median_text(
    name: str, attribute: str, colocated: Sequence[RequestRecord], disaggregated: Sequence[RequestRecord], seed: int
) -> str | None:
    """Return one sentence about a latency, over the requests that finished in both modes; None if there are none."""
    pairs: list[tuple[float, float]] = []
    for one, other in zip(disaggregated, colocated, strict=True):
        values = getattr(one, attribute), getattr(other, attribute)
        if one.ok and other.ok and None not in values:
            pairs.append(values)
    if not pairs:
        return None
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    ends = paired_ratio_interval(ours, theirs, _median, seed)
    medians = float(np.median(ours)), float(np.median(theirs))
    if ends is None or ends[0] <= 1 <= ends[1]:
        return (
            f"Median {name} shows no clear difference (disaggregated {_ms(medians[0])}, colocated {_ms(medians[1])})."
        )
    lower, span = (COLOCATED, ends) if ends[0] > 1 else (DISAGGREGATED, (_inverse(ends[1]), _inverse(ends[0])))
    low, high = sorted(medians)
    return (
        f"Median {name} was lower {lower}: {_ms(low)} against {_ms(high)}, "
        f"a factor of {high / low:.2f} (95 % interval {_span(span)})."
    )


def _mean(sample: Floats) -> Floats:
    return np.asarray(np.mean(sample, axis=-1))


def _median(sample: Floats) -> Floats:
    return np.asarray(np.median(sample, axis=-1))


def _inverse(value: float) -> float:
    return 1 / value if value else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "infinitely many"


def _span(ends: tuple[float, float]) -> str:
    return " to ".join(f"{end:.2f}" if math.isfinite(end) else "unbounded" for end in ends)


def _ms(value_s: float) -> str:
    return f"{value_s:.2f} s" if value_s >= 1 else f"{value_s * 1e3:.0f} ms"
