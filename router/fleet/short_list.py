"""Which workers of a large fleet are worth a prediction, by three rules of thumb. Used by `router.flow.choice`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, filterfalse, islice
from typing import Final

from router.fleet.worker import Worker

BY_EACH_RULE: Final = 3
"""Workers that are looked at by each rule."""


def short_list(workers: Sequence[Worker], needed_blocks: int, cached_tokens: Sequence[int] = ()) -> Sequence[Worker]:
    """Return the workers with the fewest prompt tokens to compute, those with the most of this prompt in their caches,
    and, with room for its KV blocks, those with the fewest answers of those that have any: they are the cheapest to add
    to.

    A worker that favours a phase comes last for the other one. `cached_tokens` are those of each worker, if any are
    known. In a fleet of no more workers than the rules may name, all are returned.
    """
    if len(workers) <= 3 * BY_EACH_RULE:
        return workers
    now = [worker.outstanding for worker in workers]
    by_answers = sorted(range(len(workers)), key=[one.decodes for one in now].__getitem__)
    by_prompts = sorted(by_answers, key=[one.prompt_tokens for one in now].__getitem__)
    by_known = sorted(
        (place for place, tokens in enumerate(cached_tokens) if tokens), key=lambda at: -cached_tokens[at]
    )

    def computes(place: int) -> bool:
        return now[place].favours != "decode"

    def decodes(place: int) -> bool:
        favours = now[place].favours
        return favours == "decode" or (favours is None and now[place].decodes > 0)

    with_room = (place for place in _these_first(decodes, by_answers) if workers[place].has_room(needed_blocks))
    rules = (_these_first(computes, by_prompts), with_room, by_known)
    chosen = {place for rule in rules for place in islice(rule, BY_EACH_RULE)}
    return [workers[place] for place in sorted(chosen)]


def _these_first(preferred: Callable[[int], bool], places: Sequence[int]) -> Iterable[int]:
    return chain(filter(preferred, places), filterfalse(preferred, places))
