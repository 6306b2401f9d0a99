"""Each sentence against the counts that it stands over, for simulated comparisons of all kinds."""

import re
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report.wording import Findings, loaded_rates, say, shares_at
from ridgeline.loadtest.statistics.attainment_curve import RoundCount, curves_of
from ridgeline.loadtest.statistics.verdict import LEAST_PAIRS, judge

NAMES = ("adaptive", "colocated", "disaggregated")
GOAL = 0.9


def found_in(rounds: dict[str, list[RoundCount]], undisturbed: int, **alone: dict[str, list[RoundCount]]) -> Findings:
    curves = curves_of(rounds, GOAL)
    return Findings(
        rounds=rounds,
        verdict=judge(curves, rounds, undisturbed),
        held={name: curve.max_goodput_rate() for name, curve in curves.items()},
        attainment=GOAL,
        slo=Slo(),
        took_s=300.0,
        by_slo={slo: judge(curves_of(each, GOAL), each, undisturbed) for slo, each in alone.items()},
    )


@st.composite
def comparisons(draw: st.DrawFn) -> Findings:
    """Any counts at any rates: also such as no server would have."""
    names = NAMES[: draw(st.integers(2, 3))]
    rates = draw(st.lists(st.sampled_from([0.5, 0.75, 1.0, 1.44, 2.16, 3.24]), min_size=1, max_size=6))
    totals = [draw(st.integers(10, 40)) for _ in rates]
    rounds = {
        name: [RoundCount(rate, draw(st.integers(0, total)), total) for rate, total in zip(rates, totals, strict=True)]
        for name in names
    }
    return found_in(rounds, draw(st.integers(0, len(rates))))


def check(found: Findings) -> None:
    """Fail if a sentence says more than the counts, or against them."""
    sentences = say(found)
    text, rounds = " ".join(sentences), found.rounds
    of_all = shares_at(rounds, [one.rate for each in rounds.values() for one in each])
    claimed = "strong evidence" in text
    if found.verdict.pairs < LEAST_PAIRS:
        assert not claimed
        assert "No difference that matters" not in text
        assert sentences[0].startswith("Nothing is concluded")
    for more, less in found.verdict.serves_more:
        ratio = found.verdict.between(more, less)
        assert of_all[more] > of_all[less]
        assert (ratio.low > 1) if ratio.one == more else (ratio.high < 1)
    told = {frozenset(two) for two in (*found.verdict.serves_more, *found.verdict.alike, *found.verdict.open)}
    assert told == {frozenset(two) for two in combinations(rounds, 2)}
    where = loaded_rates(rounds, GOAL)
    for name, share in shares_at(rounds, where or sorted({one.rate for one in rounds["adaptive"]})).items():
        assert f"{name} {share:.0%}" in text, "the counts are those of the table"
    for name, held in found.held.items():
        for rate in {one.rate for one in rounds[name]}:
            share = shares_at(rounds, [rate])[name]
            assert held.high is None or share < GOAL or rate <= held.high, "held above what it is said to hold"
            assert held.low is None or share >= GOAL or rate >= held.low, "missed below what it is said to hold"
        is_held = any(shares_at(rounds, [one.rate])[name] >= GOAL for one in rounds[name])
        assert held.low is None or is_held, "a lower bound of a variant that held no measured rate"
    for other, least, most in re.findall(r"(\w+) holds (?:at least )?([\d.]+)?(?: to |at most )?([\d.]+)? times", text):
        best = next(name for name in found.verdict.variants if any(name in two for two in found.verdict.open))
        assert not least or None not in (found.held[other].low, found.held[best].high), "a bound that nothing measured"
        assert not most or None not in (found.held[other].high, found.held[best].low), "a bound that nothing measured"
    assert not re.search(r"no bounds yet|nan|inf\b|None", text)
    assert all(len(sentence.split()) <= 60 for sentence in sentences)


@settings(max_examples=150)
@given(found=comparisons())
def test_no_sentence_says_more_than_the_counts_it_stands_over(found: Findings):
    check(found)


@pytest.mark.long
@settings(max_examples=3_000)
@given(found=comparisons())
def test_no_sentence_of_thousands_says_more_than_the_counts_it_stands_over(found: Findings):
    check(found)


