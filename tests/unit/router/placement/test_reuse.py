"""When a beginning that a decode worker has is fetched: where that takes less time than computing it."""

import pytest
from msgspec.structs import replace

from ridgeline.contracts.handoff import LayerGroup
from ridgeline.contracts.workers import StepModel, WorkerStatus
from ridgeline.router.fleet.prefixes import block_hashes
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.placement.choice import best_source
from ridgeline.router.placement.learned import REMEMBERED_FETCHES, UNKNOWN_BYTES_PER_S, Learned
from tests.support.lone_worker import lone_worker
from tests.support.samples import kv_layout

BLOCK_TOKENS = 32
LAYOUT = kv_layout(block_size=BLOCK_TOKENS, num_layers=10, block_bytes=100_000)
"""A million bytes a block, which take a millisecond by a link of which nothing is known."""
assert UNKNOWN_BYTES_PER_S == 1e9
MODEL = StepModel(
    base_s=0.02,
    per_prefill_token_s=0.001,
    per_sequence_s=0.0,
    per_context_token_s=0.0,
    per_attended_token_s=0.0,
    steps=100,
)
PROMPT = list(range(1000))


class Turn:
    """A prompt, a prefill worker that computes it, and two decode workers that may have its beginning."""

    def __init__(self, layout=LAYOUT, **model):
        self.learned = Learned()
        self.prefill, *self.decodes = (
            lone_worker(name, name.split("-")[0], layout=layout, num_kv_blocks=1000)
            for name in ("prefill-0", "decode-0", "decode-1")
        )
        for worker in (self.prefill, *self.decodes):
            worker.status = WorkerStatus(worker_id=worker.worker_id, step_model=replace(MODEL, **model))

    def has(self, number, tokens):
        worker = self.decodes[number]
        self.learned.computed(worker.description, block_hashes(PROMPT[:tokens], BLOCK_TOKENS))

    def wanted(self, cached_tokens=0, prompt=PROMPT):
        demand = Demand(len(prompt), prefix=block_hashes(prompt, BLOCK_TOKENS))
        found = best_source(demand, self.prefill, cached_tokens, self.decodes, self.learned)
        return found and (found.worker_id, found.tokens)


@pytest.fixture
def turn():
    return Turn()


def test_the_worker_with_the_most_of_it_is_asked_and_for_whole_blocks_before_the_last_token(turn):
    assert turn.wanted() is None
    turn.has(0, 100)
    turn.has(1, 500)
    assert turn.wanted() == ("decode-1", 480)
    assert turn.wanted(prompt=PROMPT[:128]) == ("decode-0", 96)


def test_nobody_is_asked_for_what_prefill_has_itself_or_while_no_step_is_known(turn):
    turn.has(0, 500)
    assert turn.wanted(cached_tokens=448) == ("decode-0", 480)
    assert turn.wanted(cached_tokens=480) is None
    turn.prefill.status = None
    assert turn.wanted() is None


def test_a_prompt_that_prefill_has_never_computed_like_is_not_guessed(turn):
    turn.has(0, 500)
    turn.prefill.status = WorkerStatus(worker_id="prefill-0", step_model=replace(MODEL, knows_prompts=False))
    assert turn.wanted() is None


@pytest.mark.parametrize(("per_token_s", "asked"), [(1e-4, True), (4e-5, True), (2e-5, False)])
def test_how_much_is_worth_it_follows_from_what_computing_and_moving_it_takes(per_token_s, asked):
    turn = Turn(per_prefill_token_s=per_token_s)  # a block takes 1 ms to fetch
    turn.has(0, 500)
    assert (turn.wanted() is not None) is asked


def test_a_source_that_decodes_answers_after_its_step(turn):
    turn.has(0, 64)
    turn.has(1, 64)
    with turn.decodes[0].reserve(decode_context_tokens=10) as one:
        one.prompt_done()
        assert turn.wanted() == ("decode-1", 64)
        turn.has(0, 500)
        assert turn.wanted() == ("decode-0", 480), "much is worth a step"


def test_what_is_measured_counts_and_a_few_slow_fetches_do_not_end_it(turn):
    turn.has(0, 500)
    for fetches in range(REMEMBERED_FETCHES):
        assert turn.wanted() is not None, fetches
        turn.learned.fetched("decode-0", "prefill-0", 10**6, wire_s=1.0, waited_s=0.1)
    assert turn.wanted() is None
    turn.learned.fetched("decode-0", "prefill-0", 10**6, wire_s=0.001, waited_s=0.001)
    assert turn.wanted() == ("decode-0", 480)
    for _ in range(REMEMBERED_FETCHES):
        turn.learned.fetched("decode-0", "prefill-0", 0, wire_s=0.0, waited_s=9.0)
    assert turn.wanted() == ("decode-0", 480), "nothing was fetched, which says nothing of the link"


@pytest.mark.parametrize(
    ("groups", "tokens"),
    [
        ((), 480),
        ((LayerGroup(kind="full", block_size=96), LayerGroup(kind="state", block_size=96)), 480),
        ((LayerGroup(kind="full", block_size=128), LayerGroup(kind="state", block_size=128)), 384),
    ],
)
def test_of_several_groups_what_ends_with_a_block_of_each(groups, tokens):
    turn = Turn(replace(LAYOUT, groups=groups, block_size=groups[0].block_size if groups else BLOCK_TOKENS))
    turn.has(0, 500)
    assert turn.wanted() == ("decode-0", tokens)
