"""Hand-offs of several groups of layers: two real schedulers, real transfers, and a model that hashes what it reads.

Every answer must be that of one scheduler alone. Faults planted in the hand-off must show, so the check can fail.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hashing_model import PAGE_BYTES, HashingEngine, chunk, full, state, uncached, window
from tests.support.nixl import needs_nixl

# isort: split
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from ridgeline.contracts.handoff import LayerGroup, new_handoff_id
from ridgeline.engine.connector.groups import CacheGroups, layer_group, regions
from ridgeline.engine.connector.kv_connector import RidgelineConnector
from ridgeline.engine.connector.transferable_models import UnsupportedModel

CASES = {
    "dense": [full()],
    "gemma3": [full(), window(), window()],
    "window first": [window(), full()],
    "all windows": [window(tokens=96)],
    "llama4": [chunk(), chunk(), full()],
    "more full than windows": [full(), full(), window()],
    "unequal blocks": [full(64), window(32)],
    "two full, unequal blocks": [full(64), full(32), state(64)],
    "hybrid": [state(), state(), state(), full()],
    "hybrid, wide blocks": [state(128), full(128)],
    "all three": [full(), window(tokens=64), state()],
    "states alone": [state()],
}
LATENT = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
LENGTHS = (1, 2, 31, 32, 33, 100, 128, 129, 255, 256, 257, 400, 512, 768)
ANSWER_TOKENS = 6


class Pair:
    """A prefill and a decode engine, and one that does all by itself."""

    def __init__(
        self,
        directory: Path,
        specs: Sequence[Any],
        transport: str = "shm",
        prefill: dict[str, int] | None = None,
        alone: dict[str, int] | None = None,
        **decode: Any,
    ) -> None:
        caching = {"prefix_caching": decode.get("prefix_caching", True)}
        self.alone = HashingEngine(directory, specs, **caching, **(alone or {}))
        self.prefill = HashingEngine(directory, specs, transport=transport, **caching, **(prefill or {}))
        self.decode = HashingEngine(directory, specs, transport=transport, **decode)
        self.draw = random.Random(5)
        self.answer_tokens = ANSWER_TOKENS

    def tokens(self, number: int) -> list[int]:
        return [self.draw.randrange(3, 900) for _ in range(number)]

    def expected(self, prompt: list[int]) -> list[int]:
        return self.alone.answer(self.alone.add(prompt, self.answer_tokens))

    def prefilled(self, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
        """Compute a prompt and publish it; returns its first token and the hand-off."""
        name = self.prefill.add(prompt, 1, do_remote_decode=True, handoff_id=new_handoff_id())
        first = self.prefill.answer(name)
        self.prefill.step()
        return first, self.prefill.finished[name]["handoff"]

    def begin(self, prompt: list[int], handoff: dict[str, Any], max_tokens: int) -> str:
        return self.decode.add(prompt, max_tokens, do_remote_prefill=True, handoff=handoff)

    def handed_over(self, prompt: list[int]) -> list[int]:
        """One leg after the other."""
        first, handoff = self.prefilled(prompt)
        return first + self.decode.answer(self.begin(prompt + first, handoff, self.answer_tokens - 1))

    def overlapped(self, prompt: list[int]) -> list[int]:
        """Decode's leg begins with the prompt's first step."""
        self.prefill.events.clear()
        asked = self.prefill.add(prompt, 1, do_remote_decode=True, handoff_id=new_handoff_id())
        while not self.prefill.events:
            self.prefill.step()
        transfer = {"handoff": self.prefill.events[0]["handoff"], "first_token_follows": True}
        name = self.decode.add([*prompt, 0], self.answer_tokens - 1, do_remote_prefill=True, **transfer)
        for _ in range(3):
            self.decode.step()
        self.prefill.answer(asked, self.decode)
        first = self.prefill.outputs[asked]
        if self.decode.abort_if_held(name):  # the router begins another leg then
            handoff = self.prefill.finished[asked]["handoff"]
            name = self.begin(prompt + first, handoff, self.answer_tokens - 1)
        return first + self.decode.answer(name, self.prefill)

    def together(self, prompts: list[list[int]]) -> list[list[int]]:
        """All decode at once."""
        legs = []
        for prompt in prompts:
            first, handoff = self.prefilled(prompt)
            legs.append((first, self.begin(prompt + first, handoff, self.answer_tokens - 1)))
        return [first + self.decode.answer(name, self.prefill) for first, name in legs]

    def resampled(self, prompt: list[int], less: int) -> list[int]:
        """Decode makes every token; prefill computes the prompt, or all of it but one token."""
        _, handoff = self.prefilled(prompt[: len(prompt) - less] or prompt)
        return self.decode.answer(self.begin(prompt, handoff, self.answer_tokens))


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Pair] = []

    def make(case: str, transport: str = "shm", **decode: Any) -> Pair:
        specs = CASES[case]
        if not decode.get("prefix_caching", True):
            specs = [uncached(spec) for spec in specs]
        made.append(Pair(tmp_path, specs, transport, **decode))
        return made[-1]

    yield make
    for one in made:
        for engine in (one.prefill, one.decode):
            engine.close()


def wrong(pair: Pair) -> dict[str, list[int]]:
    """Hand over prompts that are new, known, longer, partly other, followed, and all at once.

    Returns the lengths of those with a wrong answer, by round.
    """
    cold = [pair.tokens(length) for length in LENGTHS]
    longer = [prompt + pair.tokens(9) for prompt in cold]
    other_end = [prompt[: len(prompt) * 2 // 3] + pair.tokens(len(prompt) - len(prompt) * 2 // 3) for prompt in cold]
    at_once = [prompt + pair.tokens(3) for prompt in longer]
    rounds = {
        "cold": (cold, map(pair.handed_over, cold)),
        "again": (cold, map(pair.handed_over, cold)),
        "longer": (longer, map(pair.handed_over, longer)),
        "other end": (other_end, map(pair.handed_over, other_end)),
        "overlapped": (before(cold), map(pair.overlapped, before(cold))),
        "overlapped, longer": (before(longer), map(pair.overlapped, before(longer))),
        "at once": (at_once, iter(pair.together(at_once))),
    }
    found = {
        name: [len(prompt) for prompt, answer in zip(prompts, answers, strict=True) if answer != pair.expected(prompt)]
        for name, (prompts, answers) in rounds.items()
    }
    pair.prefill.settle()
    pair.decode.settle()
    return {name: lengths for name, lengths in found.items() if lengths}


def before(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts that no engine has the beginning of."""
    return [[9, *prompt] for prompt in prompts]


