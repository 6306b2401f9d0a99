"""Whether a model can be served as configured, judged by its `config.json`.

Why: an engine that finds out has loaded the weights by then, and a property that nobody checks gives wrong text. For a
model that is still on the hub, `ridgeline.engine.vllm_engine` makes the same checks before it loads anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ridgeline.cluster.config.models import PoolConfig, RidgelineConfig
from ridgeline.cluster.doctor.facts import HostFacts, ModelFacts
from ridgeline.cluster.doctor.software import CheckResult
from ridgeline.cluster.model_store import is_hub_name
from ridgeline.contracts.errors import AdapterRefused
from ridgeline.contracts.vocabulary import Pool
from ridgeline.engine.adapter_files import require_fit
from ridgeline.engine.connector.transferable_models import keeps_states, why_unsupported
from ridgeline.engine.passed_args import adapter_modules
from ridgeline.engine.speculation import speculates


def model_conflicts(config: RidgelineConfig, model: ModelFacts) -> list[str]:
    """Return one sentence for each reason why this model cannot be served so; none if nothing is known about it."""
    return _unsupported(config, model) or [*_unequal_ranks(config, model), *_head_conflicts(config, model)]


def adapters(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    """Check the LoRA adapters that are served from the start; one that is on the hub is left to the engines."""
    max_rank = config.engine_args.get("max_lora_rank", 16)
    for module in adapter_modules(config.server_args.get("lora_modules") or []):
        name, path = f"adapter {module['name']}", Path(local_path(module["path"]))
        if not path.exists() and is_hub_name(module["path"]):
            yield CheckResult(name, True, f"{path}, taken from the hub or its cache on first use")
            continue
        try:
            require_fit(path, max_rank, host.model.config)
        except AdapterRefused as error:
            yield CheckResult(name, False, f"{path} cannot be served", f"{error}.")
        else:
            yield CheckResult(name, True, f"{path}, on disk")


def local_path(path: str) -> str:
    """Return a path that means the same in every folder; what is no folder here is left as it is."""
    expanded = os.path.expanduser(path)
    return os.path.abspath(expanded) if os.path.exists(expanded) else expanded


def _unsupported(config: RidgelineConfig, model: ModelFacts) -> list[str]:
    reason = model.pooling or why_unsupported(
        model.config,
        on_cpu=not config.uses_gpus(),
        prefix_caching=config.engine_args.get("enable_prefix_caching") is not False,
        speculates=config.mode != "colocated"
        and any(speculates(config.args_of(name)) for name in config.active_pools()),
    )
    return [] if reason is None else [f"{config.model.path} cannot be served: {reason}."]


def _unequal_ranks(config: RidgelineConfig, model: ModelFacts) -> list[str]:
    if model.has_latent_kv:
        kept = "one latent vector a token (MLA), whole on every rank"
    elif keeps_states(model.config):
        kept = "recurrent states, each rank a part of several runs of bytes"
    else:
        return []
    ranks = [pool.ranks for pool in config.active_pools().values()]
    prefill, decode = ranks[0], ranks[-1]
    if config.mode == "colocated" or prefill == decode:
        return []
    return [
        f"{config.model.path} keeps {kept}, so that the {prefill} ranks of a prefill engine cannot share them with the "
        f"{decode} of a decode engine: set "
        "pools.prefill.tensor_parallel_size and pools.decode.tensor_parallel_size alike (on GPUs through "
        "gpus_per_worker)."
    ]


def _head_conflicts(config: RidgelineConfig, model: ModelFacts) -> list[str]:
    """Return one sentence for each pool of this mode whose ranks cannot hold whole heads.

    None if the heads are unknown.
    """
    found = []
    kinds = {kind: heads for kind, heads in (("KV", model.kv_heads), ("attention", model.attention_heads)) if heads}
    for name, pool in config.active_pools().items():
        wrong = next((f"{heads} {kind} heads" for kind, heads in kinds.items() if not _splits(heads, name, pool)), None)
        if wrong is not None:
            allowed = [n for n in range(1, min(kinds.values()) + 1) if not any(heads % n for heads in kinds.values())]
            setting = "gpus_per_worker" if pool.gpus_per_worker else "tensor_parallel_size"
            values = " or ".join(map(str, allowed))
            found.append(
                f"{config.model.path} has {wrong}, which cannot be split over the {pool.ranks} ranks of each {name} "
                f"engine: set {config.section_of(name)}.{setting} to {values}, or serve another model."
            )
    return found


def _splits(heads: int, name: Pool, pool: PoolConfig) -> bool:
    if name == "colocated" and pool.ranks > heads:  # nothing is handed over: vLLM may keep copies of KV heads
        return pool.ranks % heads == 0
    return heads % pool.ranks == 0
