"""What is checked of a Ray cluster that is joined: that it can be, that workers have a place, and each machine of it.

Why: of a machine on which the set-up did not run, Ray says nothing, or that it is alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import unfit_for
from ridgeline.cluster.doctor.software import CheckResult, judged
from ridgeline.cluster.errors import ServingError
from ridgeline.cluster.ray_nodes import AutoscalerReport, Resources, ask_autoscaler, fits, why_no_place
from ridgeline.cluster.runtime.handles.actor import why_not_started
from ridgeline.cluster.runtime.ray_start import ray_runtime

MACHINE_WITHIN_S: Final = 60.0
"""More than it takes to start a process there, import Ridgeline, and ask a driver that keeps no GPU initialised."""


async def joined_checks(config: RidgelineConfig) -> list[CheckResult]:
    """Join the cluster at ray.address, run every check of it, and leave it."""
    try:
        async with ray_runtime(config):
            nodes = [node for node in ray.nodes() if node["Alive"]]
            says = ask_autoscaler()
            resources = [node["Resources"] for node in nodes]
            found = [CheckResult("ray", True, f"joined, {len(nodes)} machine{'' if len(nodes) == 1 else 's'}")]
            return [*found, *places(config, resources, says), *_autoscaler(says), *_machines(config, nodes)]
    except ServingError as error:
        return [CheckResult("ray", False, "cannot be joined", f"{error}.")]


def places(config: RidgelineConfig, machines: Sequence[Resources], says: AutoscalerReport) -> Iterator[CheckResult]:
    """Check that the machines have places for all workers and the router, if nothing else ran there."""
    left = [dict(machine) for machine in machines]
    wanted = [
        (config.section_of(name), config.takes(pool), pool.workers) for name, pool in config.active_pools().items()
    ]
    for section, takes, number in [("router", config.router.resources, 1), *wanted]:
        found = 0
        while found < number and (machine := next((one for one in left if fits(takes, one)), None)) is not None:
            found += 1
            machine |= {name: machine[name] - each for name, each in takes.items()}
        detail = f"{found} of {number} have a place"
        if says.launches and found < number:
            later = "Ray's autoscaler launches machines when `serve` asks."
            yield CheckResult(f"places, {section}", True, detail, later)
            continue
        why = why_no_place(takes, section, machines) or (
            f"{number - found} more places are needed: start Ray on more machines, or lower {section}.workers"
        )
        alone = " Only the head has joined: see on the other machines whether set-up and `ray start` failed."
        yield judged(f"places, {section}", found == number, detail, f"{why}.{alone if len(machines) == 1 else ''}")


def _autoscaler(says: AutoscalerReport) -> Iterator[CheckResult]:
    if says.failures:
        fix = f"{', '.join(says.failures)}: monitor.log among Ray's logs on the head tells more."
        yield CheckResult("autoscaler", True, "machines failed, were lost or cannot be had", fix)


def _machines(config: RidgelineConfig, nodes: Sequence[dict[str, Any]]) -> Iterator[CheckResult]:
    """Have each machine check itself for the pools of which it has places."""
    asked = {}
    for node in nodes:
        pools = [name for name, pool in config.active_pools().items() if fits(config.takes(pool), node["Resources"])]
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        check = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(unfit_for).options(scheduling_strategy=there)
        asked[check.remote(config, pools)] = (node["NodeManagerAddress"], pools)
    ray.wait([*asked], num_returns=len(asked), timeout=MACHINE_WITHIN_S)
    for answer, (host, pools) in asked.items():
        try:
            fix = " ".join(ray.get(answer, timeout=0))
        except TimeoutError:
            fix = f"No answer within {MACHINE_WITHIN_S:.0f} s: see raylet.err among Ray's logs there."
        except RayError as error:
            fix = f"{why_not_started(error)}."
        yield judged(f"machine {host}", not fix, f"can run {' and '.join(pools) or 'no engine'}", fix)
