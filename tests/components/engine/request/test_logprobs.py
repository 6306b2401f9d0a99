"""Log-probabilities through the wire: what the router's output processor gets equals what the engine's own made."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.logprobs import append_logprobs_for_next_position

from ridgeline.contracts.tasks import PositionLogprobs
from ridgeline.engine.request import logprobs
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

VOCABULARY = 12
VALUES = np.log(np.arange(1, VOCABULARY + 1, dtype=np.float32) / 78)  # token 11 is the likeliest, token 0 the least


def engine_row(chosen, k, values=VALUES):
    """One row as vLLM's sampler makes it: the chosen token, then the top k; and the chosen one's rank."""
    order = np.argsort(-values)[: VOCABULARY if k == -1 else k]
    tokens = np.array([chosen, *order], dtype=np.int64)
    return tokens, values[tokens], int((values >= values[chosen]).sum())


def in_the_worker(rows, k):
    """The dictionaries that vLLM gives the worker for those rows."""
    positions = []
    for tokens, values, rank in rows:
        names = [None] * len(tokens)
        append_logprobs_for_next_position(positions, tokens.tolist(), values.tolist(), names, int(rank), k)
    return positions


def through_the_wire(packed):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=list[PositionLogprobs | None])


def round_trip(rows, k):
    positions = in_the_worker(rows, k)
    packed = logprobs.pack_sampled(positions, [int(tokens[0]) for tokens, _, _ in rows])
    return logprobs.unpack_sampled(through_the_wire(packed), k)


def assert_same(lists, rows):
    np.testing.assert_array_equal(lists.logprob_token_ids, np.stack([tokens for tokens, _, _ in rows]))
    np.testing.assert_array_equal(lists.logprobs, np.stack([values for _, values, _ in rows]))
    np.testing.assert_array_equal(lists.sampled_token_ranks, [rank for _, _, rank in rows])


@pytest.mark.parametrize(
    ("chosen", "k"),
    [(11, 3), (10, 3), (0, 3), (9, 3), (8, 3), (4, 0), (11, 0), (4, -1), (0, -1), (11, 1)],
    ids=lambda value: str(value),
)
def test_a_position_equals_vllms_row(chosen, k):
    row = engine_row(chosen, k)
    assert_same(round_trip([row], k), [row])


def test_several_positions_of_one_delta_keep_their_order():
    rows = [engine_row(chosen, 3) for chosen in (5, 11, 0)]
    assert_same(round_trip(rows, 3), rows)


@given(
    values=st.lists(st.floats(-20, 0, width=32), min_size=VOCABULARY, max_size=VOCABULARY, unique=True),
    chosen=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
    k=st.integers(-1, VOCABULARY),
)
@settings(max_examples=60)
def test_any_position_equals_vllms_row(values, chosen, k):
    rows = [engine_row(token, k, np.array(values, dtype=np.float32)) for token in chosen]
    assert_same(round_trip(rows, k), rows)


def asked_row(chosen, ids, values=VALUES):
    """One row of a request with `logprob_token_ids`: the chosen token, then those ids in the client's order."""
    tokens = np.array([chosen, *ids], dtype=np.int64)
    return tokens, values[tokens], int((values >= values[chosen]).sum())


@pytest.mark.parametrize("chosen", [11, 10, 9, 3, 2, 1, 0])
@pytest.mark.parametrize("ids", [[1, 2], [2, 1], [11, 0, 3], [4]], ids=str)
def test_a_position_with_chosen_token_ids_equals_vllms_row(chosen, ids):
    row = asked_row(chosen, ids)
    there = round_trip([row], len(ids))
    assert there.logprob_token_ids.tolist() == [[chosen, *ids]]
    np.testing.assert_array_equal(there.logprobs, [row[1]])


@given(
    values=st.lists(st.floats(-20, 0, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
    chosen=st.integers(0, VOCABULARY - 1),
    ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=VOCABULARY),
)
@settings(max_examples=200)
def test_whatever_ids_were_asked_for_the_client_gets_the_dictionary_that_one_engine_makes(values, chosen, ids):
    row = asked_row(chosen, ids, np.array(values, dtype=np.float32))
    there = round_trip([row], len(ids))
    [ours] = in_the_worker(
        list(zip(there.logprob_token_ids, there.logprobs, there.sampled_token_ranks, strict=True)), len(ids)
    )
    assert [ours] == in_the_worker([row], len(ids))


@pytest.mark.parametrize("ids", [[3, 3], [3, 3, 3], [5, 3, 3], [3, 5, 3, 3], [5, 5, 3, 3]], ids=str)
def test_the_chosen_token_asked_for_more_than_once_brings_no_token_that_nobody_asked_for(ids):
    row = asked_row(3, ids)
    there = round_trip([row], len(ids))
    [ours] = in_the_worker(
        list(zip(there.logprob_token_ids, there.logprobs, there.sampled_token_ranks, strict=True)), len(ids)
    )
    assert [ours] == in_the_worker([row], len(ids))


def test_the_prompts_positions_are_all_but_the_first():
    prompt = [3, 11, 0]
    rows = [engine_row(token, 2) for token in prompt[1:]]
    packed = logprobs.pack_prompt([None, *in_the_worker(rows, 2)], prompt)
    assert packed[0] is None
    tensors = logprobs.unpack_prompt(through_the_wire(packed), 2)
    assert tensors.logprob_token_ids.tolist() == [tokens.tolist() for tokens, _, _ in rows]
    np.testing.assert_array_equal(tensors.logprobs.numpy(), np.stack([values for _, values, _ in rows]))
    assert tensors.selected_token_ranks.tolist() == [rank for _, _, rank in rows]


def test_a_delta_with_more_tokens_than_positions_is_an_error_not_a_shift():
    with pytest.raises(ValueError, match="zip"):
        logprobs.pack_sampled(in_the_worker([engine_row(1, 1)], 1), [1, 2])
