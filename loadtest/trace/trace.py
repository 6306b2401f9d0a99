"""The data types of a trace: arrivals and lengths."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

DEMO_FILE = Path(__file__).parents[1] / "data" / "demo.jsonl"
MOONCAKE_BLOCK_TOKENS = 512
LEAST_GAPS = 10


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: its arrival time, its lengths, and the shared prefix blocks that its prompt begins with.

    A later request of a `session` arrives with its first. It is sent `think_s` after the last of the rows in `after`
    has been answered, and no earlier than `offset_s` after its session began. These rows are before it in the trace;
    several may be after one, such as parallel sub-agents. Its prompt begins with the prompt and the answer of the first
    row in `after`, and its `prefix_ids` are those of the tokens that it adds; if it is `fresh`, it begins anew.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    session: str | None = None
    think_s: float = 0.0
    offset_s: float = 0.0
    after: tuple[int, ...] = ()
    fresh: bool = False

    @property
    def continues(self) -> int | None:
        """The row whose conversation its prompt goes on from; None if it begins one."""
        return None if self.fresh or not self.after else self.after[0]


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows sorted by arrival, the first at 0 s. `notes` lists all changes made to them since they were read.

    Their `prefix_ids` are numbered from 0 on.
    """

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


def in_order(rows: Sequence[TraceRow], order: Iterable[int]) -> tuple[TraceRow, ...]:
    """Return the rows at these places in this order.

    What was after a row that is left out is after the rows which that one was after. Its prompt begins anew if it went
    on from a row that is left out.
    """
    places = {place: now for now, place in enumerate(order)}
    if not any(row.after for row in rows):
        return tuple(rows[place] for place in places)
    found: list[tuple[int, ...]] = []
    for place, row in enumerate(rows):
        before = tuple(dict.fromkeys(each for parent in row.after for each in found[parent]))
        found.append((places[place],) if place in places else before)
    kept = []
    for place in places:
        row = rows[place]
        after = tuple(dict.fromkeys(each for parent in row.after for each in found[parent]))
        begins = row.fresh or (row.continues is not None and row.continues not in places)
        kept.append(replace(row, after=after, fresh=begins))
    return tuple(kept)


def tick_of(rows: tuple[TraceRow, ...]) -> float | None:
    """Return the least time between arrivals that differ, if most do not; None if arrivals are not quantised."""
    starts_s = [row.arrival_s for row in rows if row.session is None]
    gaps_s = [after - before for before, after in itertools.pairwise(starts_s)]
    if len(gaps_s) < LEAST_GAPS or sum(gap_s == 0 for gap_s in gaps_s) < len(gaps_s) / 2 or not any(gaps_s):
        return None
    return min(gap_s for gap_s in gaps_s if gap_s > 0)
