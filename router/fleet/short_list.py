"""Which workers of a large fleet are worth a prediction, by three rules of thumb.

The numbers were chosen by simulation (`tools.bench.simulated_modes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import islice
from typing import Final, Protocol, TypeVar

from ridgeline.router.fleet.worker import Outstanding

FOR_PROMPT: Final = 3
"""Workers that are looked at because they would compute the prompt soon."""
FOR_ANSWER: Final = 2
"""Workers that are looked at because they have few answers."""
FOR_PREFIX: Final = 3
"""Workers that are looked at because they have the beginning of the prompt."""
DOUBLES: Final = 2
"""So many answers that a worker has or will have are taken to double the time of prompts there, twice as many to treble
it, and so on."""
LAST: Final = 1 << 48
"""A rank this many times that of another worker, or this much more, comes after those of all others."""


class Listed(Protocol):
    """What the rules look at; of the product it is `ridgeline.router.fleet.worker.Worker`."""

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
    holders: Callable[[Set[One]], Iterable[Sequence[One]]] = lambda _: (),
) -> Sequence[One]:
    """Return the workers that may be best for a prompt of so many tokens.

    They are those that would be the first to have computed it, at least one of them from `open_workers`, which take a
    prompt now; those that have more of it in their caches than these; and, with room for its KV blocks, those with the
    fewest answers of those that have any: they are the cheapest to add to.

    A worker that favours a phase comes last for the other one. `holders` returns the workers that have any of the
    prompt: in the first group those that compute it now, then those that have the most of it, and so on. It is called
    with those that were chosen by then, and may end before the first group that has one of them. In a fleet of no more
    workers than the rules may name, all are returned.
    """
    if len(workers) <= FOR_PROMPT + FOR_ANSWER + FOR_PREFIX:
        return workers
    now, own_tokens = [worker.outstanding for worker in workers], max(1, prompt_tokens)
    soon = [
        (one.prompt_tokens + own_tokens) * (DOUBLES + one.decodes) * (LAST if one.favours == "decode" else 1)
        for one in now
    ]
    cheap = [
        (one.decodes or LAST) if one.favours is None else one.decodes + 2 * LAST * (one.favours == "prefill")
        for one in now
    ]
    by_prompts = [workers[place] for place in sorted(range(len(now)), key=soon.__getitem__)]
    by_answers = (workers[place] for place in sorted(range(len(now)), key=cheap.__getitem__))
    chosen = set(by_prompts[:FOR_PROMPT])
    if chosen.isdisjoint(open_workers):
        chosen.update(islice((worker for worker in by_prompts if worker in open_workers), 1))
    chosen.update(_with_more_than(chosen, holders(chosen)))
    chosen.update(islice((worker for worker in by_answers if worker.has_room(needed_blocks)), FOR_ANSWER))
    return [worker for worker in workers if worker in chosen]


def _with_more_than(chosen: Set[One], holders: Iterable[Sequence[One]]) -> list[One]:
    """Return workers that have more of a prompt than those that are chosen already, `FOR_PREFIX` of them at most."""
    more: list[One] = []
    for group in holders:
        if len(more) >= FOR_PREFIX or not chosen.isdisjoint(group):
            break
        more += sorted(group, key=lambda worker: worker.outstanding.prompt_tokens)
    return more[:FOR_PREFIX]