@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_that_of_one_engine_alone(pair, case):
    engines = pair(case)
    assert wrong(engines) == engines.decode.recomputes == {}
    assert engines.decode.zeroed_under_a_load == 0
    assert engines.decode.bytes_received > 0


@pytest.mark.parametrize("case", ["gemma3", "all three"])
@pytest.mark.parametrize(
    "setting",
    [
        {"transport": "grpc"},
        pytest.param({"transport": "nixl"}, marks=needs_nixl),
        {"transport": "collective"},
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_so_it_is_over_other_transports_and_without_prefix_caching(pair, case, setting):
    engines = pair(case, **setting)
    assert wrong(engines) == engines.decode.recomputes == {}


@pytest.mark.proves("sequences that vLLM preempts", "disaggregated")
@pytest.mark.parametrize("case", ["gemma3", "all three"])
def test_so_it_is_after_a_preemption_on_decode(pair, case):
    engines = pair(case, num_blocks=60)
    engines.answer_tokens = 100
    prompts = [engines.tokens(100) for _ in range(8)]
    assert engines.together(prompts) == [engines.expected(prompt) for prompt in prompts]
    assert engines.decode.preempted > 0
    assert engines.decode.recomputes == {}
    assert engines.decode.zeroed_under_a_load == 0


@pytest.mark.proves("sequences that vLLM preempts", "disaggregated")
@pytest.mark.parametrize(("case", "num_blocks"), [("dense", 30), ("gemma3", 60), ("all three", 60)])
@pytest.mark.parametrize("way", ["handed_over", "overlapped"])
def test_so_it_is_after_a_preemption_on_prefill(pair, case, num_blocks, way):
    """Eight answers beside the prompt grow over the end of their first block, and vLLM takes the newest one's."""
    engines = pair(case, prefill={"num_blocks": num_blocks, "step_tokens": 64})
    beside = [engines.tokens(28) for _ in range(8)]
    names = [engines.prefill.add(prompt, 40) for prompt in beside]
    for _ in range(2):
        engines.prefill.step()
    prompt = engines.tokens(600)
    assert getattr(engines, way)(prompt) == engines.expected(prompt)
    assert engines.prefill.preempted > 0
    engines.answer_tokens = 40
    assert [engines.prefill.outputs[name] for name in names] == [engines.expected(prompt) for prompt in beside]
    # A leg that had begun to fetch fails, and the next one may come before the hand-off is published again.
    assert engines.decode.recomputes.keys() <= ({"recompute_total.revoked"} if way == "overlapped" else set())


@pytest.mark.proves("prompts of 32,000 tokens", "disaggregated")
@pytest.mark.parametrize("case", ["dense", "gemma3", "hybrid, wide blocks"])
def test_so_it_is_for_a_prompt_of_32_000_tokens(pair, case):
    long = {"longest_tokens": 32_768, "num_blocks": 4000, "step_tokens": 2048}
    engines = pair(case, prefill=long, alone=long, **long)
    prompt = engines.tokens(32_000)
    assert engines.handed_over(prompt) == engines.expected(prompt)
    assert engines.overlapped([9, *prompt]) == engines.expected([9, *prompt])
    assert engines.decode.recomputes == {}


@pytest.mark.parametrize(
    ("spec", "live"),
    [
        (full(), {1: range(1), 32: range(1), 33: range(2), 300: range(10)}),
        (window(tokens=64), {1: range(1), 64: range(2), 95: range(1, 3), 96: range(1, 3), 300: range(7, 10)}),
        (chunk(tokens=64), {1: range(1), 63: range(2), 64: range(2, 2), 100: range(2, 4)}),
        (state(), {1: range(1), 32: range(1), 33: range(1, 2), 300: range(9, 10)}),
    ],
)
def test_of_a_prompt_what_the_next_token_reads_is_handed_over(spec, live):
    group = layer_group(spec)
    assert {tokens: group.live(tokens) for tokens in live} == live


def test_engines_whose_groups_differ_do_not_pair():
    def layers(*specs: Any) -> tuple[LayerGroup, ...]:
        groups = [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)]
        return CacheGroups(KVCacheConfig(10, [], groups)).layers

    half = MambaSpec(shapes=((8,),), dtypes=(torch.bfloat16,), block_size=32)
    kinds = [
        (full(),),
        (window(),),
        (window(tokens=64),),
        (full(), window()),
        (full(64), window()),
        (state(),),
        (half,),
    ]
    assert len({layers(*specs) for specs in kinds}) == len(kinds)
    assert layers(window(), full()) == layers(full(), window()), "vLLM's order of groups does not matter"


def test_kinds_and_sizes_of_blocks_that_are_not_known_are_refused():
    with pytest.raises(UnsupportedModel):
        layer_group(CrossAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32))
    names, size = ["layer.0", "layer.1"], 10 * 3 * PAGE_BYTES
    both = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer.0": LATENT, "layer.1": full()})
    tensors = [KVCacheTensor(size, [name], PAGE_BYTES, PAGE_BYTES) for name in names]
    cache = {"layer.0": torch.zeros(size, dtype=torch.uint8)}
    with pytest.raises(UnsupportedModel):
        regions(cache, KVCacheConfig(10, tensors, [KVCacheGroupSpec(names, both)]))


