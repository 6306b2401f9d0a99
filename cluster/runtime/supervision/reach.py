"""Judges who is cut off, by what each head does not reach. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

SEVERAL = 2
"""One worker that only one head does not reach may be either's fault; so many are that head's."""


@dataclass(frozen=True)
class Verdict:
    """Who is cut off, and who is only suspected."""

    workers: frozenset[str] = frozenset()
    """Those that most of the heads do not reach."""
    deaf: frozenset[str] = frozenset()
    """Heads that reach none of several workers."""
    suspects: frozenset[str] = frozenset()
    """Heads that do not reach several workers which most of the others do. They serve with those that they reach: to
    start such a head again would end its streams and mend no route."""


def judge(unreached: Mapping[str, set[str]], workers: Collection[str]) -> Verdict:
    """Judge by the workers that each head does not reach; `unreached` has the heads that have answered."""
    several = len(workers) >= SEVERAL
    deaf = frozenset(head for head, names in unreached.items() if several and names.issuperset(workers))
    votes = {head: names for head, names in unreached.items() if head not in deaf}
    misses = {worker: sum(worker in names for names in votes.values()) for worker in workers}
    cut_off = frozenset(worker for worker, number in misses.items() if 2 * number > len(votes))
    suspects = frozenset(head for head, names in votes.items() if len(names - cut_off) >= SEVERAL)
    return Verdict(cut_off, deaf, suspects)
