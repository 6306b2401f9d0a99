"""Whether a model's heads can be split over a pool's ranks.

Why: vLLM finds out half a minute into its start, in a rank's process, and its error names no pool.
"""

from __future__ import annotations

from ridgeline.cluster.config.models import PoolConfig, RidgelineConfig
from ridgeline.cluster.doctor.facts import ModelFacts
from ridgeline.contracts.vocabulary import Pool


def head_conflicts(config: RidgelineConfig, model: ModelFacts) -> list[str]:
    """Return one sentence for each pool of this mode whose ranks cannot hold whole heads.

    None if the heads are unknown.
    """
    found = []
    for name, pool in config.active_pools().items():
        for kind, heads in (("KV", model.kv_heads), ("attention", model.attention_heads)):
            if heads and not _splits(heads, name, pool):
                found.append(_sentence(config, name, pool, f"{heads} {kind} heads", _allowed(model)))
                break
    return found


def _splits(heads: int, name: Pool, pool: PoolConfig) -> bool:
    if name == "colocated" and pool.ranks > heads:  # nothing is handed over: vLLM may keep copies of KV heads
        return pool.ranks % heads == 0
    return heads % pool.ranks == 0


def _sentence(config: RidgelineConfig, name: Pool, pool: PoolConfig, heads: str, allowed: list[int]) -> str:
    setting = "gpus_per_worker" if pool.gpus_per_worker else "tensor_parallel"
    values = " or ".join(map(str, allowed))
    return (
        f"{config.model.path} has {heads}, which cannot be split over the {pool.ranks} ranks of each {name} engine: "
        f"set {config.section_of(name)}.{setting} to {values}, or serve another model."
    )


def _allowed(model: ModelFacts) -> list[int]:
    """Return the numbers of ranks that divide both kinds of heads."""
    kinds = [heads for heads in (model.kv_heads, model.attention_heads) if heads]
    return [ranks for ranks in range(1, min(kinds) + 1) if all(heads % ranks == 0 for heads in kinds)]
