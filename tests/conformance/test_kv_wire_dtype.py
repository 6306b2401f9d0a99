"""Encoded blocks over the real transports: what arrives is what encoding and decoding once makes of the source's."""

import asyncio
import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvLayout
from ridgeline.kv_transfer.transports import make_transport
from ridgeline.kv_transfer.wire.codec import make_codec
from ridgeline.kv_transfer.wire.frames import HEADER_BYTES
from tests.conformance.check_transport import LEASE_S, NUM_LAYERS, Node, alter_frames, eventually, make_layout
from tests.support.patience import PATIENCE_S

LAYOUT = make_layout(kv_dtype="bfloat16", block_bytes=2400)
ENCODINGS = ["int8", "fp8"]


class Harness:
    def __init__(self, name: str, wire_dtype: str) -> None:
        self._name = name
        self._wire_dtype = wire_dtype

    def make(self, cache, options):
        return make_transport(cache, dataclasses.replace(options, transport=self._name, wire_dtype=self._wire_dtype))


def node_of(name: str, wire_dtype: str, layout: KvLayout = LAYOUT, **options) -> Node:
    """A running node; its blocks are bfloat16 noise."""
    node = Node(Harness(name, wire_dtype), layout, **options)
    random = torch.Generator().manual_seed(options["seed"])
    for layer in node.layers:
        noise = torch.randn((len(layer), layout.block_bytes // 2), generator=random).bfloat16()
        layer[:] = noise.view(torch.uint8).numpy()
    node.source.start()
    return node


async def close(*nodes: Node) -> None:
    for node in nodes:
        await node.fetcher.close()
        node.source.close()


def rounded(rows: np.ndarray, wire_dtype: str, layout: KvLayout = LAYOUT) -> np.ndarray:
    """Blocks [blocks, block_bytes] after one way over the wire."""
    codec = make_codec(wire_dtype, layout, layout.block_bytes)
    payload = b"".join(codec.encode([memoryview(row) for row in rows]))
    return np.frombuffer(bytes(codec.decode(memoryview(payload), len(rows))), np.uint8).reshape(rows.shape)


@pytest.fixture(params=ENCODINGS)
async def pair(request):
    wire_dtype = request.param
    # Only the side that fetches is configured: the source encodes as it is asked to.
    prefill, decode = node_of("grpc", "none", seed=0), node_of("grpc", wire_dtype, seed=1)
    yield prefill, decode, wire_dtype
    await close(prefill, decode)


async def test_blocks_arrive_as_encoded_and_decoded_and_nothing_else_is_touched(pair):
    prefill, decode, wire_dtype = pair
    before = [layer.copy() for layer in decode.layers]
    ids, targets = [31, 0, 7, 8, 3], [1, 0, 30]
    result = await decode.fetcher.fetch(prefill.publish(ids), 2, targets, decode.pool)
    assert result.outcome == "ok", result
    assert result.num_bytes == 3 * NUM_LAYERS * LAYOUT.block_bytes
    assert prefill.source.bytes_sent_total == 3 * NUM_LAYERS * 4 * (4 + LAYOUT.block_bytes // 8)
    for layer, expected, sent in zip(decode.layers, before, prefill.layers, strict=True):
        expected[targets] = rounded(sent[ids[2:]], wire_dtype)
        np.testing.assert_array_equal(layer, expected)
        assert not np.array_equal(layer[targets], sent[ids[2:]]), "nothing was rounded: this test shows nothing"


async def test_a_partial_handoff_is_encoded_segment_by_segment(pair):
    prefill, decode, wire_dtype = pair
    ids, targets = [7, 3, 9, 1, 12], [20, 4, 22, 5, 24]
    handoff = msgspec.structs.replace(prefill.announce(ids), complete=False)
    prefill.leases.extend(handoff.handoff_id, "a", ids[:2])
    task = asyncio.create_task(decode.fetcher.fetch(handoff, 0, targets, decode.pool))
    await eventually(
        lambda: np.array_equal(decode.layers[-1][targets[:2]], rounded(prefill.layers[-1][ids[:2]], wire_dtype))
    )
    prefill.leases.publish(handoff.handoff_id, "a", ids, 20, LEASE_S, first_token=77)
    result = await asyncio.wait_for(task, PATIENCE_S)
    assert (result.outcome, result.first_token) == ("ok", 77), result
    for ours, theirs in zip(decode.layers, prefill.layers, strict=True):
        np.testing.assert_array_equal(ours[targets], rounded(theirs[ids], wire_dtype))


async def test_a_flipped_bit_in_a_scale_is_detected(pair):
    prefill, decode, _ = pair

    def flip(index, frame):
        damaged = bytearray(frame)
        damaged[HEADER_BYTES] ^= 0x10 if index == 1 else 0
        yield bytes(damaged)

    alter_frames(prefill, flip)
    before = [layer.copy() for layer in decode.layers]
    result = await decode.fetcher.fetch(prefill.publish([1, 2]), 0, [8, 3], decode.pool)
    assert (result.outcome, result.reason) == ("failed", errors.CORRUPTED), result
    np.testing.assert_array_equal(decode.layers[1:], before[1:])


async def test_a_wire_dtype_the_source_does_not_know_is_a_bad_request(pair):
    prefill, decode, _ = pair
    before = [layer.copy() for layer in decode.layers]
    real = prefill.source.server.read

    def of_a_newer_peer(request, wanted=lambda: True):
        return real(msgspec.structs.replace(request, wire_dtype="int4"), wanted)

    prefill.source.server.read = of_a_newer_peer
    result = await decode.fetcher.fetch(prefill.publish([1, 2]), 0, [8, 3], decode.pool)
    assert (result.outcome, result.reason) == ("failed", errors.BAD_REQUEST)
    assert "unknown wire_dtype 'int4'" in result.message
    np.testing.assert_array_equal(decode.layers, before)


async def test_frames_that_are_not_encoded_as_asked_are_refused(pair):
    prefill, decode, wire_dtype = pair
    real = prefill.source.server.read

    def deaf(request, wanted=lambda: True):
        return real(msgspec.structs.replace(request, wire_dtype="none"), wanted)

    prefill.source.server.read = deaf
    result = await decode.fetcher.fetch(prefill.publish([1, 2]), 0, [8, 3], decode.pool)
    assert (result.outcome, result.reason) == ("failed", errors.CORRUPTED)
    assert f"wire_dtype {wire_dtype}" in result.message


@pytest.mark.parametrize("wire_dtype", ENCODINGS)
@pytest.mark.parametrize(("their_ranks", "our_ranks"), [(2, 1), (1, 2), (4, 2)])
async def test_heads_of_unequal_ranks_keep_their_own_scales(wire_dtype, their_ranks, our_ranks):
    def nodes_of(ranks: int, wire_dtype: str) -> list[Node]:
        layout = msgspec.structs.replace(LAYOUT, tensor_parallel_size=ranks, block_bytes=2400 // ranks)
        return [node_of("grpc", wire_dtype, layout, seed=rank, rank=rank) for rank in range(ranks)]

    prefill, decode = nodes_of(their_ranks, "none"), nodes_of(our_ranks, wire_dtype)
    whole = [np.concatenate([node.layers[layer] for node in prefill], axis=1) for layer in range(NUM_LAYERS)]
    ids, targets = [9, 2, 3, 30], [1, 2, 8, 5]
    handoff = msgspec.structs.replace(
        prefill[0].announce(ids), addresses=tuple(node.source.address for node in prefill)
    )
    for node in prefill:
        node.leases.publish(handoff.handoff_id, "a", ids, 16, LEASE_S)
    try:
        for rank, node in enumerate(decode):
            result = await node.fetcher.fetch(handoff, 0, targets, node.pool)
            assert result.outcome == "ok", result
            for layer, rows in zip(whole, node.layers, strict=True):
                expected = rounded(layer[ids], wire_dtype)[:, rank * 2400 // our_ranks :][:, : 2400 // our_ranks]
                np.testing.assert_array_equal(rows[targets], expected)
    finally:
        await close(*prefill, *decode)


async def test_a_pair_on_one_host_that_picks_shared_memory_copies_blocks_as_they_are():
    prefill, decode = node_of("auto", "int8", seed=0), node_of("auto", "int8", seed=1)
    try:
        result = await decode.fetcher.fetch(prefill.publish([1, 2]), 0, [8, 3], decode.pool)
        assert (result.outcome, result.transport) == ("ok", "shm"), result
        for ours, theirs in zip(decode.layers, prefill.layers, strict=True):
            np.testing.assert_array_equal(ours[[8, 3]], theirs[[1, 2]])
    finally:
        await close(prefill, decode)
