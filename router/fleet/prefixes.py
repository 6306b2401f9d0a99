"""What a router knows of the prompts in the prefix cache of each worker, from its own record. No clock or I/O.

The router knows the tokens of every prompt and where it was computed, so it can tell which worker need not compute the
beginning of the next one again. It does not see what an engine evicts: the record is as long as the engine's cache, is
forgotten in the same order, and is corrected when an engine says how much of a prompt it really had. So it is a hint. A
wrong one costs a worse choice of worker, never a wrong answer: engines look for themselves, by hashes of their own. The
reasons are in `docs/decisions/0013-prefix-record-and-nearness.md`.

**Memory.** At most as many blocks for each worker as it has KV blocks, at 220 to 360 bytes each: 12 MB for a worker of
32,768 blocks. Where groups of layers share these blocks, the record is shorter.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

BlockHashes = tuple[int, ...]
"""One for each whole block of a prompt, in order; each stands for all tokens up to the end of its block."""
CLEARED_AT_ONCE = 1000
"""Blocks of forgotten workers that are cleared away when a prompt is recorded, which takes some 0.3 ms."""
JUDGED_PROMPTS = 32
LEAST_CONFIRMED = 0.5
"""A record of which engines confirm a smaller part over `JUDGED_PROMPTS` prompts is given up."""


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str | None = None) -> BlockHashes:
    """Hash each whole block of a prompt together with all before it, and with the salt of its request.

    The same in every process on machines of one byte order, since routers and their dispatcher compare them.

    The hash is a fast one of 64 bits, not one that withstands attacks. Two prompts that collide look alike to the
    router, and the second may be sent where the first was computed: it is then computed there in full, as anywhere.
    """
    block_bytes = 4 * block_size
    content = array("I", token_ids).tobytes()
    digest = xxhash.xxh3_64_intdigest
    link = 0 if salt is None else digest(salt.encode(), 1)
    hashes = []
    for start in range(0, len(content) - block_bytes + 1, block_bytes):
        link = digest(content[start : start + block_bytes], link)
        hashes.append(link)
    return tuple(hashes)


def _beginning(hashes: BlockHashes, blocks: Mapping[int, object]) -> int:
    """Return how many of a prompt's first blocks are known; if one is, all before it are."""
    if not hashes or hashes[0] not in blocks:
        return 0
    return len(hashes) - bisect_left(hashes[::-1], True, key=blocks.__contains__)


@dataclass
class _Record:
    """What one incarnation of a worker has computed."""

    incarnation: str
    block_tokens: int
    bit: int
    """Stands for it in what is known of a block; a power of two."""
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """From the one used longest ago to the latest. Of one prompt the first block is the latest, as in vLLM, which frees
    the blocks of a request from its end. So a block is never here without all that come before it in its prompts."""
    judged_prompts: int = 0
    expected_tokens: int = 0
    confirmed_tokens: int = 0

    def confirms(self, expected_tokens: int, confirmed_tokens: int) -> bool:
        """Count one more prompt; return whether the record is good enough to go on with."""
        self.judged_prompts += 1
        self.expected_tokens += expected_tokens
        self.confirmed_tokens += confirmed_tokens
        if self.judged_prompts < JUDGED_PROMPTS:
            return True
        good = self.confirmed_tokens >= LEAST_CONFIRMED * self.expected_tokens
        self.judged_prompts = self.expected_tokens = self.confirmed_tokens = 0
        return good


