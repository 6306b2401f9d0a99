"""Whether a model can be served as configured, judged by its `config.json`.

Why: an engine that finds out has loaded the weights by then, and a property that nobody checks gives wrong text. For a
model that is still on the hub, `ridgeline.engine.vllm_engine` makes the same checks before it loads anything.
"""

from __future__ import annotations

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.architectures import architecture_reason
from ridgeline.cluster.doctor.facts import ModelFacts
from ridgeline.cluster.doctor.heads import head_conflicts
from ridgeline.engine.connector.transferable_models import why_unsupported


def model_conflicts(config: RidgelineConfig, model: ModelFacts) -> list[str]:
    """Return one sentence for each reason why this model cannot be served so; none if nothing is known about it."""
    return [*_unsupported(config, model), *_unequal_ranks(config, model), *head_conflicts(config, model)]


def _unsupported(config: RidgelineConfig, model: ModelFacts) -> list[str]:
    reason = (
        architecture_reason(model.config)
        or model.pooling
        or why_unsupported(
            model.config,
            max_model_len_tokens=config.model.max_model_len_tokens,
            hands_over=config.mode != "colocated",
        )
    )
    return [] if reason is None else [f"{config.model.path} cannot be served: {reason}."]


def _unequal_ranks(config: RidgelineConfig, model: ModelFacts) -> list[str]:
    if config.mode == "colocated" or not model.has_latent_kv:
        return []
    ranks = [pool.ranks for pool in config.active_pools().values()]
    prefill, decode = ranks[0], ranks[-1]
    if prefill == decode:
        return []
    return [
        f"{config.model.path} keeps one latent vector a token (MLA), whole on every rank, so that the {prefill} ranks "
        f"of a prefill engine cannot share it with the {decode} of a decode engine: set pools.prefill.tensor_parallel "
        "and pools.decode.tensor_parallel alike (on GPUs through gpus_per_worker)."
    ]
