"""Which numbers of ranks a model's heads allow."""

import pytest

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.doctor.facts import ModelFacts
from ridgeline.cluster.doctor.model_support import head_conflicts


def conflicts_of(model: ModelFacts, mode: str = "disaggregated", gpus: bool = False, **ranks: int) -> list[str]:
    flags = {"mode": mode, "model.path": "mine"}
    for pool in ("prefill", "decode", "colocated"):
        count = str(ranks.get(pool, 1))
        settings = ("gpus_per_worker",) if gpus else ("tensor_parallel_size", "cores_per_worker")
        flags |= {f"pools.{pool}.{setting}": count for setting in settings}
    return head_conflicts(load_config(None, flags).config, model)


LLAMA = ModelFacts(attention_heads=32, kv_heads=8)


def test_ranks_that_divide_the_heads_are_accepted_in_both_pools():
    assert conflicts_of(LLAMA, prefill=8, decode=2) == []


def test_more_ranks_than_kv_heads_are_refused_where_kv_is_handed_over_and_named_with_what_is_allowed():
    (sentence,) = conflicts_of(LLAMA, gpus=True, prefill=16, decode=8)
    assert sentence == (
        "mine has 8 KV heads, which cannot be split over the 16 ranks of each prefill engine: set "
        "pools.prefill.gpus_per_worker to 1 or 2 or 4 or 8, or serve another model."
    )
    assert conflicts_of(LLAMA, mode="colocated", colocated=16) == [], "vLLM copies KV heads to several ranks"


def test_attention_heads_must_be_divisible_too():
    (sentence,) = conflicts_of(ModelFacts(attention_heads=6, kv_heads=None), decode=4)
    assert sentence.startswith("mine has 6 attention heads")
    assert "pools.decode.tensor_parallel_size to 1 or 2 or 3 or 6" in sentence


def test_each_pool_is_told_by_itself_and_only_the_pools_of_the_mode():
    odd = ModelFacts(attention_heads=9, kv_heads=3)
    assert len(conflicts_of(odd, prefill=2, decode=2, colocated=2)) == 2
    assert len(conflicts_of(odd, mode="colocated", colocated=2)) == 1


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_model_whose_heads_are_not_known_is_left_to_the_engine(ranks):
    assert conflicts_of(ModelFacts("hub"), prefill=ranks, decode=ranks) == []
