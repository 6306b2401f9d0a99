"""What this engine's prefix cache still has of a prompt, offered to an engine that would compute it.

A later turn of a conversation begins with the answer of the one before, which only the worker that decoded it has.
Nothing is kept for that: vLLM's own lookup says what is left, and only this is held, until it is read or its lease
ends. So nothing is lost if nobody comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from ridgeline.engine.connector.groups import CacheGroups

OFFER_LEASE_S: Final = 5.0
"""How long an offer is held that nobody reads: longer than a prompt waits in an engine's queue. Nobody renews it before
it is read, since two engines that wait for each other's blocks would keep each other waiting."""
MOST_OF_FREE: Final = 0.5
"""The part of the free blocks that an offer may take from the sequences that run."""


class CachedOffers:
    """The blocks that are held for readers beside those of vLLM's requests."""

    def __init__(self, groups: CacheGroups) -> None:
        self._groups = groups
        self._manager: Any = None
        self._held: dict[str, list[Any]] = {}

    def bind(self, kv_cache_manager: Any) -> None:
        """Take vLLM's manager of the KV cache, which exists later than this."""
        self._manager = kv_cache_manager

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, owner: str, block_hashes: Sequence[Any], num_tokens: int) -> tuple[list[int], int]:
        """Hold what is cached of a prompt of `num_tokens`; return the list of a hand-off and its number of tokens.

        The last token is left to the reader, which must compute something. Nothing is held if that would take too many
        of the free blocks.
        """
        coordinator = self._manager.coordinator
        found_tokens, tail_tokens = num_tokens, 1
        while tail_tokens:  # a state within a block may still be moved on by its sequence
            tables, found_tokens, _ = coordinator.find_longest_cache_hit(block_hashes, found_tokens - tail_tokens)
            tail_tokens = found_tokens % coordinator.scheduler_block_size
        if not found_tokens:
            return [], 0
        listed = self._groups.listed([[block.block_id for block in table] for table in tables], found_tokens)
        pool = self._manager.block_pool
        blocks = [pool.blocks[block_id] for block_id in listed]
        taken = sum(block.ref_cnt == 0 for block in blocks)
        if taken > MOST_OF_FREE * pool.get_num_free_blocks():
            return [], 0
        pool.touch(blocks)
        self._held[owner] = blocks
        return listed, found_tokens

    def free(self, owners: Iterable[str]) -> None:
        """Give up the blocks of those of these owners that hold any; they stay in the cache until vLLM needs room."""
        for owner in self._held.keys() & set(owners):
            self._manager.block_pool.free_blocks(reversed(self._held.pop(owner)))
