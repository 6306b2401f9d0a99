"""Which workers of a large fleet are worth a prediction, by three rules of thumb. Used by `router.flow.choice`.

The numbers were chosen by simulation (`tools.bench.simulated_modes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import chain, islice
from typing import Final, Protocol, TypeVar

from router.fleet.worker import Outstanding

FOR_PROMPT: Final = 3
"""Workers that are looked at because they would compute the prompt soon."""
FOR_ANSWER: Final = 2
"""Workers that are looked at because they have few answers."""
FOR_PREFIX: Final = 3
"""Workers that are looked at because they have the beginning of the prompt."""
BESIDE_ANSWERS: Final = 0.5
"""Each answer that a worker has or will have is taken to slow prompts there by this part of their time without any."""


class Listed(Protocol):
    """What the rules look at; of the product it is `router.fleet.worker.Worker`."""

    @property
    def outstanding(self) -> Outstanding:
        """What is outstanding on the worker."""
        ...

    def has_room(self, blocks: int) -> bool:
        """Return whether one more sequence of so many KV blocks has room."""
        ...


One = TypeVar("One", bound=Listed)


def short_list(
    workers: Sequence[One],
    prompt_tokens: int,
    needed_blocks: int,
    open_workers: Set[One],
    holders: Iterable[Sequence[One]] = (),
) -> Sequence[One]:
    """Return the workers that would be the first to have computed a prompt of so many tokens, at least one of them from
    `open_workers`, which take a prompt now; those that have more of it in their caches than these; and, with room for
    its KV blocks, those with the fewest answers of those that have any: they are the cheapest to add to.

    A worker that favours a phase comes last for the other one. `holders` are the workers that have any of the prompt:
    in the first group those that compute it now, then those that have the most of it, and so on. In a fleet of no more
    workers than the rules may name, all are returned.
    """
    if len(workers) <= FOR_PROMPT + FOR_ANSWER + FOR_PREFIX:
        return workers
    now = [worker.outstanding for worker in workers]
    soon = [(one.prompt_tokens + prompt_tokens) * (1.0 + BESIDE_ANSWERS * one.decodes) for one in now]
    by_prompts = sorted(range(len(workers)), key=soon.__getitem__)
    by_answers = sorted(range(len(workers)), key=[one.decodes for one in now].__getitem__)
    for_prompts = chain(
        (place for place in by_prompts if now[place].favours != "decode"),
        (place for place in by_prompts if now[place].favours == "decode"),
    )
    for_answers = chain(
        (place for place in by_answers if _gathers(now[place])),
        (place for place in by_answers if now[place].favours is None and not now[place].decodes),
        (place for place in by_answers if now[place].favours == "prefill"),
    )
    with_room = (place for place in for_answers if workers[place].has_room(needed_blocks))
    chosen = {workers[place] for place in islice(for_prompts, FOR_PROMPT)}
    if chosen.isdisjoint(open_workers):
        chosen.update(islice((workers[place] for place in for_prompts if workers[place] in open_workers), 1))
    chosen.update(_with_more_than(chosen, holders))
    chosen.update(workers[place] for place in islice(with_room, FOR_ANSWER))
    return [worker for worker in workers if worker in chosen]


def _with_more_than(chosen: Set[One], holders: Iterable[Sequence[One]]) -> list[One]:
    """Return workers that have more of a prompt than those that are chosen already, `FOR_PREFIX` of them at most."""
    more: list[One] = []
    for group in holders:
        if len(more) >= FOR_PREFIX or not chosen.isdisjoint(group):
            break
        more += sorted(group, key=lambda worker: worker.outstanding.prompt_tokens)
    return more[:FOR_PREFIX]


def _gathers(now: Outstanding) -> bool:
    return now.favours == "decode" or (now.favours is None and now.decodes > 0)
