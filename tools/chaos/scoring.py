"""Scores greedy answers with a single engine: how far each token is from the best one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tests.engines.harness import Engines
from tools.chaos.records import Record


@dataclass(frozen=True)
class Scores:
    """The scores of all greedy answers."""

    answers: int
    tokens: int
    worst_nat: float
    wrong: list[str]
    """A sentence for each answer with a token that is farther from the best one than a tie."""


def scorable(record: Record) -> bool:
    """Return whether the answer is greedy, has begun and its prompt is known, even if it was cut short."""
    return record.wish.greedy and record.num_tokens > 0 and bool(record.prompt_token_ids)


async def score(engines: Sequence[Engines], records: Sequence[Record]) -> Scores:
    """Score each answer with one prefill; each decode worker takes one at a time."""
    waiting = iter([record for record in records if scorable(record)])
    answers, tokens, worst_nat = 0, 0, 0.0
    wrong: list[str] = []

    async def one_after_the_other(engine: Engines) -> None:
        nonlocal answers, tokens, worst_nat
        for record in waiting:
            token_ids = record.choices[0].token_ids
            nats = await engine.behind_best_nats(record.prompt_token_ids, token_ids)
            answers, tokens, worst_nat = answers + 1, tokens + len(nats), max(worst_nat, *nats)
            position = next((position for position, nat in enumerate(nats) if not engine.is_tie(nat)), None)
            if position is not None:
                wrong.append(
                    f"request {record.wish.number}: token {position} of {len(nats)} is {nats[position]:.3f} nat from "
                    f"the best ({sum(not engine.is_tie(nat) for nat in nats)} such tokens)"
                )

    await asyncio.gather(*(one_after_the_other(engine) for engine in engines))
    return Scores(answers, tokens, worst_nat, wrong)
