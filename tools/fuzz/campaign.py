"""Runs a check on many generated examples, in seeded batches, and reports progress.

Hypothesis remembers every example of a test, so that no two are alike. A long run is therefore many tests of
`BATCH_EXAMPLES` each: memory stays flat, progress can be shown, and a batch can be repeated by its seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import psutil
from hypothesis import strategies as st

BATCH_EXAMPLES = 500
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Campaign:
    """One kind of input: how to generate it, and the check for each, which raises AssertionError if it fails."""

    name: str
    share: float
    """Of the examples of a long run, from 0 to 1."""
    examples: st.SearchStrategy[Any]
    check: Callable[[Any], None]


@dataclass(frozen=True)
class Footprint:
    """The resources of a process; a leak shows in one of the three."""

    rss_bytes: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Measure a process. Raises psutil.NoSuchProcess if it has ended."""
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(process.memory_info().rss, process.num_threads(), process.num_fds())

    def __str__(self) -> str:
        return f"{self.rss_bytes / MEBIBYTE:.0f} MiB, {self.threads} threads, {self.descriptors} descriptors"


def run(campaign: Campaign, examples: int, seed: int, on_batch: Callable[[int], None] = lambda _: None) -> int:
    """Check this many examples; fail at the first bad one with the smallest input that shows the failure.

    Returns how many were checked, a few more or fewer than asked for, and passes that to `on_batch` after each batch.
    """
    checked = 0

    def check(example: Any) -> None:
        nonlocal checked
        checked += 1
        campaign.check(example)

    batch = 0
    while checked < examples:
        test = hypothesis.given(example=campaign.examples)(check)
        test = hypothesis.settings(
            max_examples=min(BATCH_EXAMPLES, examples - checked),
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )(test)
        test = hypothesis.seed(batch_seed(campaign.name, seed, batch))(test)
        try:
            test()
        except BaseException as error:
            error.add_note(f"in batch {batch} of '{campaign.name}', SEED={seed}")
            raise
        batch += 1
        on_batch(checked)
    return checked


def batch_seed(name: str, seed: int, batch: int) -> int:
    """Return a seed that differs for every batch of every campaign and is the same in every run."""
    return int.from_bytes(hashlib.sha256(f"{name} {seed} {batch}".encode()).digest()[:8], "little")