class PrefixMatch:
    """How much of one prompt each worker has, as far as known, until the index is told of something new.

    However many workers have as much as each other, to find them takes as many looks into one table as it takes to
    halve the prompt.
    """

    def __init__(
        self,
        hashes: BlockHashes,
        records: Mapping[str, _Record],
        holders: Mapping[int, int],
    ) -> None:
        """`holders` has the bits of all workers that have a block. For `PrefixIndex`."""
        self._hashes = hashes
        self._records = records
        self._holders = holders
        self._groups: list[tuple[int, int]] = []
        """The bits of workers that have equally many blocks, and how many; those with the most first. More of them are
        looked up when they are asked for."""
        self._grouped = 0
        """The bits of all of these."""
        self._most_blocks = _beginning(hashes, holders)
        """What any other worker has at most."""

    def cached_tokens(self, worker_id: str, incarnation: str) -> int:
        """Return how many of the prompt's first tokens this incarnation of a worker has.

        An engine computes at least the last token of a prompt, so it uses one block less of a prompt that it has whole.
        """
        record = self._records.get(worker_id)
        if record is None or record.incarnation != incarnation:
            return 0
        for bits, blocks in self._groups:
            if bits & record.bit:
                return record.block_tokens * blocks
        return record.block_tokens * _beginning(self._hashes[: self._most_blocks], record.blocks)

    def cached_tokens_by_worker(self) -> dict[str, tuple[str, int]]:
        """Return, for each worker that has any of the prompt, the incarnation that has it, and how many tokens."""
        while self._look_up_group():
            pass
        return {
            worker_id: (record.incarnation, record.block_tokens * blocks)
            for bits, blocks in self._groups
            for worker_id, record in self._records.items()
            if record.bit & bits
        }

    def groups(self, enough: Iterable[str] = ()) -> Iterator[list[str]]:
        """Yield the ids of workers that have any of the prompt, the most first, those with as much in one list.

        The lists end before the first one with a worker of `enough`.
        """
        records, place = self._records, 0
        last = sum(records[worker_id].bit for worker_id in enough if worker_id in records)
        while place < len(self._groups) or self._look_up_group():
            bits, _ = self._groups[place]
            if bits & last:
                return
            place += 1
            if worker_ids := [worker_id for worker_id, record in records.items() if record.bit & bits]:
                yield worker_ids

    def _look_up_group(self) -> bool:
        """Look the next group up; return whether there is one."""
        hashes, holders, others = self._hashes, self._holders, ~self._grouped
        if self._groups:
            # Whoever has a block has all before it, so those in no group yet have a beginning of the last one's blocks.
            # Not so if two prompts have a hash in common by collision: then a worker may come too late, or never.
            self._most_blocks = bisect_left(
                hashes, True, 0, self._most_blocks, key=lambda one: not holders.get(one, 0) & others
            )
        if not self._most_blocks:
            return False
        bits = holders[hashes[self._most_blocks - 1]] & others
        self._groups.append((bits, self._most_blocks))
        self._grouped |= bits
        return True


