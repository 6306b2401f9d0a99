"""What predictions need that no worker reports: how long answers become, and how fast KV moves between two workers.

Told by `router.flow.placement` when an answer is complete; read by `router.flow.choice`.
"""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 0.05
"""The weight of the newest answer or hand-off in a mean."""
UNKNOWN_PART: Final = 0.5
"""The part of its longest length that an answer is expected to have before any has ended."""
UNKNOWN_OUTPUT_TOKENS: Final = 128
"""The expected length of an answer that names no longest length, before one has ended."""
UNKNOWN_BYTES_PER_S: Final = 1e9
"""How fast KV is expected to move between two workers before it has."""
LEAST_LINK_S: Final = 1e-4
"""Hand-offs in less time say nothing of the rate."""


class Learned:
    """Means over the latest answers; one object per placement."""

    def __init__(self) -> None:
        self._part = UNKNOWN_PART
        self._output_tokens = float(UNKNOWN_OUTPUT_TOKENS)
        self._bytes_per_s: dict[tuple[str, str], float] = {}

    def answered(self, longest_tokens: int, output_tokens: int) -> None:
        """Learn from a complete answer; `longest_tokens` is 0 if it might have been of any length."""
        self._output_tokens += WEIGHT * (output_tokens - self._output_tokens)
        if longest_tokens:
            self._part += WEIGHT * (min(1.0, output_tokens / longest_tokens) - self._part)

    def moved(self, source: str, sink: str, num_bytes: int, took_s: float) -> None:
        """Learn from a hand-off between two workers."""
        if num_bytes and took_s >= LEAST_LINK_S:
            before = self._bytes_per_s.get((source, sink), num_bytes / took_s)
            self._bytes_per_s[source, sink] = before + WEIGHT * (num_bytes / took_s - before)

    def output_tokens(self, longest_tokens: int) -> float:
        """Return the expected length of an answer, which may have `longest_tokens` (0: any number)."""
        return max(1.0, self._part * longest_tokens) if longest_tokens else self._output_tokens

    def bytes_per_s(self, source: str, sink: str) -> float:
        """Return how fast KV moves from one worker to the other."""
        return self._bytes_per_s.get((source, sink), UNKNOWN_BYTES_PER_S)

    def forget(self, worker_id: str) -> None:
        """Forget the links of a worker that has left."""
        self._bytes_per_s = {pair: rate for pair, rate in self._bytes_per_s.items() if worker_id not in pair}
