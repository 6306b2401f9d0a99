"""The nouns: hashes, sentences, parameters, errors that travel."""

import pickle

import msgspec
import pytest

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvHandoff, KvLayout, LayerGroup, explain_mismatch, new_handoff_id
from tests.support.samples import kv_layout
from tests.support.symptoms import is_quoted

LAYOUT = kv_layout(kv_dtype="auto", num_layers=30, block_bytes=24576, engine_version="0.32.0")
HANDOFF = KvHandoff(
    handoff_id="id",
    addresses=("10.0.0.1:7000",),
    num_blocks=3,
    num_tokens=70,
    compatibility_hash=LAYOUT.compatibility_hash(),
    lease_s=30.0,
    num_bytes=123,
)


def test_equal_layouts_have_equal_hashes_and_nothing_to_explain():
    twin = msgspec.structs.replace(LAYOUT)
    assert twin.compatibility_hash() == LAYOUT.compatibility_hash()
    assert explain_mismatch(LAYOUT, twin) is None


def test_the_guide_quotes_what_is_said_of_two_revisions_of_a_model():
    other = msgspec.structs.replace(LAYOUT, weights=f"{LAYOUT.weights}x")
    assert is_quoted(explain_mismatch(LAYOUT, other))


@pytest.mark.parametrize("field", sorted({*KvLayout.__struct_fields__} - {"tensor_parallel_size", "block_bytes"}))
def test_every_field_counts_and_is_named(field):
    value = getattr(LAYOUT, field)
    other = msgspec.structs.replace(LAYOUT, **{field: value + 1 if isinstance(value, int) else f"{value}x"})
    assert other.compatibility_hash() != LAYOUT.compatibility_hash()
    sentence = explain_mismatch(LAYOUT, other)
    assert sentence == (
        "the engines cannot exchange KV blocks: "
        f"{field} is {getattr(LAYOUT, field)!r} here and {getattr(other, field)!r} there."
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        ((2, 1200), (1, 2400), None),
        ((1, 2400), (4, 600), None),
        ((2, 1200), (3, 800), "tensor_parallel_size is 2 here and 3 there, and neither divides the other"),
        ((2, 1200), (1, 2401), "block_bytes is 1200 on 2 ranks here and 2401 on 1 there"),
    ],
)
def test_ranks_may_differ_in_number_if_their_heads_add_up(ours, theirs, named):
    here, there = (
        msgspec.structs.replace(LAYOUT, tensor_parallel_size=ranks, block_bytes=size) for ranks, size in (ours, theirs)
    )
    assert here.compatibility_hash() != there.compatibility_hash()
    sentence = explain_mismatch(here, there)
    assert sentence is None if named is None else named in sentence


@pytest.mark.parametrize("runs", [(False, False), (True, False)])
def test_ranks_may_not_differ_in_number_where_a_ranks_heads_do_not_lie_together(runs):
    here, there = (
        msgspec.structs.replace(LAYOUT, tensor_parallel_size=ranks, block_bytes=2400 // ranks, heads_are_runs=are)
        for ranks, are in zip((2, 1), runs, strict=True)
    )
    assert "tensor_parallel_size is 2 here and 1 there, and in these blocks the KV heads" in explain_mismatch(
        here, there
    )
    assert explain_mismatch(here, here) is None, "whole blocks need no slicing"


def test_a_handoff_survives_parameters_and_msgpack():
    params = HANDOFF.to_params()
    assert params["addresses"] == ["10.0.0.1:7000"]
    assert KvHandoff.from_params(msgspec.msgpack.decode(msgspec.msgpack.encode(params))) == HANDOFF


def test_bad_parameters_name_the_field():
    with pytest.raises(msgspec.ValidationError, match="num_tokens"):
        KvHandoff.from_params(HANDOFF.to_params() | {"num_tokens": "many"})


def test_ids_are_long_and_differ():
    ids = {new_handoff_id() for _ in range(100)}
    assert len(ids) == 100
    assert min(map(len, ids)) >= 22


@pytest.mark.parametrize("reason", errors.REASONS)
def test_errors_survive_pickling_and_the_wire(reason):
    error = errors.error_for(reason, "why")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.reason, copy.message, str(copy)) == (reason, "why", f"{reason}: why")


def test_a_reason_from_a_newer_version_becomes_internal():
    error = errors.error_for("sunspots", "why")
    assert (error.reason, error.message) == (errors.INTERNAL, "sunspots: why")


FULL = LayerGroup(kind="full", block_size=32)
WINDOW = LayerGroup(kind="window", block_size=32, reach_tokens=128)
CHUNK = LayerGroup(kind="chunk", block_size=64, reach_tokens=128)
STATE = LayerGroup(kind="state", block_size=32, state="float32")


@pytest.mark.parametrize(
    ("groups", "blocks"),
    [
        ((), {1: 1, 32: 1, 33: 2, 3200: 100}),
        ((FULL,) * 2, {1: 2, 3200: 200}),
        ((FULL, WINDOW, WINDOW), {1: 3, 100: 12, 3200: 110}),
        ((FULL, CHUNK), {1: 2, 3200: 102}),
        ((FULL, STATE, STATE), {1: 3, 100: 8, 3200: 104}),
    ],
    ids=["one", "two", "windows", "chunks", "states"],
)
def test_a_sequence_holds_blocks_of_each_group(groups, blocks):
    layout = msgspec.structs.replace(LAYOUT, groups=groups)
    assert {tokens: layout.blocks_of(tokens) for tokens in blocks} == blocks
