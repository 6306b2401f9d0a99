"""What is checked of a Ray cluster that is joined: that it can be, that workers have a place, and each machine of it.

Why: of a machine on which the set-up did not run, Ray says nothing, or that it is alive.
"""

from __future__ import annotations

from collections import Counter
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
    there = placed(config, machines)
    for section, takes, number in _wanted(config):
        found = sum(here[section] for here in there)
        detail = f"{found} of {number} have a place"
        if says.launches and found < number:
            later = "Ray's autoscaler launches machines when `serve` asks."
            yield CheckResult(f"places, {section}", True, detail, later)
            continue
        more = f"{number - found} more place{' is' if number - found == 1 else 's are'}"
        why = why_no_place(takes, section, machines) or (
            f"{more} needed: start Ray on more machines, or lower {section}.workers"
        )
        alone = " Only the head has joined: see on the other machines whether set-up and `ray start` failed."
        yield judged(f"places, {section}", found == number, detail, f"{why}.{alone if len(machines) == 1 else ''}")


def placed(config: RidgelineConfig, machines: Sequence[Resources]) -> list[Counter[str]]:
    """Return how many workers of each section have a place on each machine, if nothing else ran there.

    Like Ray, which fills half of a machine's cores before it turns to another, and then takes the emptiest.
    """
    left, there = [dict(machine) for machine in machines], [Counter[str]() for _ in machines]

    def busy(index: int) -> float:
        cores = machines[index].get("CPU", 0)
        part = 1 - left[index]["CPU"] / cores if cores else 0
        return part if part >= 0.5 else 0

    for section, takes, number in _wanted(config):
        for _ in range(number):
            best = min((index for index, one in enumerate(left) if fits(takes, one)), key=busy, default=None)
            if best is None:
                break
            there[best][section] += 1
            left[best] |= {name: left[best][name] - each for name, each in takes.items()}
    return there


def _wanted(config: RidgelineConfig) -> list[tuple[str, Resources, int]]:
    """Return what the router and a worker of each pool take of a machine, and how many there are, by section."""
    pools = config.active_pools().items()
    workers = [(config.section_of(name), config.takes(pool), pool.workers) for name, pool in pools]
    return [("router", config.router.resources, 1), *workers]


def _autoscaler(says: AutoscalerReport) -> Iterator[CheckResult]:
    if says.failures:
        fix = f"{', '.join(says.failures)}: monitor.log among Ray's logs on the head tells more."
        yield CheckResult("autoscaler", True, "machines failed, were lost or cannot be had", fix)


def _machines(config: RidgelineConfig, nodes: Sequence[dict[str, Any]]) -> Iterator[CheckResult]:
    """Have each machine check itself for all workers that have a place there, and for one of each other pool."""
    there: dict[str, Counter[str]] = {}  # several of Ray's nodes may be one machine
    for node, here in zip(nodes, placed(config, [node["Resources"] for node in nodes]), strict=True):
        there.setdefault(node["NodeManagerAddress"], Counter()).update(here)
    asked = {}
    for node in nodes:
        here = there[node["NodeManagerAddress"]]
        pools = [name for name, pool in config.active_pools().items() if fits(config.takes(pool), node["Resources"])]
        asked_of = config.active_pools() if pools else ()
        together = {name: number for name in asked_of if (number := here[config.section_of(name)])}
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        check = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(unfit_for).options(scheduling_strategy=strategy)
        answer = check.remote(config, together, [name for name in pools if name not in together])
        can = " and ".join(f"{number} {name}" for name, number in together.items()) or " or ".join(pools)
        asked[answer] = (node["NodeManagerAddress"], can)
    ray.wait([*asked], num_returns=len(asked), timeout=MACHINE_WITHIN_S)
    for answer, (host, can) in asked.items():
        try:
            fix = " ".join(ray.get(answer, timeout=0))
        except TimeoutError:
            fix = f"No answer within {MACHINE_WITHIN_S:.0f} s: see raylet.err among Ray's logs there."
        except RayError as error:
            fix = f"{why_not_started(error)}."
        detail = f"unfit for {can or 'any engine'}" if fix else f"can run {can or 'no engine'}"
        yield CheckResult(f"machine {host}", not fix, detail, fix)
