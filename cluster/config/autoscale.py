"""The section `autoscale`: whether the number of workers follows the load, within which bounds, and how soon.

Part of `ridgeline.cluster.config.models`, which checks it against the other sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from ridgeline.contracts.section import Section
from ridgeline.contracts.vocabulary import Pool

MOST_WORKERS = 1000


class WorkerBounds(NamedTuple):
    """How few and how many workers a pool may be ordered to have."""

    min_workers: int
    max_workers: int


class PoolBounds(Section):
    """The bounds of one pool. Both, or none: the pool then keeps its workers."""

    min_workers: int | None = Field(
        default=None, ge=1, le=MOST_WORKERS, description="fewest workers; null: the autoscaler leaves this pool alone"
    )
    max_workers: int | None = Field(
        default=None, ge=1, le=MOST_WORKERS, description="most workers; null: the autoscaler leaves this pool alone"
    )


class AutoscaleConfig(Section):
    """Whether pools get more workers or fewer by themselves, and when."""

    mode: Literal["none", "advise", "act"] = Field(
        default="none",
        description="none: only operators change pools; advise: print each decision; act: also carry it out, as "
        "`ridgeline scale` would",
    )
    interval_s: float = Field(
        default=15.0, ge=1, description="interval between readings of the routers; longer than an engine step"
    )
    up_use: float = Field(
        default=0.8, gt=0, le=1, description="a pool grows by one worker when at least this fraction of it is in use"
    )
    down_use: float = Field(
        default=0.3,
        gt=0,
        lt=1,
        description="a pool shrinks by one worker when at most this fraction of it is in use; below up_use",
    )
    up_after_s: float = Field(default=60.0, ge=0, description="how long a pool must be above up_use before it grows")
    down_after_s: float = Field(
        default=600.0, ge=0, description="how long a pool must be below down_use before it shrinks; at least up_after_s"
    )
    cooldown_s: float = Field(
        default=180.0, ge=0, description="pause after a change of any pool, an operator's included"
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0, description="how long requests may finish on a leaving worker before they migrate"
    )
    ttft_slo_ms: float | None = Field(
        default=None,
        ge=10,
        le=64_000,
        description="TTFT SLO of the autoscaler, rounded down to a bucket of ridgeline_ttft_seconds; when missed, "
        "prefill, colocated or adaptive grows; null: none",
    )
    tpot_slo_ms: float | None = Field(
        default=None,
        ge=5,
        le=2_000,
        description="TPOT SLO of the autoscaler, rounded down to a bucket of ridgeline_tpot_seconds; when missed, "
        "decode, colocated or adaptive grows; null: none",
    )
    min_attainment: float = Field(
        default=0.9, gt=0, le=1, description="an SLO counts as missed below this SLO attainment"
    )
    prefill: PoolBounds = PoolBounds()
    decode: PoolBounds = PoolBounds()
    colocated: PoolBounds = PoolBounds()
    adaptive: PoolBounds = PoolBounds()

    def by_pool(self) -> Mapping[Pool, PoolBounds]:
        """Return what is said of each pool."""
        return {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated, "adaptive": self.adaptive}

    def bounds(self) -> Mapping[Pool, WorkerBounds]:
        """Return the bounds of the pools that may be changed."""
        return {
            pool: WorkerBounds(said.min_workers, said.max_workers)
            for pool, said in self.by_pool().items()
            if said.min_workers is not None and said.max_workers is not None
        }
