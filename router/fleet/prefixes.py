"""What a router knows of the prompts in the prefix cache of each worker, from its own record. No clock or I/O.

The router knows the tokens of every prompt and where it was computed, so it can tell which worker need not compute the
beginning of the next one again. It does not see what an engine evicts: the record is as long as the engine's cache, is
forgotten in the same order, and is corrected when an engine says how much of a prompt it really had. So it is a hint. A
wrong one costs a worse choice of worker, never a wrong answer: engines look for themselves, by hashes of their own. The
reasons are in `docs/decisions/0037-the-routers-own-record-of-prefixes.md`.

**Memory.** At most as many blocks for each worker as it has KV blocks, at 160 to 240 bytes each: 6 MB for a worker of
32,768 blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

BlockHashes = tuple[int, ...]
"""One for each whole block of a prompt, in order; each stands for all tokens up to the end of its block."""
JUDGED_PROMPTS = 32
LEAST_CONFIRMED = 0.5
"""A record of which engines confirm a smaller part over `JUDGED_PROMPTS` prompts is given up."""


def block_hashes(token_ids: Sequence[int], block_size_tokens: int, salt: str | None = None) -> BlockHashes:
    """Hash each whole block of a prompt together with all before it, and with the salt of its request.

    The same in every process on machines of one byte order, since routers and their dispatcher compare them.

    The hash is a fast one of 64 bits, not one that withstands attacks. Two prompts that collide look alike to the
    router, and the second may be sent where the first was computed: it is then computed there in full, as anywhere.
    """
    block_bytes = 4 * block_size_tokens
    content = array("I", token_ids).tobytes()
    digest = xxhash.xxh3_64_intdigest
    link = 0 if salt is None else digest(salt.encode(), 1)
    hashes = []
    for start in range(0, len(content) - block_bytes + 1, block_bytes):
        link = digest(content[start : start + block_bytes], link)
        hashes.append(link)
    return tuple(hashes)


@dataclass
class _Record:
    """What one incarnation of a worker has computed."""

    incarnation: str
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


class PrefixIndex:
    """The record of all workers. A worker of which nothing is known has 0 tokens of everything."""

    def __init__(self, block_size_tokens: int) -> None:
        self.block_size_tokens = block_size_tokens
        self.expected_tokens_total = 0
        """Tokens that the record promised, of the prompts for which engines have said what they had."""
        self.confirmed_tokens_total = 0
        """Those of them that the engines had."""
        self.given_up_total = 0
        """Number of records that were given up because engines did not confirm them."""
        self._records: dict[str, _Record] = {}

    def cached_tokens(self, worker_id: str, hashes: BlockHashes) -> int:
        """Return how many of a prompt's first tokens this worker has, as far as known.

        An engine computes at least the last token of a prompt, so it uses one block less of a prompt that it has whole.
        """
        record = self._records.get(worker_id)
        if record is None:
            return 0
        blocks, low, high = record.blocks, 0, len(hashes)
        while low < high:  # what is known of a prompt is a beginning of it
            middle = (low + high) // 2
            if hashes[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return self.block_size_tokens * low

    def computed(self, worker_id: str, incarnation: str, hashes: BlockHashes, kv_blocks: int) -> None:
        """Record that a worker has a prompt in its KV cache, which has `kv_blocks` blocks.

        Call it when the first token is there; before that an engine has nothing of it that another prompt could use.
        Another incarnation than the last one begins with nothing.
        """
        record = self._records.get(worker_id)
        if record is None or record.incarnation != incarnation:
            record = self._records[worker_id] = _Record(incarnation)
        blocks = record.blocks
        for one in reversed(hashes[:kv_blocks]):
            blocks[one] = None
            blocks.move_to_end(one)
        while len(blocks) > kv_blocks:
            blocks.popitem(last=False)

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
        had = confirmed_tokens // self.block_size_tokens
        expected = expected_tokens // self.block_size_tokens
        if expected == len(hashes) == had + 1:  # all there: the last block is the one computed for the last token
            confirmed_tokens = expected_tokens
            had = expected
        self.expected_tokens_total += expected_tokens
        self.confirmed_tokens_total += confirmed_tokens
        if not record.confirms(expected_tokens, confirmed_tokens):
            self.given_up_total += 1
            self.forget(worker_id)
            return False
        for _ in range(min(expected - had, len(record.blocks))):
            record.blocks.popitem(last=False)
        return True

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is lost, or whose cache was emptied."""
        self._records.pop(worker_id, None)

    def blocks_of(self, worker_id: str) -> int:
        """Return how many blocks are recorded for a worker."""
        record = self._records.get(worker_id)
        return 0 if record is None else len(record.blocks)
