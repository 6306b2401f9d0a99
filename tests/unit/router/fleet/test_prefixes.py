"""What the router knows of workers' prefix caches, held against a model that looks at every token."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.router.fleet.prefixes import CLEARED_AT_ONCE, JUDGED_PROMPTS, PrefixIndex, block_hashes

BLOCK = 4
PROMPT = list(range(100, 120))
"""Five blocks."""
LIVES = "life-1", "life-2"


def index_with(*prompts, kv_blocks=100, worker_id="w"):
    index = PrefixIndex()
    for prompt in prompts:
        index.computed(worker_id, "life-1", block_hashes(prompt, BLOCK), kv_blocks, BLOCK)
    return index


def cached(index, prompt, worker_id="w", salt=None):
    hashes = block_hashes(prompt, BLOCK, salt)
    return max(index.look_up(hashes).cached_tokens(worker_id, life) for life in LIVES)


def holders(index, prompt, salt=None):
    return list(index.look_up(block_hashes(prompt, BLOCK, salt)).groups())


# --- hashes


@given(tokens=st.lists(st.integers(0, 2**31), max_size=70), block=st.integers(1, 40))
def test_there_is_a_hash_for_each_whole_block_and_it_depends_on_nothing_behind_it(tokens, block):
    hashes = block_hashes(tokens, block)
    assert len(hashes) == len(tokens) // block
    for blocks in range(len(hashes) + 1):
        assert block_hashes(tokens[: blocks * block], block) == hashes[:blocks]
        assert block_hashes([*tokens[: blocks * block], 7, 8], block)[:blocks] == hashes[:blocks]


@given(tokens=st.lists(st.integers(0, 150_000), min_size=8, max_size=60), where=st.integers(0, 10**6))
def test_another_token_changes_the_hash_of_its_block_and_of_all_behind_it(tokens, where):
    at = where % len(tokens)
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    hashes, others = block_hashes(tokens, BLOCK), block_hashes(other, BLOCK)
    assert hashes[: at // BLOCK] == others[: at // BLOCK]
    assert not set(hashes[at // BLOCK :]) & set(others[at // BLOCK :])


def test_equal_blocks_at_other_places_are_other_blocks():
    assert len(set(block_hashes([5] * 40, BLOCK))) == 10


@given(salts=st.lists(st.one_of(st.none(), st.text(max_size=20)), min_size=2, max_size=5, unique=True))
def test_prompts_of_other_salts_have_no_hash_in_common(salts):
    seen = [one for salt in salts for one in block_hashes(PROMPT, BLOCK, salt)]
    assert len(set(seen)) == len(seen)


def test_hashes_are_the_same_in_another_process():
    hashes = "from ridgeline.router.fleet.prefixes import block_hashes"
    program = f"{hashes}; print(block_hashes(list(range(100, 120)), 4, 'salt'))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == str(block_hashes(PROMPT, BLOCK, "salt"))


# --- what a worker has


def test_a_worker_has_what_it_has_computed_up_to_the_first_block_that_differs():
    index = index_with(PROMPT)
    assert cached(index, PROMPT) == 20
    assert cached(index, [*PROMPT, 1, 2, 3]) == 20
    assert cached(index, [*PROMPT[:10], *([1] * 10)]) == 8
    assert cached(index, PROMPT[:3]) == 0
    assert cached(index, PROMPT, worker_id="another") == 0
    assert cached(index, PROMPT, salt="mine") == 0


def test_a_new_incarnation_has_nothing_of_what_the_last_one_had():
    index = index_with(PROMPT)
    index.computed("w", "life-2", block_hashes([1] * 8, BLOCK), 100, BLOCK)
    assert (cached(index, PROMPT), cached(index, [1] * 8)) == (0, 8)
    assert index.look_up(block_hashes([1] * 8, BLOCK)).cached_tokens("w", "life-1") == 0
    assert (holders(index, PROMPT), holders(index, [1] * 8)) == ([], [["w"]])


def test_a_worker_that_is_forgotten_has_nothing_and_may_be_forgotten_again():
    index = index_with(PROMPT)
    index.computed("other", "life-1", block_hashes(PROMPT, BLOCK), 100, BLOCK)
    index.forget("w")
    index.forget("w")
    assert (cached(index, PROMPT), cached(index, PROMPT, "other")) == (0, 20)


def test_when_caches_are_emptied_no_worker_has_anything():
    index = index_with(PROMPT)
    index.computed("other", "life-1", block_hashes(PROMPT, BLOCK), 100, BLOCK)
    index.forget_all()
    assert (cached(index, PROMPT), cached(index, PROMPT, "other"), holders(index, PROMPT)) == (0, 0, [])
    index.computed("other", "life-1", block_hashes(PROMPT, BLOCK), 100, BLOCK)
    assert holders(index, PROMPT) == [["other"]]


def test_what_was_used_longest_ago_goes_first_and_of_one_prompt_its_end():
    other = [1] * 8
    index = index_with(PROMPT, other, kv_blocks=5)
    assert (cached(index, PROMPT), cached(index, other)) == (12, 8)
    index = index_with(PROMPT, other, PROMPT, kv_blocks=5)
    assert (cached(index, PROMPT), cached(index, other)) == (20, 0)


def test_of_a_prompt_that_is_longer_than_the_cache_the_beginning_is_kept():
    assert cached(index_with(PROMPT, kv_blocks=3), PROMPT) == 12


def test_the_blocks_of_a_forgotten_worker_are_cleared_away_by_and_by_and_never_named():
    index, blocks = PrefixIndex(), 3 * CLEARED_AT_ONCE
    old = tuple(range(blocks))
    index.computed("gone", "life-1", old, blocks, BLOCK)
    index.computed("w", "life-1", old[:1], blocks, BLOCK)
    index.forget_all_but(["w"])
    assert index.workers == 1
    left = []
    for number in range(4):
        assert [one for group in index.look_up(old).groups() for one in group] == ["w"]
        left.append(len(index._holders))
        index.computed("w", "life-1", (-1 - number,), blocks, BLOCK)
    assert left == [blocks, blocks - CLEARED_AT_ONCE + 1, blocks - 2 * CLEARED_AT_ONCE + 2, 4]
    index.computed("new", "life-1", old[:2], blocks, BLOCK)
    assert list(index.look_up(old).groups()) == [["new"], ["w"]]


HASHES = st.lists(st.integers(0, 6), min_size=1, max_size=8, unique=True).map(tuple)


@given(
    prompts=st.lists(st.tuples(st.sampled_from("abc"), HASHES), max_size=12), asked=HASHES, kv_blocks=st.integers(1, 9)
)
def test_prompts_with_a_hash_in_common_by_collision_break_nothing(prompts, asked, kv_blocks):
    index = PrefixIndex()
    for worker_id, hashes in prompts:
        index.computed(worker_id, "life-1", hashes, kv_blocks, BLOCK)
    found = index.look_up(asked)
    before = [found.cached_tokens(one, "life-1") for one in "abc"]
    named = [one for group in found.groups() for one in group]
    assert len(set(named)) == len(named) <= 3
    after = [found.cached_tokens(one, "life-1") for one in "abc"]
    assert all(0 <= tokens <= BLOCK * len(asked) for tokens in (*before, *after))


# --- what engines say


def test_what_an_engine_no_longer_had_is_forgotten_until_it_is_computed_again():
    index, hashes = index_with(PROMPT), block_hashes(PROMPT, BLOCK)
    assert index.corrected("w", hashes, cached_tokens=8, expected_tokens=20)
    assert cached(index, PROMPT) == 8
    index.computed("w", "life-1", hashes, 100, BLOCK)
    assert cached(index, PROMPT) == 20


def test_for_each_block_that_an_engine_lacks_the_one_used_longest_ago_is_forgotten():
    old, middle, new = [1] * 20, [2] * 20, [3] * 20
    index = index_with(old, middle, new)
    index.corrected("w", block_hashes(new, BLOCK), cached_tokens=12, expected_tokens=20)
    index.computed("w", "life-1", block_hashes(new, BLOCK), 100, BLOCK)
    assert (cached(index, old), cached(index, middle), cached(index, new)) == (12, 20, 20)


def test_an_engine_that_has_a_whole_prompt_says_one_block_less_and_has_lost_nothing():
    index, hashes = index_with(PROMPT), block_hashes(PROMPT, BLOCK)
    assert index.corrected("w", hashes, cached_tokens=16, expected_tokens=20)
    assert cached(index, PROMPT) == 20
    assert index.confirmed_tokens_total == index.expected_tokens_total == 20


def test_two_prompts_that_begin_alike_and_start_together_cost_each_other_nothing():
    first, second = [*PROMPT, *([1] * 8)], [*PROMPT, *([2] * 8)]
    index = PrefixIndex()
    for prompt in (first, second):  # when they were sent nothing was known, and neither had the other's KV
        hashes = block_hashes(prompt, BLOCK)
        assert index.corrected("w", hashes, cached_tokens=0, expected_tokens=0)
        index.computed("w", "life-1", hashes, 100, BLOCK)
    assert (cached(index, first), cached(index, second)) == (28, 28)


def test_more_than_was_expected_is_no_reason_to_forget():
    index = index_with(PROMPT)
    assert index.corrected("w", block_hashes([*PROMPT, *PROMPT], BLOCK), cached_tokens=36, expected_tokens=20)
    assert cached(index, PROMPT) == 20
    assert index.confirmed_tokens_total == 20


def test_a_correction_of_a_worker_that_is_gone_is_heard_by_nobody():
    assert PrefixIndex().corrected("w", block_hashes(PROMPT, BLOCK), cached_tokens=0, expected_tokens=20)


@pytest.mark.parametrize(("really_tokens", "kept"), [(12, True), (8, False), (0, False)])
def test_a_record_of_which_less_than_half_is_true_is_given_up_and_begun_again(really_tokens, kept):
    index, hashes = PrefixIndex(), block_hashes(PROMPT, BLOCK)
    answers = []
    for _ in range(JUDGED_PROMPTS):
        index.computed("w", "life-1", hashes, 100, BLOCK)
        answers.append(index.corrected("w", hashes, cached_tokens=really_tokens, expected_tokens=20))
    assert answers == [True] * (JUDGED_PROMPTS - 1) + [kept]
    assert index.given_up_total == (not kept)
    if not kept:
        assert cached(index, PROMPT) == 0
        index.computed("w", "life-1", hashes, 100, BLOCK)
        assert cached(index, PROMPT) == 20
        assert index.corrected("w", hashes, cached_tokens=0, expected_tokens=20), "it is judged from the beginning"


# --- the same as the rules say it


@dataclass
class NaiveWorker:
    """Beginnings of prompts as tokens, from the one used longest ago to the latest."""

    incarnation: str
    blocks: list = field(default_factory=list)


def beginnings(salt, tokens):
    return [(salt, *tokens[: BLOCK * (number + 1)]) for number in range(len(tokens) // BLOCK)]


WORKERS = ("w0", "w1", "w2")
TOKENS = st.lists(st.integers(0, 1), max_size=6 * BLOCK).map(lambda bits: [bit for bit in bits for _ in range(2)])
PROMPTS = st.tuples(st.sampled_from([None, "s"]), TOKENS)
WHO = st.sampled_from(WORKERS)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("computed"), WHO, PROMPTS, st.sampled_from(["life-1"] * 9 + ["life-2"])),
        st.tuples(st.just("corrected"), WHO, PROMPTS, st.integers(0, 12)),
        st.tuples(st.just("forget"), WHO),
    ),
    max_size=JUDGED_PROMPTS - 1,  # fewer than are judged
)


def check_found(index, hashes, all_have):
    """Hold what is found against the tokens that each worker has, before, while and after groups are looked up."""
    groups = [{one for one in WORKERS if all_have[one] == most} for most in sorted({*all_have.values()} - {0})][::-1]
    for enough in (None, *WORKERS):
        found = index.look_up(hashes)

        def each_has(found=found):
            return {one: max(found.cached_tokens(one, life) for life in LIVES) for one in WORKERS}

        assert each_has() == all_have
        more = [group for group in groups if all(all_have[one] > all_have.get(enough, 0) for one in group)]
        assert [set(group) for group in found.groups([enough])] == more
        assert each_has() == all_have
        assert [set(group) for group in found.groups()] == groups
        assert each_has() == all_have


@given(steps=STEPS, asked=st.lists(PROMPTS, min_size=1, max_size=4), kv_blocks=st.integers(1, 30))
def test_what_is_known_is_what_the_rules_say_and_never_more_than_the_cache_holds(steps, asked, kv_blocks):
    index, naive = PrefixIndex(), {}

    def has(worker_id, salt, tokens):
        blocks = naive[worker_id].blocks if worker_id in naive else []
        known = [one in blocks for one in beginnings(salt, tokens)]
        return BLOCK * (known.index(False) if False in known else len(known))

    for step, worker_id, *rest in steps:
        if step == "forget":
            index.forget(worker_id)
            naive.pop(worker_id, None)
            continue
        salt, tokens = rest[0]
        hashes, all_blocks = block_hashes(tokens, BLOCK, salt), beginnings(salt, tokens)
        if step == "computed":
            index.computed(worker_id, rest[1], hashes, kv_blocks, BLOCK)
            if worker_id not in naive or naive[worker_id].incarnation != rest[1]:
                naive[worker_id] = NaiveWorker(rest[1])
            worker = naive[worker_id]
            latest = all_blocks[:kv_blocks][::-1]
            worker.blocks = ([one for one in worker.blocks if one not in latest] + latest)[-kv_blocks:]
        else:
            expected = has(worker_id, salt, tokens) // BLOCK
            had = min(rest[1], expected)
            index.corrected(worker_id, hashes, had * BLOCK, expected * BLOCK)
            whole = expected == len(all_blocks) == had + 1
            if worker_id in naive and not whole:
                naive[worker_id].blocks = naive[worker_id].blocks[expected - had :]
        for one in WORKERS:
            assert index.blocks_of(one) == (len(naive[one].blocks) if one in naive else 0) <= kv_blocks
            for question in [rest[0], *asked]:
                assert cached(index, question[1], one, question[0]) == has(one, *question)
        for salt, tokens in [rest[0], *asked]:
            all_have = {one: has(one, salt, tokens) for one in WORKERS}
            check_found(index, block_hashes(tokens, BLOCK, salt), all_have)


@pytest.mark.parametrize("blocks", [20_000, 22_000])  # a table that is nearly full, and one that has just grown
def test_a_full_record_takes_the_memory_that_is_stated(blocks):
    index = PrefixIndex()
    tracemalloc.start()
    try:
        for number in range(2 * blocks // 100):
            index.computed("w", "life-1", block_hashes([number] * 100 * BLOCK, BLOCK), blocks, BLOCK)
        bytes_each = tracemalloc.get_traced_memory()[0] / index.blocks_of("w")
    finally:
        tracemalloc.stop()
    assert index.blocks_of("w") == blocks
    assert bytes_each < 360