def wrong_of_some(pair: Pair) -> int:
    """Hand over some prompts of more than one block; returns how many answers are wrong."""
    prompts = [pair.tokens(length) for length in (100, 257, 400, 600)] * 2
    return sum(pair.handed_over(prompt) != pair.expected(prompt) for prompt in prompts)


def swap(runs: dict[int, list[int]]) -> dict[int, list[int]]:
    first, last = min(runs), max(runs)
    runs[first][0], runs[last][-1] = runs[last][-1], runs[first][0]
    return runs


def drop(runs: dict[int, list[int]]) -> dict[int, list[int]]:
    runs[max(runs)].pop()
    return runs


@pytest.mark.parametrize("fault", [swap, drop])
@pytest.mark.parametrize("case", ["dense", "gemma3", "all three"])
def test_a_block_in_the_wrong_place_or_not_fetched_shows(pair, case, fault, monkeypatch):
    missing = CacheGroups.missing
    monkeypatch.setattr(CacheGroups, "missing", lambda *args: fault(missing(*args)))
    assert wrong_of_some(pair(case)) > 0


def test_a_group_that_is_not_named_as_loaded_is_zeroed_under_the_load(pair, monkeypatch):
    monkeypatch.setattr(RidgelineConnector, "get_loaded_kv_cache_group_ids", lambda self, request: ())
    engines = pair("hybrid")
    wrong_of_some(engines)  # how many depends on which comes first, the bytes or the zeros
    assert engines.decode.zeroed_under_a_load > 0


