"""Statistics that predictions need and no worker reports.

How long answers become, how fast KV moves between two workers, which worker has the beginning of which prompt,
and how long requests are outside of engines.

Told of first tokens and complete answers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

from ridgeline.contracts.workers import WorkerDescription
from ridgeline.router.fleet.prefixes import BlockHashes, PrefixIndex
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.scheduler.traffic import Traffic

logger = logging.getLogger(__name__)

WEIGHT: Final = 0.05
"""The weight of the newest answer or hand-off in a mean."""
REMEMBERED: Final = 64
"""The latest answers of which it is known what three quarters of them reach."""
UNKNOWN_PART: Final = 0.5
"""The part of its longest length that an answer is expected to have before any has ended."""
UNKNOWN_OUTPUT_TOKENS: Final = 128
"""The expected length of an answer that names no longest length, before one has ended."""
UNKNOWN_BYTES_PER_S: Final = 1e9
"""How fast KV is expected to move between two workers before that has been measured. It is measured only for hand-offs
that were fetched whole after prefill (`transfer.overlap` off, or no room to overlap): of the others, only the last
segment is timed."""
LEAST_LINK_S: Final = 1e-4
"""Hand-offs in less time say nothing of the rate."""
REMEMBERED_FETCHES: Final = 8
"""The latest fetches for later turns of which the fastest is what the next one is expected to take: a few slow ones,
after which none would be tried, prove nothing."""


class _Mean:
    """A mean in which older values weigh less and less; the first ones count alike."""

    def __init__(self, unknown: float) -> None:
        self.value = float(unknown)
        self._number = 0

    def add(self, value: float) -> None:
        self._number += 1
        self.value += max(WEIGHT, 1 / self._number) * (value - self.value)


class _Low:
    """What three quarters of the latest values reach; 0 before there is one."""

    def __init__(self) -> None:
        self.value = 0.0
        self._values: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, value: float) -> None:
        self._values.append(value)
        self.value = sorted(self._values)[len(self._values) // 4]


class _Fetches:
    """The seconds of the latest fetches between two workers: of a byte, and before the first one."""

    def __init__(self, bytes_per_s: float) -> None:
        self._per_byte_s = deque([1 / bytes_per_s], maxlen=REMEMBERED_FETCHES)
        self._waits_s = deque([0.0], maxlen=REMEMBERED_FETCHES)

    def add(self, num_bytes: int, wire_s: float, waited_s: float) -> None:
        self._per_byte_s.append(wire_s / num_bytes)
        self._waits_s.append(waited_s)

    def fetch_s(self, num_bytes: int) -> float:
        return min(self._waits_s) + num_bytes * min(self._per_byte_s)


class Learned:
    """Means over the latest answers, and a record of prompts; one object per placement."""

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self.traffic = Traffic()
        self._outside_s: deque[float] = deque(maxlen=REMEMBERED)
        self._prompt_tokens = _Mean(UNKNOWN_OUTPUT_TOKENS)
        self._part = _Mean(UNKNOWN_PART)
        self._output_tokens = _Mean(UNKNOWN_OUTPUT_TOKENS)
        self._sure_part, self._sure_tokens = _Low(), _Low()
        self._bytes_per_s: dict[tuple[str, str], float] = {}
        self._fetches: dict[tuple[str, str], _Fetches] = {}
        self._exchanging: set[str] = set()
        """The workers in their keys."""

    def answered(self, demand: Demand, output_tokens: int) -> None:
        """Learn from a complete answer."""
        self._prompt_tokens.add(demand.prompt_tokens)
        self._output_tokens.add(output_tokens)
        self._sure_tokens.add(output_tokens)
        if demand.output_tokens:
            part = min(1.0, output_tokens / demand.output_tokens)
            self._part.add(part)
            self._sure_part.add(part)

    @property
    def prompt_tokens(self) -> float:
        """The mean length of prompts."""
        return self._prompt_tokens.value

    def had_overhead(self, took_s: float) -> None:
        """Learn for how long a prompt and its first token were outside of the engine."""
        self._outside_s.append(took_s)

    @property
    def overhead_s(self) -> float:
        """The median of the latest of these times; 0 before there is one."""
        return median(self._outside_s) if self._outside_s else 0.0

    def moved(self, source: str, sink: str, num_bytes: int, took_s: float) -> None:
        """Learn from a hand-off between two workers."""
        if num_bytes and took_s >= LEAST_LINK_S:
            self._exchanging |= {source, sink}
            before = self._bytes_per_s.get((source, sink), num_bytes / took_s)
            self._bytes_per_s[source, sink] = before + WEIGHT * (num_bytes / took_s - before)

    def fetched(self, source: str, sink: str, num_bytes: int, wire_s: float, waited_s: float) -> None:
        """Learn from a fetch for a later turn."""
        if num_bytes:
            self._exchanging |= {source, sink}
            known = self._fetches.setdefault((source, sink), _Fetches(self.mean_bytes_per_s))
            known.add(num_bytes, wire_s, waited_s)

    def fetch_s(self, source: str, sink: str, num_bytes: int) -> float:
        """Return the seconds that a fetch for a later turn takes at least, without the step of the source's engine."""
        known = self._fetches.get((source, sink))
        return num_bytes / self.mean_bytes_per_s if known is None else known.fetch_s(num_bytes)

    def forget_all_but(self, worker_ids: Sequence[str]) -> None:
        """Forget what is known of workers that have left; their ids are never used again."""
        there = {*worker_ids}
        if self.prefixes.workers > len(there):
            self.prefixes.forget_all_but(worker_ids)
        if not there.issuperset(self._exchanging):
            self._exchanging &= there
            self._bytes_per_s = {pair: rate for pair, rate in self._bytes_per_s.items() if there.issuperset(pair)}
            self._fetches = {pair: known for pair, known in self._fetches.items() if there.issuperset(pair)}

    def output_tokens(self, longest_tokens: int) -> float:
        """Return the expected length of an answer, which may have `longest_tokens` (0: any number); at least 1."""
        return max(1.0, self._part.value * longest_tokens if longest_tokens else self._output_tokens.value)

    def sure_tokens(self, longest_tokens: int) -> float:
        """Return a length that three of four answers have at least, as a part of their longest one and as a number.

        0 as long as none has ended.
        """
        tokens = self._sure_tokens.value
        return min(tokens, self._sure_part.value * longest_tokens) if longest_tokens else tokens

    @property
    def mean_bytes_per_s(self) -> float:
        """How fast KV moves between two workers, on average over those of which it is known."""
        known = self._bytes_per_s.values()
        return sum(known) / len(known) if known else UNKNOWN_BYTES_PER_S

    def computed(self, worker: WorkerDescription, prefix: BlockHashes) -> None:
        """Record that a worker has these blocks in its KV cache."""
        if prefix:
            most_blocks, tokens = worker.most_prefix_blocks, worker.prefix_block_tokens
            self.prefixes.computed(worker.worker_id, worker.incarnation, prefix, most_blocks, tokens)

    def had(self, worker: WorkerDescription, prefix: BlockHashes, cached_tokens: int, expected_tokens: int) -> None:
        """Correct the record by what a worker had of a prompt, of which `expected_tokens` were expected."""
        if not self.prefixes.corrected(worker.worker_id, prefix, cached_tokens, expected_tokens):
            logger.warning(
                "%s has less than half of the prefixes that it should have: it is chosen by load until more is known",
                worker.worker_id,
            )
