"""A router's worker without a connection: what it holds and says of itself, for decisions that ask nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.fleet.worker import Worker
from tests.support.samples import worker_description


@dataclass
class Connected:
    """Stands in for the connection, of which a decision only asks whether it is there."""

    connected: bool = True
    failed_s: float = float("-inf")

    def has_failed(self) -> None:
        self.failed_s = 1.0


def lone_worker(worker_id: str = "worker-0", pool: Pool = "adaptive", **description: Any) -> Worker:
    """Return a worker of this description, which has not yet told its status."""
    return Worker(cast(Any, Connected()), worker_description(worker_id=worker_id, pool=pool, **description))