@pytest.mark.parametrize("case", ["hybrid", "all three"])
def test_after_a_fetch_that_failed_decode_computes_the_prompt(pair, case):
    engines = pair(case)
    prompts = [engines.tokens(length) for length in (33, 257, 600)]
    for prompt in (*prompts, *(prompt + engines.tokens(9) for prompt in prompts)):
        first, handoff = engines.prefilled(prompt)
        lost = handoff | {"handoff_id": new_handoff_id()}
        got = first + engines.decode.answer(engines.begin(prompt + first, lost, ANSWER_TOKENS - 1))
        assert got == engines.expected(prompt)
    assert engines.decode.recomputes == {"recompute_total.unknown_handoff": 6}


@pytest.mark.parametrize("case", CASES)
def test_decode_makes_every_token_itself_from_a_hand_off_that_lacks_the_last_one(pair, case):
    engines = pair(case)
    for length in LENGTHS:
        prompt = engines.tokens(length)
        assert engines.resampled(prompt, less=1) == engines.expected(prompt), length


def test_what_a_layer_with_every_token_has_cached_is_not_fetched_again(pair, monkeypatch):
    received = {}
    for keeps in (True, False):
        monkeypatch.setattr(RidgelineConnector, "supports_divergent_local_hybrid_hits", keeps)
        engines = pair("hybrid")
        prompt = engines.tokens(600)
        for end in (100, 300):
            engines.handed_over(other := prompt[:-end] + engines.tokens(end))
        before_bytes = engines.decode.bytes_received
        assert engines.handed_over(other := prompt[:-300] + engines.tokens(300)) == engines.expected(other)
        received[keeps] = (engines.decode.bytes_received - before_bytes) // PAGE_BYTES
    assert received[True] < received[False]


@pytest.mark.parametrize(
    ("case", "offered"),
    [
        ("dense", [0, 8, 16]),
        ("more full than windows", [0, 16, 32]),
        ("hybrid", [0, 8, 16, 21]),  # vLLM ends a chunk where a state is kept
        ("two full, unequal blocks", [0, 12, 24, 30, 31]),
        ("states alone", [0]),
    ],
)
def test_layers_that_keep_every_token_travel_while_the_prompt_is_computed(pair, case, offered):
    engines = pair(case)
    prompt = engines.tokens(700)
    assert engines.overlapped(prompt) == engines.expected(prompt)
    assert engines.prefill.offered == offered


def test_a_prompt_with_states_goes_on_beside_sequences_that_leave_it_less_than_a_block(pair):
    engines = pair("hybrid", step_tokens=40)
    for _ in range(10):
        engines.decode.add(engines.tokens(2), 200)
    for _ in range(4):
        engines.decode.step()
    prompt = engines.tokens(100)
    name = engines.decode.add(prompt, ANSWER_TOKENS)
    for _ in range(8 + ANSWER_TOKENS):  # each second step ends at a block's end
        engines.decode.step()
    assert engines.decode.outputs[name] == engines.expected(prompt)
