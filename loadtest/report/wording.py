"""Says the outcome of a comparison in sentences, which claim no more than was shown."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.quantities import counted
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.statistics.attainment_curve import MaxGoodputRate
from ridgeline.loadtest.statistics.looks import ALPHA, LEAST_PAIRS
from ridgeline.loadtest.statistics.outcome import Conclusion, Secondary, Side
from ridgeline.loadtest.statistics.paired_tests import Estimate
from ridgeline.loadtest.statistics.pairs import Latency
from ridgeline.loadtest.statistics.rate_verdict import ALIKE, RateVerdict

NAMES: Final[dict[Latency, str]] = {
    "ttft": "TTFT",
    "ttst": "time from the first to the second token",
    "tpot": "TPOT",
    "largest_gap": "largest gap between tokens",
}

MOST_FACTOR: Final = 20.0
"""A longer run is not foretold from the scatter of a short one."""


class GapTail(msgspec.Struct, frozen=True):
    """The longest gaps between tokens in one variant, in seconds, over all its finished requests."""

    p99_s: float
    largest_s: float


class Pauses(msgspec.Struct, frozen=True):
    """The longest gap between two tokens of one answer in each variant, in seconds, at rates up to `rate`."""

    rate: float
    longest_s: dict[str, float]


class Words(msgspec.Struct, frozen=True):
    """The outcome in words; `tail` names the longest gaps between tokens, and is empty if there are none."""

    headline: str
    tail: str
    details: str
    gap_tails: dict[str, GapTail]

    @property
    def sentence(self) -> str:
        """All of it."""
        return " ".join(filter(None, (self.headline, self.tail, self.details)))


def say(conclusion: Conclusion, labels: Mapping[Side, str], slo: Slo, tails: dict[str, GapTail]) -> Words:
    """Say the outcome, what a difference must be to be seen, and the latencies as secondary."""
    return Words(_headline(conclusion, labels, slo), _tails_text(tails), _details(conclusion, labels), tails)


def gap_tails(records: Mapping[str, Sequence[RequestRecord]]) -> dict[str, GapTail]:
    """Return the tail of the gaps between tokens in each variant that has any."""
    gaps_s = {label: [gap_s for one in found if one.ok for gap_s in one.itls_s] for label, found in records.items()}
    return {label: GapTail(float(np.percentile(gaps, 99)), max(gaps)) for label, gaps in gaps_s.items() if gaps}


def _headline(found: Conclusion, labels: Mapping[Side, str], slo: Slo) -> str:
    shares = f"{labels['a']} met {slo.counted} for {found.attainment_a:.0%} of requests, {labels['b']} for "
    shares += f"{found.attainment_b:.0%}"
    rounds = f"{counted(found.pairs, 'pair')} of rounds"
    if found.outcome == "better":
        better = labels[found.better or "a"]
        return f"{_upper(better)} is better under {slo}: {shares} ({_difference(found)}; {rounds})."
    if found.outcome == "equivalent":
        return f"Equivalent within {_points(found.margin)} under {slo}: {shares} ({_difference(found)}; {rounds})."
    if found.outcome == "slo_unreachable":
        return f"Out of reach at this load: {slo}. {_upper(shares)} ({rounds}), so the SLOs cannot tell them apart."
    return f"Inconclusive under {slo}: {shares} ({_difference(found)}; {rounds})."


def _details(found: Conclusion, labels: Mapping[Side, str]) -> str:
    sentences = []
    if found.outcome == "inconclusive":
        if found.pairs < LEAST_PAIRS:
            sentences.append(f"Nothing is concluded from fewer than {LEAST_PAIRS} pairs.")
        elif found.attainment is not None and found.attainment.excludes_zero:
            sentences.append(_exact_test(found.attainment))
        if found.smallest_seen is not None:
            sentences.append(
                f"With {counted(found.pairs, 'pair')} of rounds that scatter like these, a difference below "
                f"{_points(found.smallest_seen)} is missed more than one time in five; to see "
                f"{_points(found.margin)} takes about {_needed(found.pairs_for_margin)}."
            )
    if found.secondary and found.pairs >= LEAST_PAIRS:
        lines = [_secondary(name, each, labels) for name, each in found.secondary.items()]
        sentences.append(f"Secondary, corrected for being {len(lines)}: {'; '.join(lines)}.")
    return " ".join(sentences)


def _exact_test(attainment: Estimate) -> str:
    """Say why an interval without 0 is not enough."""
    return (
        f"The interval leaves out 0, but the exact test over pairs gives p = {attainment.p_sign_flip:.3g}, and a "
        f"difference is called one only if that is at most {ALPHA:g}."
    )


def _secondary(name: Latency, each: Secondary, labels: Mapping[Side, str]) -> str:
    ends = f"{_ratio(each.estimate.low)} to {_ratio(each.estimate.high)}"
    ratio = f"{NAMES[name]} {labels['b']} / {labels['a']} {_ratio(each.estimate.mean)} ({ends})"
    if each.differs:
        lower = labels["b"] if each.estimate.mean < 0 else labels["a"]
        return f"{ratio}, lower {lower}"
    return f"{ratio}, {'equivalent' if each.is_equivalent else 'no difference shown'}"


def _difference(found: Conclusion) -> str:
    if found.attainment is None:
        return "one pair has no interval"
    interval = f"{100 * (1 - found.level):.3g} % interval {_ends(found.attainment)}"
    return f"difference {100 * found.attainment.mean:+.1f} points, {interval}"


def _ends(estimate: Estimate) -> str:
    return f"{100 * estimate.low:+.1f} to {100 * estimate.high:+.1f}"


def _points(share: float) -> str:
    return f"{100 * share:.3g} points"


def _needed(pairs: int | None) -> str:
    return "more than 1,000 pairs" if pairs is None else f"{pairs} pairs"


def _ratio(log_ratio: float) -> str:
    return f"x {math.exp(log_ratio):.2f}"


def _upper(text: str) -> str:
    """Begin a sentence with a capital, but leave a name that has its own, such as vLLM."""
    return text[:1].upper() + text[1:] if text.split()[0].islower() else text


def _tails_text(tails: Mapping[str, GapTail]) -> str:
    if len(tails) < 2:
        return ""
    p99s = " and ".join(f"{_ms(tail.p99_s)} {label}" for label, tail in tails.items())
    largest = " and ".join(_ms(tail.largest_s) for tail in tails.values())
    return f"1 % of the gaps between tokens lasted longer than {p99s}; the longest lasted {largest}."


def _ms(value_s: float) -> str:
    return f"{value_s:.2f} s" if value_s >= 1 else f"{value_s * 1e3:.0f} ms"


def say_rates(
    labels: Mapping[str, str],
    held: Mapping[str, MaxGoodputRate],
    verdict: RateVerdict | None,
    took_s: float,
    pauses: Pauses | None,
) -> list[str]:
    """Say which rate each variant holds and which one holds most, and the longest pause of a stream, a sentence each.

    Variants are in the order of `labels`.
    """
    first, *others = held
    rates = [f"{_upper(labels[first])} holds {_rate_text(held[first], ' requests/s')}"]
    rates += [f"{labels[name]} {_rate_text(held[name])}" for name in others]
    told = "." if verdict is None else f": {_verdict_text(labels, held, verdict, took_s)}"
    sentences = [", ".join(rates) + told]
    if pauses is not None:
        longest = ", ".join(f"{labels[name]} {_ms(pause_s)}" for name, pause_s in pauses.longest_s.items())
        sentences.append(f"Longest pause of a stream at up to {pauses.rate:.3g} requests/s: {longest}.")
    return sentences


def _rate_text(found: MaxGoodputRate, unit: str = "") -> str:
    if found.rate is None and found.low is None and found.high is None:
        return "all rates measured" if found.outcome == "above" else "no rate measured"
    ends = interval_text(found.low, found.high)
    return ends + unit if found.rate is None else f"{found.rate:.3g}{unit} ({ends})"


def interval_text(low: float | None, high: float | None) -> str:
    """Return an interval of rates; an end is None if no rate measured bounds it."""
    if low is None and high is None:
        return "no bounds yet"
    if high is None:
        return f"at least {low:.3g}"
    return f"at most {high:.3g}" if low is None else f"{low:.3g} to {high:.3g}"


def _verdict_text(
    labels: Mapping[str, str], held: Mapping[str, MaxGoodputRate], verdict: RateVerdict, took_s: float
) -> str:
    """Name the variant that holds most, with the evidence, or say that it cannot be told yet."""
    outcomes = {one.outcome for one in held.values()}
    if outcomes == {"below"}:
        return "out of reach, no rate measured was low enough for these SLOs."
    leaders = _listed([labels[name] for name in (verdict.leader, *verdict.alike)], "and")
    if not verdict.behind and outcomes != {"above"}:
        return f"no difference that matters, all within {ALIKE - 1:.0%} of the highest."
    unclear = [name for name, evidence in verdict.behind.items() if evidence == "none"]
    less = [name for name in verdict.behind if name not in unclear]
    is_low = any(held[name].outcome == "below" for name in unclear)
    if outcomes == {"above"} or (unclear and held[verdict.leader].outcome == "above" and not is_low):
        unclear = unclear or [name for name in held if name not in (verdict.leader, *verdict.alike)]
        together = _listed([labels[name] for name in (verdict.leader, *verdict.alike, *unclear)], "and")
        return f"{together} are not told apart, since no rate measured was high enough."
    if unclear:
        others = _listed([labels[name] for name in unclear], "and")
        hold = "hold" if verdict.alike else "holds"
        differ = _difference_of_rates(held, verdict, unclear)
        behind = "".join(
            f" {_upper(labels[name])} holds less than {labels[verdict.leader]}, {verdict.behind[name]} evidence."
            for name in less
        )
        more_time = _more_time(verdict, took_s)
        return f"cannot tell yet whether {leaders} {hold} more than {others}{differ}.{behind} {more_time}"
    alike = f", alike within {ALIKE - 1:.0%}" if verdict.alike else ""
    return f"{leaders}{alike}, {verdict.evidence} evidence."


def _difference_of_rates(held: Mapping[str, MaxGoodputRate], verdict: RateVerdict, unclear: Sequence[str]) -> str:
    """Say by how much rates differ at most; nothing where no measured rate bounds one of them, so no round says it."""
    if any(None in (held[name].low, held[name].high) for name in (verdict.leader, *unclear)):
        return ""
    most = max(end for name in unclear for one in (verdict.over(name),) for end in (one.high, 1 / one.low))
    return f"; they differ by a factor of {most:.2f} at most"


def _more_time(verdict: RateVerdict, took_s: float) -> str:
    if verdict.factor is None or verdict.factor > MOST_FACTOR:
        return f"To tell takes more than {MOST_FACTOR:g} times as long as this run."
    minutes = max(1, math.ceil((verdict.factor - 1) * took_s / 60))
    return f"About {counted(minutes, 'more minute')} would tell."


def _listed(words: Sequence[str], conjunction: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}"
