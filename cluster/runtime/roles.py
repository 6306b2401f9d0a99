"""Which worker gets which role in each mode, or why the mode of a deployment cannot change.

Workers are started once. So a mode can be changed only if every worker has the same cores, GPUs, memory and engine
arguments in the pool that it has in the other mode. The limits of a step may differ, since they are set at run time.
So may `resources`: they say where Ray places a worker when it starts, and a change of mode moves none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from ridgeline.cluster.config.models import PoolConfig, RidgelineConfig, conflicts
from ridgeline.cluster.doctor.facts import ModelFacts
from ridgeline.cluster.doctor.model_support import model_conflicts
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.contracts.workers import Role

MODES: tuple[Mode, ...] = get_args(Mode)
KEPT = (
    "cores_per_worker",
    "gpus_per_worker",
    "tensor_parallel_size",
    "kv_cache_memory_bytes",
    "mps_active_thread_percent",
    "engine_args",
)
"""What a worker cannot change while it serves. The limits of its steps it can."""


@dataclass(frozen=True)
class ModeRoles:
    """Roles by mode and worker id; both are empty in a deployment that stays in its mode.

    `why_not` says why a mode is not among them.
    """

    by_mode: Mapping[Mode, Mapping[str, Role]] = field(default_factory=dict)
    of_new: Mapping[Mode, Mapping[Pool, Role]] = field(default_factory=dict)
    """Roles of workers that are started later, by the pool for which they are started."""
    why_not: Mapping[Mode, str] = field(default_factory=dict)


def places_of(config: RidgelineConfig) -> dict[str, tuple[Pool, PoolConfig]]:
    """Return the pool of each worker: the ids are the same ones in every mode."""
    places = [(name, pool) for name, pool in config.active_pools().items() for _ in range(pool.workers)]
    return {f"worker-{number}": place for number, place in enumerate(places)}


def mode_roles(config: RidgelineConfig, model: ModelFacts) -> ModeRoles:
    """Return every worker's role in each mode that the deployment can serve, and for the others what is in the way."""
    others = {mode: config.model_copy(update={"mode": mode}) for mode in MODES if mode != config.mode}
    why_not = {
        mode: obstacle for mode, one in others.items() if (obstacle := _obstacle(config, one, model)) is not None
    }
    in_mode = {config.mode: config} | {mode: one for mode, one in others.items() if mode not in why_not}
    if len(in_mode) == 1:
        return ModeRoles(why_not=why_not)
    return ModeRoles(
        by_mode={
            mode: {worker_id: _role(mode, *place) for worker_id, place in places_of(one).items()}
            for mode, one in in_mode.items()
        },
        of_new={mode: _roles_of_new(one) for mode, one in in_mode.items()},
        why_not=why_not,
    )


def limits_for_all(pools: Sequence[PoolConfig], start: PoolConfig) -> PoolConfig:
    """Return the settings to start a worker with, so that its engine's buffers fit the limits of all these pools."""
    return start.model_copy(
        update={
            "max_num_seqs": max(pool.max_num_seqs for pool in pools),
            "max_num_batched_tokens": max(pool.max_num_batched_tokens for pool in pools),
        }
    )


def _obstacle(config: RidgelineConfig, other: RidgelineConfig, model: ModelFacts) -> str | None:
    if config.fixed_mode:
        return "fixed_mode is set: leave it out, and start again"
    here, there = places_of(config).values(), places_of(other).values()
    if len(here) != len(there):
        return (
            f"it takes as many workers in both modes, and {_number(config)}, {_number(other)}: make them equal, and "
            "start again"
        )
    for (name, one), (other_name, another) in zip(here, there, strict=True):
        for setting in KEPT:
            value, other_value = _kept(one, setting), _kept(another, setting)
            if value != other_value:
                return (
                    f"a running engine keeps its {setting}: {config.section_of(name)}.{setting} is {value} and "
                    f"{other.section_of(other_name)}.{setting} is {other_value}: make them equal, and start again"
                )
    if other.mode != "colocated" and config.mode == "colocated" and model.state == "hub":
        return (
            f"whether the KV of {config.model.path} can be handed over is known once its config.json is on this "
            f"machine, and the engines have started without it: start in mode {other.mode}, or give model.path as a "
            "directory"
        )
    return next(iter([*conflicts(other), *model_conflicts(other, model)]), None)


def _number(config: RidgelineConfig) -> str:
    pools = config.active_pools()
    settings = [f"{section}.workers" for name in pools for section in config.sections_of(name)]
    total = sum(pool.workers for pool in pools.values())
    return f"{' and '.join(settings)} are {total} together" if len(settings) > 1 else f"{settings[0]} is {total}"


def _kept(pool: PoolConfig, setting: str) -> object:
    return pool.ranks if setting == "tensor_parallel_size" else getattr(pool, setting)


def _roles_of_new(config: RidgelineConfig) -> dict[Pool, Role]:
    """Return roles by pool; a worker that was started for a pool of the other mode joins the one that decodes."""
    own = {name: _role(config.mode, name, pool) for name, pool in config.active_pools().items()}
    decodes = next(reversed(own.values()))
    return dict.fromkeys(config.all_pools(), decodes) | own


def _role(mode: Mode, name: Pool, pool: PoolConfig) -> Role:
    return Role(
        mode=mode,
        pool=name,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        step_target_s=pool.itl_target_ms / 1e3,
    )
