"""Judges who is partitioned, by what each router does not reach. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

SEVERAL = 2
"""One worker that only one router does not reach may be either's fault; so many are that router's."""


@dataclass(frozen=True)
class Partitions:
    """Who is partitioned, and who is only suspected."""

    workers: frozenset[str] = frozenset()
    """Those that most of the routers do not reach."""
    deaf: frozenset[str] = frozenset()
    """Routers that reach none of several workers."""
    suspects: frozenset[str] = frozenset()
    """Routers that do not reach several workers which most of the others do. They serve with those that they reach: to
    start such a router again would end its streams and mend no route."""


def judge(unreached: Mapping[str, set[str]], workers: Collection[str]) -> Partitions:
    """Judge by the workers that each router does not reach; `unreached` has the routers that have answered."""
    several = len(workers) >= SEVERAL
    deaf = frozenset(router for router, names in unreached.items() if several and names.issuperset(workers))
    votes = {router: names for router, names in unreached.items() if router not in deaf}
    misses = {worker: sum(worker in names for names in votes.values()) for worker in workers}
    partitioned = frozenset(worker for worker, number in misses.items() if 2 * number > len(votes))
    suspects = frozenset(router for router, names in votes.items() if len(names - partitioned) >= SEVERAL)
    return Partitions(partitioned, deaf, suspects)