def rounds_of(rates: tuple[float, ...], totals: tuple[int, ...], **percent: tuple[int, ...]):
    return {
        name: [
            RoundCount(rate, round(share * total / 100), total)
            for rate, total, share in zip(rates, totals, shares, strict=True)
        ]
        for name, shares in percent.items()
    }


DEMO = rounds_of((2.16, 2.29), (33, 35), adaptive=(82, 83), colocated=(73, 83), disaggregated=(39, 46))


def test_the_worst_of_three_is_named_with_the_counts_and_what_is_open():
    verdict, counts, rates, unknown = say(found_in(DEMO, 2))
    assert verdict.startswith("Disaggregated serves the fewest requests within the SLOs (strong evidence).")
    assert "Adaptive and colocated are not told apart" in verdict
    assert counts == (
        "Within the SLOs where a variant missed 90%, at 2.16 and 2.29 requests/s, of the same 68 requests: "
        "adaptive 82%, colocated 78%, disaggregated 43%."
    )
    assert "not bounded" in rates
    assert "needs more pairs" in rates
    assert "minute" in unknown or "times as long" in unknown


def test_what_is_open_is_bounded_against_the_first_where_rates_measured_bound_it():
    """Five pairs of a demo on a CPU with AMX."""
    rounds = rounds_of(
        (3.62, 8.14, 5.43, 2.41, 5.56),
        (30, 66, 45, 20, 46),
        colocated=(97, 21, 96, 100, 93),
        disaggregated=(87, 18, 76, 100, 78),
        adaptive=(97, 20, 91, 100, 89),
    )
    verdict = say(found_in(rounds, 5))[0]
    assert verdict.startswith("Colocated, adaptive and disaggregated are not told apart. Against colocated, adaptive ")
    assert re.search(
        r"adaptive holds 0\.\d\d to 1\.[234]\d, disaggregated holds 0\.\d\d to 1\.[01]\d times the rate\.", verdict
    )


def test_one_disturbed_round_of_each_variant_names_no_winner():
    rounds = rounds_of((0.527,), (21,), adaptive=(86,), colocated=(60,), disaggregated=(50,))
    sentences = say(found_in(rounds, 0))
    assert sentences[0].startswith("Nothing is concluded from 0 pairs")
    assert not re.search(r"minute|times as long|Highest rate", " ".join(sentences)), "no rates, and no foretelling"


def test_variants_that_hold_all_rates_need_higher_ones():
    rounds = rounds_of((1.0, 2.0), (40, 80), adaptive=(100, 98), colocated=(100, 99))
    text = " ".join(say(found_in(rounds, 2)))
    assert "Only higher rates can tell them apart" in text
    assert "times as long" not in text, "longer at the same rates would not"


@pytest.mark.parametrize(("failed", "is_told"), [(0, False), (1, False), (20, True)])
def test_failures_that_count_against_a_variant_are_told(failed: int, is_told: bool):
    rounds = rounds_of((1.0, 2.0), (40, 80), adaptive=(100, 98), colocated=(80, 50))
    found = msgspec.structs.replace(found_in(rounds, 2), failed={"adaptive": (0, 120), "colocated": (failed, 120)})
    assert any(f"{failed} of 120 requests of colocated" in sentence for sentence in say(found)) == is_told


def test_slos_that_nobody_meets_are_out_of_reach():
    rounds = rounds_of((1.0, 2.0), (40, 80), adaptive=(0, 0), colocated=(2, 0))
    assert say(found_in(rounds, 2))[0].startswith("The SLOs are out of reach")


def test_where_each_slo_picks_another_variant_both_are_named():
    high, low = (100, 98, 96) * 3, (50, 40, 30) * 3
    rates, totals = (1.0, 1.5, 2.0) * 3, (40, 60, 80) * 3
    ttft = rounds_of(rates, totals, adaptive=low, colocated=high)
    tpot = rounds_of(rates, totals, adaptive=high, colocated=low)
    sentences = say(found_in(rounds_of(rates, totals, adaptive=low, colocated=low), 9, TTFT=ttft, TPOT=tpot))
    assert "By TTFT alone colocated serves more; by TPOT alone adaptive serves more (strong evidence)." in sentences