class PrefixIndex:
    """The record of all workers. A worker of which nothing is known has 0 tokens of everything."""

    def __init__(self) -> None:
        self.expected_tokens_total = 0
        """Tokens that the record promised, of the prompts for which engines have said what they had."""
        self.confirmed_tokens_total = 0
        """Those of them that the engines had."""
        self.given_up_total = 0
        """Number of records that were given up because engines did not confirm them."""
        self._records: dict[str, _Record] = {}
        self._holders: dict[int, int] = {}
        """The bits of all workers that have a block; without blocks that none has."""
        self._left_over: list[_Record] = []
        """Of workers that were forgotten, whose bits are still among the holders."""

    def look_up(self, hashes: BlockHashes) -> PrefixMatch:
        """Look a prompt up."""
        return PrefixMatch(hashes, self._records, self._holders)

    def computed(
        self, worker_id: str, incarnation: str, hashes: BlockHashes, most_blocks: int, block_tokens: int
    ) -> None:
        """Record that a worker has a prompt in its KV cache, which keeps at most so many blocks of so many tokens.

        Call it when the first token is there; before that an engine has nothing of it that another prompt could use.
        Another incarnation than the last one begins with nothing.
        """
        self._clear_left_over(CLEARED_AT_ONCE)
        record = self._records.get(worker_id)
        if record is None or record.incarnation != incarnation:
            self.forget(worker_id)
            record = self._records[worker_id] = _Record(incarnation, block_tokens, self._free_bit())
        blocks, holders, bit = record.blocks, self._holders, record.bit
        for one in reversed(hashes[:most_blocks]):
            if one not in blocks:
                blocks[one] = None
                holders[one] = holders[one] | bit if one in holders else bit
            else:
                blocks.move_to_end(one)
        self._forget_oldest(record, len(blocks) - most_blocks)

    def corrected(self, worker_id: str, hashes: BlockHashes, cached_tokens: int, expected_tokens: int) -> bool:
        """Correct the record by what an engine had of a prompt when it began it; return False if that gives it up.

        `expected_tokens` is what `cached_tokens` said when the worker was chosen: without it, two prompts that begin
        alike and start together, of which neither can have the other's KV, would look like a loss. Call it before
        `computed` for the same prompt, and for every prompt of which something was expected, also if all of it was
        there. Only for prompts that read the prefix cache, on workers that compute them: prompts with `prompt_logprobs`
        do not, and what a decode worker counts includes KV that it has fetched.

        For each block that is missing, the one used longest ago is forgotten: the engine keeps less than the record
        does, since answers take room there too, and it evicts those first. The prompt itself is not forgotten, because
        by now it has been computed again. A record that promises more than twice what is there is forgotten as a whole,
        and the worker is again one of which nothing is known.
        """
        record = self._records.get(worker_id)
        if record is None or not expected_tokens:
            return True
        confirmed_tokens = min(cached_tokens, expected_tokens)
        had = confirmed_tokens // record.block_tokens
        expected = expected_tokens // record.block_tokens
        if expected == len(hashes) == had + 1:  # all there: the last block is the one computed for the last token
            confirmed_tokens = expected_tokens
            had = expected
        self.expected_tokens_total += expected_tokens
        self.confirmed_tokens_total += confirmed_tokens
        if not record.confirms(expected_tokens, confirmed_tokens):
            self.given_up_total += 1
            self.forget(worker_id)
            return False
        self._forget_oldest(record, min(expected - had, len(record.blocks)))
        return True

    def forget(self, worker_id: str) -> None:
        """Forget what a worker had. Its blocks are cleared away when prompts are recorded, some of them each time."""
        record = self._records.pop(worker_id, None)
        if record is not None:
            self._left_over.append(record)

    def forget_all(self) -> None:
        """Forget all workers, because their caches were emptied."""
        self._records.clear()
        self._left_over.clear()
        self._holders.clear()

    def forget_all_but(self, worker_ids: Collection[str]) -> None:
        """Forget the workers that are none of these."""
        for worker_id in self._records.keys() - set(worker_ids):
            self.forget(worker_id)

    @property
    def workers(self) -> int:
        """Number of workers of which anything is recorded."""
        return len(self._records)

    def blocks_of(self, worker_id: str) -> int:
        """Return how many blocks are recorded for a worker."""
        record = self._records.get(worker_id)
        return 0 if record is None else len(record.blocks)

    def _forget_oldest(self, record: _Record, blocks: int) -> None:
        for _ in range(blocks):
            one, _known = record.blocks.popitem(last=False)
            if others := self._holders[one] & ~record.bit:
                self._holders[one] = others
            else:
                del self._holders[one]

    def _clear_left_over(self, blocks: int) -> None:
        while self._left_over and blocks:
            record = self._left_over[-1]
            cleared = min(blocks, len(record.blocks))
            self._forget_oldest(record, cleared)
            blocks -= cleared
            if not record.blocks:
                self._left_over.pop()

    def _free_bit(self) -> int:
        """Return the lowest bit that stands for no worker."""
        taken = sum(record.bit for record in (*self._records.values(), *self._left_over))
        return ~taken & (taken + 1)
