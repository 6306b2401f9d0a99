"""Says the verdict of a comparison in sentences, each of which the tables below it show.

First which variant serves more of the same requests within the SLOs, where, and how sure that is; then the highest
rates; then what is not known, and how much longer it takes. tests/unit/loadtest/report/test_wording.py holds each
sentence against the counts of thousands of simulated comparisons.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from ridgeline.loadtest.plan import MODES, Slo
from ridgeline.loadtest.run.quantities import counted
from ridgeline.loadtest.statistics.attainment_curve import MaxGoodputRate, RoundCount
from ridgeline.loadtest.statistics.verdict import ALIKE, LEAST_PAIRS, RateVerdict

MOST_FACTOR: Final = 20.0
"""A longer run is not foretold from the scatter of a short one."""
REACHED: Final = 0.05
"""Where no variant meets the SLOs for this share of requests, the load says nothing of them."""
TOLD_FAILED: Final = 0.02
"""The share of failed requests from which on the verdict tells of them: a fifth of those that may miss SLOs."""
Rounds = Mapping[str, Sequence[RoundCount]]
"""The valid rounds of each variant, in the order of pairs."""


class Pauses(msgspec.Struct, frozen=True):
    """The longest gap between two tokens of one answer in each variant, in seconds, at rates up to `rate`."""

    rate: float
    longest_s: dict[str, float]


class Findings(msgspec.Struct, frozen=True):
    """What a comparison has found; the names of variants are those that people read."""

    rounds: Rounds
    verdict: RateVerdict
    held: Mapping[str, MaxGoodputRate]
    attainment: float
    slo: Slo
    took_s: float
    by_slo: Mapping[str, RateVerdict] = {}
    """The verdict on each SLO alone, by its name."""
    pauses: Pauses | None = None
    pairs: int = 0
    """Pairs of rounds, disturbed ones included."""
    failed: Mapping[str, tuple[int, int]] = {}
    """How many requests of each variant failed, other than by taking too long, and of how many."""


def say(found: Findings) -> list[str]:
    """Return the verdict with the counts that it rests on, the highest rates, and what is not known."""
    is_reached = max(shares_at(found.rounds, _rates_of(found.rounds)).values()) >= REACHED
    if found.verdict.pairs < LEAST_PAIRS or not is_reached:
        sentences = [_why_nothing(found), _failed(found), _counts(found), _missing_bound(found)]
        return list(filter(None, sentences))
    sentences = [
        _verdict(found),
        _failed(found),
        _counts(found),
        _disturbed(found),
        _by_slo(found.by_slo),
        _rates(found),
        _unknown(found),
        _pauses(found.pauses),
    ]
    return list(filter(None, sentences))


def loaded_rates(rounds: Rounds, attainment: float) -> list[float]:
    """Return the rates at which a variant, all its rounds there together, missed the attainment that was asked for."""
    rates = sorted({one.rate for each in rounds.values() for one in each})
    return [rate for rate in rates if any(share < attainment for share in shares_at(rounds, [rate]).values())]


def shares_at(rounds: Rounds, rates: Sequence[float]) -> dict[str, float]:
    """Return the share of requests within the SLOs of each variant, over all rounds at these rates."""
    at = {name: [one for one in each if one.rate in rates] for name, each in rounds.items()}
    return {name: sum(one.met for one in each) / sum(one.total for one in each) for name, each in at.items() if each}


def _why_nothing(found: Findings) -> str:
    if found.verdict.pairs >= LEAST_PAIRS:
        return "The SLOs are out of reach: no rate measured was low enough for them."
    pairs = counted(found.verdict.pairs, "pair")
    return (
        f"Nothing is concluded from {pairs} of rounds that no other work disturbed: a verdict needs {LEAST_PAIRS}, and "
        "a small difference more."
    )


def _verdict(found: Findings) -> str:
    verdict, names = found.verdict, found.verdict.variants
    best, worst = names[0], names[-1]
    if all((best, other) in verdict.serves_more for other in names[1:]):
        text = f"{_upper(best)} serves more requests within the SLOs than {_listed(names[1:])} (strong evidence)."
        rest = {two for two in verdict.serves_more if best not in two}
    elif len(names) > 2 and all((other, worst) in verdict.serves_more for other in names[:-1]):
        text = f"{_upper(worst)} serves the fewest requests within the SLOs (strong evidence)."
        rest = {two for two in verdict.serves_more if worst not in two}
    else:
        text, rest = "", set(verdict.serves_more)
    more = [text] if text else []
    more += [
        f"{_upper(one)} serves more than {other} (strong evidence)."
        for one, other in verdict.serves_more
        if (one, other) in rest
    ]
    more += _alike(verdict)
    if verdict.open:
        more.append(_not_told_apart(found))
    return " ".join(more)


def _alike(verdict: RateVerdict) -> list[str]:
    if not verdict.alike:
        return []
    if len(verdict.alike) == math.comb(len(verdict.variants), 2):
        return [f"No difference that matters: all highest rates lie within {ALIKE - 1:.0%} of each other."]
    return [
        f"{_upper(one)} and {other} hold rates within {ALIKE - 1:.0%} of each other." for one, other in verdict.alike
    ]


def _not_told_apart(found: Findings) -> str:
    """Name what is open, with the bounds of the others' highest rates against that of the first."""
    verdict = found.verdict
    open_names = [name for name in verdict.variants if any(name in two for two in verdict.open)]
    is_clique = len(verdict.open) == math.comb(len(open_names), 2)
    told = f"{_upper(_listed(open_names))} are not told apart"
    if not is_clique:
        told = f"Not told apart: {'; '.join(f'{one} and {other}' for one, other in verdict.open)}"
    first, *others = open_names
    bounds = [_against(found, first, other) for other in others if (first, other) in verdict.open]
    against = f" Against {first}, {', '.join(filter(None, bounds))} times the rate." if any(bounds) else ""
    return f"{told}.{against}"


