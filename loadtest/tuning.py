"""Chooses one candidate of each variant, in rounds of their own before the pairs that are judged.

A choice that was judged by the rounds that made it would look better than it is: the largest of several noisy shares is
too large. So no window, seed or prompt of a tuning round comes again, and its records are in a file of their own.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.preparation import Prepared
from ridgeline.loadtest.report.rounds import Round, labels_of, round_summary
from ridgeline.loadtest.report.summary import summarise
from ridgeline.loadtest.statistics.outcome import Side
from ridgeline.loadtest.valid_rounds import SIDES, new_runner
from ridgeline.loadtest.variants import Variant


class Score(msgspec.Struct, frozen=True):
    """What a candidate reached in its tuning rounds."""

    candidate: str
    attainment: float
    goodput: float
    """Requests per second that met the SLOs."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant with one of the configurations that are tried for it."""

    name: str
    variant: Variant
    overrides: Mapping[str, Any]
    """What it changes in the configuration."""


Candidates = Mapping[Side, Sequence[Candidate]]
"""The candidates of each variant, in the order in which they were declared."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The chosen variants; `summary` is the content of `tuning` in summary.json."""

    variants: tuple[Variant, Variant]
    prepared: Prepared
    """What was prepared, without the prompts that tuning has used."""
    summary: dict[str, Any]


def best_of(scores: Sequence[Score]) -> Score:
    """Return the score with the highest attainment, then goodput; of equals the one that was declared first."""
    return max(scores, key=lambda score: (score.attainment, score.goodput))  # max returns the first of equals


def order_of(candidates: Mapping[Side, Sequence[object]], seed: int) -> list[tuple[Side, int]]:
    """Draw the order of all candidates, as side and place; the same one for the same seed.

    Candidates of both variants are mixed, so that a drift of the machine favours no variant.
    """
    turns = [(side, place) for side, declared in candidates.items() for place in range(len(declared))]
    random.Random(f"tuning {seed}").shuffle(turns)
    return turns


async def tune(
    candidates: Candidates, prepared: Prepared, records_file: Path, console: Console, *, is_alone: bool, began_s: float
) -> Tuned:
    """Run the tuning rounds of each candidate in one go, in an order drawn from the plan's seed, and choose.

    Raises LoadTestError as rounds do: a candidate that cannot serve ends the comparison.
    """
    plan, labels = prepared.plan, labels_of(*prepared.plan.kinds)
    first = {side: declared[0].variant for side, declared in candidates.items()}
    turns = order_of(candidates, plan.seed)
    rounds: dict[tuple[Side, int], list[Round]] = {}
    next_number = 0
    for turn, (side, place) in enumerate(turns, start=1):
        candidate = candidates[side][place]
        console.print(f"tuning {turn} of {len(turns)}: {labels[side]}, {candidate.name}", highlight=False, markup=False)
        variants = first | {side: candidate.variant}
        runner = new_runner(
            (variants["a"], variants["b"]), prepared, records_file, console, is_alone=is_alone, began_s=began_s
        )
        runner.cold, runner.next_number = {side}, next_number
        for window in range(plan.tuning_rounds):
            title = f"{candidate.name}, tuning round {window + 1} of {plan.tuning_rounds}"
            await runner.one(window, side, prepared.traces.of_tuning(window), title)
        rounds[side, place] = runner.rounds
        next_number = runner.next_number
        prepared = replace(prepared, first_round_index=runner.next_round_index, is_a_cold=False)
    scores = {
        side: [_score(candidate.name, rounds[side, place], plan) for place, candidate in enumerate(declared)]
        for side, declared in candidates.items()
    }
    chosen = {side: scores[side].index(best_of(scores[side])) for side in SIDES}
    disturbed = {turn: sum(each.is_kept and bool(each.reasons) for each in ran) for turn, ran in rounds.items()}
    sentences = [_sentence(labels[side], scores[side], chosen[side]) for side in SIDES]
    if any(disturbed.values()):
        sentences.append(
            "the choice is not sure: rounds of tuning were kept although they were disturbed, and candidates that ran "
            "at other times were not disturbed alike"
        )
    for sentence in sentences:
        console.print(sentence, style="bold", highlight=False, markup=False)
    summary = {
        "rounds_per_candidate": plan.tuning_rounds,
        "order": [{"variant": side, "candidate": candidates[side][place].name} for side, place in turns],
        "candidates": [
            {
                "variant": side,
                "label": labels[side],
                "candidate": candidate.name,
                "overrides": dict(candidate.overrides),
                "attainment": scores[side][place].attainment,
                "goodput": scores[side][place].goodput,
                "disturbed_rounds": disturbed[side, place],
                "chosen": place == chosen[side],
            }
            for side in SIDES
            for place, candidate in enumerate(candidates[side])
        ],
        "rounds": [
            {"candidate": candidates[side][place].name} | round_summary(each, labels[side], plan)
            for side, place in turns
            for each in rounds[side, place]
        ],
        "sentences": sentences,
    }
    a, b = (candidates[side][chosen[side]].variant for side in SIDES)
    return Tuned((a, b), prepared, summary)


def _score(name: str, rounds: Sequence[Round], plan: ComparePlan) -> Score:
    """Sum up a candidate's valid rounds."""
    results = [each.result for each in rounds if each.is_kept and each.result is not None]
    records = [record for result in results for record in result.records]
    figures = summarise(records, sum(result.window_s for result in results), plan.slos)
    return Score(name, figures["attainment"], figures["request_goodput"])


def _sentence(label: str, scores: Sequence[Score], chosen: int) -> str:
    best = scores[chosen]
    if len(scores) == 1:
        return f"{label} has one candidate: {best.candidate} ({best.attainment:.0%} within the SLOs)"
    others = ", ".join(
        f"{score.candidate} {score.attainment:.0%}" for place, score in enumerate(scores) if place != chosen
    )
    equal = any(
        (score.attainment, score.goodput) == (best.attainment, best.goodput)
        for place, score in enumerate(scores)
        if place != chosen
    )
    why = "; the first declared of equals" if equal else ""
    return f"chosen by tuning for {label}: {best.candidate} ({best.attainment:.0%} within the SLOs; {others}{why})"
