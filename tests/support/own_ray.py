"""Starts Ray as `serve` does, without engines, and prints what one sees who looks at it, as JSON.

`actor`: where an actor started. `stranger`: what somebody gets who does not know its token. `session`: its folder.
`log`: that of a worker beside Ray's own, whose service has said that it begins.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import ray

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.folders import log_name
from ridgeline.cluster.ray_nodes import logs_folder
from ridgeline.cluster.runtime.actors import ServiceActor, engine_environment
from ridgeline.cluster.runtime.ray_start import ray_runtime
from ridgeline.cluster.runtime.service_process.launch import PRELOADED
from tests.support.patience import PATIENCE_S

STRANGER = "import sys; from ray._raylet import GcsClient; print(GcsClient(address=sys.argv[1]).check_alive([], 10))"
LOG = log_name("mine", "worker-0")


async def main() -> None:
    os.environ[PRELOADED] = "none"  # nothing here needs vLLM
    config = RidgelineConfig()
    async with ray_runtime(config):
        variables = engine_environment(1, PATIENCE_S, on_cpu=True) | config.logging_of("worker-0").variables()
        options = ray.remote(ServiceActor).options(num_cpus=0, runtime_env={"env_vars": variables})
        async with asyncio.timeout(PATIENCE_S):
            actor = options.remote("tests.support.example_service:Example", "t", LOG)
            place = await actor.place.remote()
            await actor.begin.remote()
            await actor.call.remote("say", "begins")
        here = ray.get_runtime_context()
        stranger = subprocess.run(  # noqa: ASYNC221 - nothing else runs
            [sys.executable, "-c", STRANGER, here.gcs_address],
            env=os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x" * 32},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        told = (stranger.stdout + stranger.stderr).strip().splitlines()[-1]
        seen = {"actor": place.host, "stranger": told, "session": here.get_session_name()}
        seen["log"] = (logs_folder() / LOG).read_text(encoding="utf-8")
        sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
