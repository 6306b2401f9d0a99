"""The cores on which each rank of a CPU engine computes, in the format of vLLM's VLLM_CPU_OMP_THREADS_BIND.

The worker sets it before the engine starts (`bind_list`); each rank's connector reads its own part
(`cores_of_rank`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def bind_list(cores: Sequence[int], ranks: int) -> str:
    """Divide the cores into equal adjacent shares, one per rank: `0,1|2,3`. Raises ValueError if they do not divide.

    vLLM binds each rank's OpenMP threads to its share.
    """
    share, rest = divmod(len(cores), ranks)
    if rest or not share:
        raise ValueError(f"{len(cores)} cores cannot be shared evenly by {ranks} ranks")
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))


def cores_of_rank(bound: str, rank: int) -> set[int]:
    """Return the rank's share; empty if the variable is not a list as `bind_list` makes it."""
    shares = bound.split("|")
    try:
        return {int(core) for core in shares[rank].split(",")}
    except (IndexError, ValueError):
        return set()


@contextmanager
def helpers_on_all_cores_of(rank: int) -> Iterator[None]:
    """Let threads started inside this block run on any of the rank's cores.

    OpenMP binds a rank's main thread to the first core of its share, and threads started from it would inherit that.
    Fetching and serving KV would then slow down the one thread that every forward waits for.
    """
    cores = cores_of_rank(os.environ.get(BIND_VARIABLE, ""), rank)
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
