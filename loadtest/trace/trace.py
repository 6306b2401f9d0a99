"""The data types of a trace: arrivals and lengths.

Read by `loadtest.trace.readers`, changed by `loadtest.trace.shape`, sent by `loadtest.run.replay`.
"""

from dataclasses import dataclass
from pathlib import Path

DEMO_FILE = Path(__file__).parents[1] / "data" / "demo.jsonl"
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: its arrival time, its lengths, and the shared prefix blocks that its prompt begins with."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows sorted by arrival, the first at 0 s. `notes` lists all changes made to them since they were read."""

    name: str
    rows: tuple[TraceRow, ...]
    prefix_block_tokens: int = MOONCAKE_BLOCK_TOKENS
    notes: tuple[str, ...] = ()

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.rows[-1].arrival_s if self.rows else 0.0

    @property
    def mean_rate(self) -> float | None:
        """Mean arrivals per second; None for fewer than two rows or if all arrive at once."""
        return (len(self.rows) - 1) / self.span_s if self.span_s > 0 else None
