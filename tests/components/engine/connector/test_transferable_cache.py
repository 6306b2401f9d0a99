"""What vLLM's own description of a KV cache must say, and how the cache is seen in the scheduler's blocks."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ridgeline.engine.connector.layout import kv_format
from ridgeline.engine.connector.transferable_cache import by_manager_block, heads_are_runs, require_servable
from ridgeline.engine.connector.transferable_models import UnsupportedModel
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

SHAPE = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=128)
LATENT = MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1, "head_size": 576})


def check(*specs: object, hands_over: bool = True, longest: int = 1024, block: int = 32) -> None:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]  # type: ignore[arg-type]
    cache = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
    require_servable(cache, block_size=block, max_model_len=longest, hands_over=hands_over)


@pytest.mark.parametrize("spec", [FULL, LATENT], ids=lambda spec: type(spec).__name__)
def test_one_group_that_keeps_every_token_is_served(spec: object):
    check(spec)


def test_several_groups_are_refused_in_every_mode_with_what_they_are():
    for hands_over in (True, False):
        with pytest.raises(UnsupportedModel, match=r"2 groups of layers \(FullAttentionSpec, SlidingWindowSpec\)"):
            check(FULL, SLIDING, hands_over=hands_over)


def test_of_a_mixture_vllm_makes_one_such_group_when_a_connector_wants_no_more():
    layers = {"layer.0": SLIDING, "layer.1": FULL, "layer.2": SLIDING}
    unify_hybrid_kv_cache_specs(layers)  # what vLLM does for a connector that is no SupportsHMA
    merged = FullAttentionSpec.merge(list(layers.values()))
    check(merged)


def test_a_window_in_every_layer_is_refused_unless_it_is_longer_than_any_request():
    with pytest.raises(UnsupportedModel, match=r"SlidingWindowSpec, 128 tokens.*mode colocated"):
        check(SLIDING)
    check(SLIDING, longest=128)
    check(SLIDING, hands_over=False)
    with pytest.raises(UnsupportedModel, match="ChunkedLocalAttentionSpec, 128 tokens"):
        check(ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=128))


def test_a_group_of_layers_with_several_block_sizes_is_refused():
    both = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": LATENT, "b": FULL})
    with pytest.raises(UnsupportedModel, match="UniformTypeKVCacheSpecs"):
        check(both)


def test_blocks_of_another_size_than_the_engines_are_refused():
    with pytest.raises(UnsupportedModel, match="32 tokens, and the engine counts in blocks of 16"):
        check(FULL, block=16)


def test_a_cache_in_smaller_blocks_is_seen_in_the_schedulers():
    kernel = torch.arange(8 * 2 * 16 * 4).reshape(8, 2, 16, 4)  # 4 blocks of 32 tokens, the kernel's have 16
    seen = by_manager_block({"a": kernel}, 4)["a"]
    assert seen.shape == (4, 2, 2, 16, 4)
    assert torch.equal(seen[1].flatten(), kernel[2:4].flatten()), "block 1 is the kernel's 2 and 3"
    assert seen.untyped_storage().data_ptr() == kernel.untyped_storage().data_ptr()
    with pytest.raises(UnsupportedModel, match="8 blocks, which is not a multiple of 3"):
        by_manager_block({"a": kernel}, 3)


def test_layers_of_different_sizes_are_refused_by_name():
    with pytest.raises(UnsupportedModel, match="different shapes"):
        by_manager_block({"a": torch.zeros(4, 2, 32, 64), "b": torch.zeros(4, 2, 32, 128)}, 4)


HEADS_FIRST = torch.zeros(4, 2, 32, 128)


@pytest.mark.parametrize(
    ("cache", "spec", "layout", "runs"),
    [
        (HEADS_FIRST, FULL, "LBHNC", True),
        (HEADS_FIRST, FULL, "BLHNC", True),
        (HEADS_FIRST, FULL, "LBNHC", False),
        (HEADS_FIRST.unflatten(0, (2, 2)), FULL, "LBHNC", False),
        (HEADS_FIRST, FullAttentionSpec(**SHAPE, num_head_slots=4), "LBHNC", False),
        (torch.zeros(4, 1, 32, 576), LATENT, "LBHNC", False),
    ],
    ids=["heads first", "blocks first", "tokens first", "kernel blocks", "packed", "latent"],
)
def test_ranks_may_share_a_block_only_where_heads_are_runs_of_bytes(
    cache: torch.Tensor, spec: object, layout: str, runs: bool
):
    assert heads_are_runs(cache, spec, layout) is runs


def test_formats_that_torch_has_no_type_for_are_told_apart():
    assert kv_format(torch.bfloat16, "auto") == kv_format(torch.bfloat16, "bfloat16") == "bfloat16"
    assert kv_format(torch.uint8, "fp8_e4m3") != kv_format(torch.uint8, "fp8_e5m2")
