"""The router's actor on a real Ray: a router whose event loop is busy still says how it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.runtime.actors import HEALTH, RouterActor
from tests.engines.harness import Engines

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]
GIVES_UP_AFTER_S = 60.0


def blocked_router() -> Any:
    """An actor as the router's that can be made to hold its own loop, as one very large answer would.

    Made in a function: Ray's worker cannot import this module.
    """

    def hold_until(path: Path) -> bool:
        deadline_s = time.monotonic() + GIVES_UP_AFTER_S
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return path.exists()

    class Blocked(RouterActor):
        async def block_until(self, path: Path) -> bool:
            """Return once there is such a file; False if it did not come."""
            return hold_until(path)

    return ray.remote(concurrency_groups={HEALTH: 1})(Blocked).options(num_cpus=0).remote()


async def test_a_router_whose_loop_is_blocked_still_answers_for_its_health(engines: Engines, tmp_path: Path):
    actor = blocked_router()
    try:
        assert await actor.failure.remote() == "actor_died", "it has no router yet"
        answered = tmp_path / "answered"
        blocked = actor.block_until.remote(answered)
        assert [await actor.failure.remote() for _ in range(3)] == ["actor_died"] * 3
        answered.touch()
        assert await blocked, "its health was told only once the loop was free"
    finally:
        ray.kill(actor)
