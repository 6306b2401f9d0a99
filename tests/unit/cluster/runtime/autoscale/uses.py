"""Readings of a fleet that is not there, for tests of what scales pools."""

from __future__ import annotations

from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.observe.fleet_use import FleetUse, WorkerUse

PLACES = 100
KV_BLOCKS = 1000


def a_fleet_use(
    waiting: dict[Pool, int] | None = None,
    prompt_steps_s: float = 0.0,
    lost: tuple[str, ...] = (),
    blocks: float = 0.0,
    **pools: tuple[int, float],
) -> FleetUse:
    """Workers of each pool: how many, and which fraction of their places is taken.

    `prompt_steps_s` is what every engine has spent in steps with prompts; `blocks` the fraction of KV blocks in use.
    """
    workers: list[WorkerUse] = []
    for pool, (number, taken) in pools.items():
        for _ in range(number):
            name = f"worker-{len(workers)}"
            workers.append(
                WorkerUse(
                    worker_id=name,
                    incarnation="1",
                    pool=pool,  # type: ignore[arg-type]
                    usable=name not in lost,
                    prompt_steps_s=prompt_steps_s,
                    running=round(taken * PLACES),
                    places=PLACES,
                    kv_blocks_used=round(blocks * KV_BLOCKS),
                    kv_blocks=KV_BLOCKS,
                )
            )
    return FleetUse(tuple(workers), waiting or {})
