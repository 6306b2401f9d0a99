"""The section `autoscale`: whether the number of workers follows the load, and within which bounds.

Part of `ridgeline.cluster.config.models`, which checks it against the other sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from ridgeline.contracts.section import Section
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.scheduler.sizing import Bounds

MOST_WORKERS = 1000


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
        default=60.0, ge=1, description="interval between decisions; the requests of ten intervals are simulated"
    )
    goal: float = Field(
        default=0.95, gt=0, lt=1, description="SLO attainment to keep, by the SLOs that requests have (router.slo)"
    )
    prefill: PoolBounds = PoolBounds()
    decode: PoolBounds = PoolBounds()
    colocated: PoolBounds = PoolBounds()
    adaptive: PoolBounds = PoolBounds()

    def by_pool(self) -> Mapping[Pool, PoolBounds]:
        """Return what is said of each pool."""
        return {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated, "adaptive": self.adaptive}

    def bounds(self) -> Mapping[Pool, Bounds]:
        """Return the bounds of the pools that may be changed."""
        return {
            pool: Bounds(said.min_workers, said.max_workers)
            for pool, said in self.by_pool().items()
            if said.min_workers is not None and said.max_workers is not None
        }
