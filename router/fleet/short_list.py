"""Which workers of a large fleet are worth a prediction, by three rules of thumb. Used by `router.flow.choice`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Final

from router.fleet.worker import Outstanding, Worker

BY_EACH_RULE: Final = 3
"""Workers that are looked at by each rule."""


def short_list(
    workers: Sequence[Worker], needed_blocks: int, prefixes: Sequence[tuple[bool, int]] = ()
) -> Sequence[Worker]:
    """Return the workers with the fewest prompt tokens to compute, those with the most of this prompt in their caches,
    and, with room for its KV blocks, those with the fewest answers of those that have any: they are the cheapest to add
    to.

    A worker that favours a phase comes last for the other one. `prefixes` says of each worker whether it computes the
    same prompt now, which goes before all that caches have, and how many of its tokens it has; empty if no worker has
    any. In a fleet of no more workers than the rules may name, all are returned.
    """
    if len(workers) <= 3 * BY_EACH_RULE:
        return workers
    now = [worker.outstanding for worker in workers]
    by_answers = sorted(range(len(workers)), key=[one.decodes for one in now].__getitem__)
    by_prompts = sorted(by_answers, key=[one.prompt_tokens for one in now].__getitem__)
    by_known = sorted(
        (place for place, (_, tokens) in enumerate(prefixes) if tokens),
        key=lambda place: (not prefixes[place][0], -prefixes[place][1]),
    )
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
    chosen = {place for rule in (for_prompts, with_room, by_known) for place in islice(rule, BY_EACH_RULE)}
    return [workers[place] for place in sorted(chosen)]


def _gathers(now: Outstanding) -> bool:
    return now.favours == "decode" or (now.favours is None and now.decodes > 0)
