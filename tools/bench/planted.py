"""Compares a running mode with itself behind a proxy that plants a known difference in arm b, as `compare` does.

Both arms pass through a proxy, and one of the two changes nothing. What ought to come out is known: `better` for arm a,
after about as many pairs as `make power` says, or with `--plant nothing` anything but `better`.

usage: python -m tools.bench.planted [--plant tpot|attainment|nothing] [--mode colocated] [--out runs/planted]
                                     [--plan key=value ...], where the keys are options of `ridgeline compare`
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from cluster.commands.serve import refuse_unfit_machine, started
from cluster.config.loader import load_config
from cluster.runtime.ray_start import ray_runtime
from loadtest.arms import Devices, Reached
from loadtest.compare import compare
from loadtest.plan import ComparePlan
from tools.bench.slow_proxy import Slowness, proxied

LATE_S: Final = 10.0
"""Longer than five times the unloaded TTFT of the demo's prompts, so that a late answer misses its limit."""
PLANTS: Final = {
    "tpot": Slowness(tpot_factor=1.1),
    "attainment": Slowness(late_share=0.1, late_s=LATE_S),
    "nothing": Slowness(),
}


@dataclass(slots=True)
class ProxiedArm:
    """One way to the same deployment, which is never restarted."""

    mode: str
    base_url: str
    start_s: float = 0.0
    devices: Devices | None = None
    _was_ready: bool = False

    async def ready(self) -> Reached:
        """Say at first that its workers must be warmed up."""
        is_fresh, self._was_ready = not self._was_ready, True
        return Reached(self.base_url, is_fresh)


async def run(config_file: str, mode: str, slowness: Slowness, plan: ComparePlan, out: Path) -> str:
    """Start the deployment and both proxies, compare them, and return the outcome."""
    console = Console(width=140)
    config = load_config(config_file, {"mode": mode, "server.port": "0"}).config
    refuse_unfit_machine(config)
    async with ray_runtime(config), started(config, console) as deployment:
        with proxied(deployment.url, Slowness()) as as_it_is, proxied(deployment.url, slowness) as slower:
            arms = ProxiedArm(mode, as_it_is), ProxiedArm(mode, slower)
            comparison = await compare(arms, plan, out, console)
    return comparison.conclusion.outcome


def main() -> None:
    """Read the command line, compare, and print what was planted beside what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plant", choices=tuple(PLANTS), default="tpot")
    parser.add_argument("--mode", choices=("colocated", "disaggregated"), default="colocated")
    parser.add_argument("--config", default="deploy/local.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/planted"))
    parser.add_argument("--plan", nargs="*", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    chosen = {"rate": "auto", "slo": "auto"} | dict(one.split("=", 1) for one in given.plan)
    plan = ComparePlan.model_validate(chosen | {"arms": f"{given.mode},{given.mode}"})
    slowness = PLANTS[given.plant]
    outcome = asyncio.run(run(given.config, given.mode, slowness, plan, given.out))
    sys.stdout.write(f"planted in arm b: {given.plant} {slowness}; found: {outcome}\n")


if __name__ == "__main__":
    main()