def _against(found: Findings, first: str, other: str) -> str:
    """Say how many times the highest rate of `first` another one holds, as far as measured rates bound both."""
    ratio = found.verdict.between(first, other)
    least, most = (1 / ratio.high, 1 / ratio.low) if ratio.one == first else (ratio.low, ratio.high)
    is_least = None not in (found.held[other].low, found.held[first].high)
    is_most = None not in (found.held[other].high, found.held[first].low)
    if is_least and is_most:
        return f"{other} holds {least:.2f} to {most:.2f}"
    if is_least or is_most:
        return f"{other} holds at least {least:.2f}" if is_least else f"{other} holds at most {most:.2f}"
    return ""


def _counts(found: Findings) -> str:
    """Say what share of the same requests each variant served at the rates at which one did not hold the goal."""
    rates, names = loaded_rates(found.rounds, found.attainment), found.verdict.variants
    where = rates or _rates_of(found.rounds)
    shares = shares_at(found.rounds, where)
    requests = sum(one.total for one in found.rounds[names[0]] if one.rate in where)
    each = ", ".join(f"{name} {shares[name]:.0%}" for name in names)
    if not rates:
        return (
            f"At all rates measured, up to {where[-1]:.3g} requests/s, every variant met {found.slo.counted} for "
            f"{found.attainment:.0%} or more: {each}. Only higher rates can tell them apart."
        )
    return (
        f"Within the SLOs where a variant missed {found.attainment:.0%}, at "
        f"{_listed(f'{rate:.3g}' for rate in where)} requests/s, of the same {counted(requests, 'request')}: {each}."
    )


def _disturbed(found: Findings) -> str:
    if found.pairs <= found.verdict.pairs:
        return ""
    pairs = counted(found.pairs, "pair")
    return f"{found.verdict.pairs} of {pairs} of rounds were free of other work; all of this rests on these."


def _failed(found: Findings) -> str:
    """Say whose requests failed, which counts against a variant as slow answers do."""
    told = [
        f"{failed} of {counted(total, 'request')} of {name}"
        for name, (failed, total) in found.failed.items()
        if failed >= TOLD_FAILED * total and failed
    ]
    return f"Failed, other than by taking too long: {_listed(told)}." if told else ""


def _by_slo(by_slo: Mapping[str, RateVerdict]) -> str:
    """Say which SLO picks which variant, if two of them pick different ones."""
    picks = {
        slo: verdict.variants[0]
        for slo, verdict in by_slo.items()
        if all((verdict.variants[0], other) in verdict.serves_more for other in verdict.variants[1:])
    }
    if len(set(picks.values())) < 2:
        return ""
    told = "; ".join(f"by {slo} alone {name} serves more" for slo, name in picks.items())
    return f"{_upper(told)} (strong evidence)."


def _rates(found: Findings) -> str:
    each = [f"{name} {rate_text(found.held[name])}" for name in found.verdict.variants]
    told = f"Highest rate with {found.attainment:.0%} of requests within the SLOs, in requests/s: {', '.join(each)}."
    return " ".join(filter(None, (told, _missing_bound(found))))


def _missing_bound(found: Findings) -> str:
    is_missing = any(None in (one.low, one.high) for one in found.held.values())
    return "A missing bound of a highest rate needs more pairs, or rates further off." if is_missing else ""


def rate_text(found: MaxGoodputRate) -> str:
    """Return a highest rate with its interval, or the bound that is known."""
    if found.low is None and found.high is None:
        return "not bounded"
    if found.high is None:
        return f"at least {found.low:.3g}"
    if found.low is None or found.rate is None:
        return f"at most {found.high:.3g}" if found.low is None else f"{found.low:.3g} to {found.high:.3g}"
    return f"{found.rate:.3g} ({found.low:.3g} to {found.high:.3g})"


def _unknown(found: Findings) -> str:
    verdict = found.verdict
    if verdict.factor is None or not verdict.open or not loaded_rates(found.rounds, found.attainment):
        return ""
    if verdict.factor > MOST_FACTOR:
        longer = f"a run over {MOST_FACTOR:g} times as long"
    else:
        longer = counted(max(1, math.ceil((verdict.factor - 1) * found.took_s / 60)), "more minute")
    return f"If what was seen so far holds, {longer} may show which serves more, or that no difference matters."


def _pauses(found: Pauses | None) -> str:
    if found is None:
        return ""
    longest = ", ".join(f"{name} {_ms(pause_s)}" for name, pause_s in found.longest_s.items())
    return f"Longest pause of a stream at up to {found.rate:.3g} requests/s: {longest}."


def _ms(value_s: float) -> str:
    return f"{value_s:.2f} s" if value_s >= 1 else f"{value_s * 1e3:.0f} ms"


def _rates_of(rounds: Rounds) -> list[float]:
    return sorted({one.rate for each in rounds.values() for one in each})


def _upper(text: str) -> str:
    """Begin a sentence with a capital, but leave the names that users give to their servers."""
    return text[:1].upper() + text[1:] if text.split()[0].rstrip(",") in (*MODES, "by") else text


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
