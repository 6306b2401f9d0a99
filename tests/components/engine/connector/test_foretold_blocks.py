"""What a router reckons with of an engine's KV blocks, beside what vLLM's scheduler and its cache really do.

The blocks of a hybrid are as wide as a recurrent state, and windows give theirs back.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.hashing_model import HashingEngine, chunk, full, state, window

# isort: split
from ridgeline.contracts.workers import WorkerDescription
from ridgeline.router.fleet.prefixes import BlockHashes, block_hashes
from ridgeline.router.placement.learned import Learned
from tests.support.samples import kv_layout, worker_description

CASES = {
    "dense": [full()],
    "windows": [full(), window(), window()],
    "chunks": [full(), chunk()],
    "unequal blocks": [full(64), window(32)],
    "a state in a block of tokens": [full(96), state(96), state(96), state(96)],
    "states wider than blocks": [full(32), state(96)],
}
LENGTHS = (40, 90, 100, 200, 300, 600)
ANSWER_TOKENS = 120
BLOCKS = 100


class Engine:
    """An engine, what its worker says of it, and a router's record of its prompts."""

    def __init__(self, directory: Path, case: str, **options: int) -> None:
        self.engine = HashingEngine(directory, CASES[case], **options)
        groups = self.engine.groups
        self.worker: WorkerDescription = worker_description(
            layout=kv_layout(groups=groups.layers, block_size=groups.all[0].layers.block_size),
            num_kv_blocks=options.get("num_blocks", 400),
            prefix_block_tokens=self.engine.hit_tokens,
        )
        self.learned = Learned()
        self._draw = random.Random(1)

    def prompt(self, tokens: int) -> list[int]:
        return [self._draw.randrange(3, 900) for _ in range(tokens)]

    def answer(self, prompt: list[int]) -> None:
        self.engine.answer(self.engine.add(prompt, 4))
        self.learned.computed(self.worker, self._hashes(prompt))

    def expected_tokens(self, prompt: list[int]) -> int:
        """Return what the router expects, but for the last token, which is computed with the block it is in."""
        known = self.learned.prefixes.look_up(self._hashes(prompt)).cached_tokens("decode-0", "i")
        block = self.worker.prefix_block_tokens
        return min(known, (len(prompt) - 1) // block * block)

    def _hashes(self, prompt: list[int]) -> BlockHashes:
        return block_hashes(prompt, self.worker.prefix_block_tokens)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_prompt_that_was_computed_hits_the_cache_by_as_many_tokens_as_expected(tmp_path: Path, case: str):
    one = Engine(tmp_path, case)
    prompts = [one.prompt(length) for length in LENGTHS]
    assert [one.expected_tokens(prompt) for prompt in prompts] == [0] * len(prompts)
    for prompt in prompts:
        one.answer(prompt)
    told = [(one.expected_tokens(prompt), one.engine.cached_tokens(prompt)) for prompt in prompts]
    assert [expected for expected, _ in told] == [had for _, had in told]
    assert sum(had for _, had in told) > 1000


def test_the_record_is_about_as_long_as_the_cache(tmp_path: Path, case: str):
    one = Engine(tmp_path, case, num_blocks=BLOCKS)
    prompts = [one.prompt(300) for _ in range(50)]
    for prompt in prompts:
        one.answer(prompt)
    expected = [one.expected_tokens(prompt) for prompt in prompts]
    had = [one.engine.cached_tokens(prompt) for prompt in prompts]
    confirmed = sum(map(min, expected, had))
    assert confirmed > 0.7 * sum(expected), "it promises what has been evicted"
    assert confirmed > 0.6 * sum(had), "it forgets what is there"


def test_a_sequence_that_decodes_holds_the_blocks_that_admission_counts(tmp_path: Path, case: str):
    one = Engine(tmp_path, case)
    for length in LENGTHS:
        name, held = one.engine.add(one.prompt(length), ANSWER_TOKENS), 0
        while name not in one.engine.finished:
            one.engine.step()
            if len(one.engine.outputs[name]) > 1:
                held = max(held, one.engine.blocks_used)
        counted = one.worker.layout.blocks_of(length + ANSWER_TOKENS)
        slack = 3 if case == "chunks" else 1  # a sequence that ends early in a chunk has not filled it
        assert counted - slack <= held <= counted, length
