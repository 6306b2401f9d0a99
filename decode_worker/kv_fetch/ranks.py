"""Which bytes of which source rank make up this rank's blocks, when the two sides split the KV heads differently.

Heads come first in a block, so the heads of a rank are one run of bytes, and splitting or joining is slicing. If this
side has two ranks with three heads each and the other side one rank with six, our second rank reads the second half of
each of its blocks. The other way round, our only rank reads two whole blocks and lays them side by side.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPart:
    """Bytes [source_start, source_start + num_bytes) of each block of `source_rank` go to `target_start` of ours."""

    source_rank: int
    source_start: int
    target_start: int
    num_bytes: int


def parts_for_rank(rank: int, our_ranks: int, their_ranks: int, our_block_bytes: int) -> list[RankPart]:
    """Return what rank `rank` of `our_ranks` reads from `their_ranks`, in the order it lies in our block.

    Raises ValueError if neither number of ranks divides the other.
    """
    if their_ranks >= our_ranks:
        ratio, rest = divmod(their_ranks, our_ranks)
        if rest or our_block_bytes % ratio:
            raise ValueError(f"the KV heads of {their_ranks} ranks cannot be joined on {our_ranks}")
        share = our_block_bytes // ratio
        return [RankPart(rank * ratio + i, 0, i * share, share) for i in range(ratio)]
    ratio, rest = divmod(our_ranks, their_ranks)
    if rest:
        raise ValueError(f"the KV heads of {their_ranks} ranks cannot be split over {our_ranks}")
    return [RankPart(rank // ratio, (rank % ratio) * our_block_bytes, 0, our_block_bytes)]


def readers_per_source(our_ranks: int, their_ranks: int) -> int:
    """Return how many of our ranks read from one of theirs, and so must release before its blocks are free."""
    return max(1, our_ranks // their_ranks)
