"""Serve from Python: start Ray and the workers, ask once, drain, end. About 40 seconds on two cores.

    python examples/serve.py

`load_config` takes what `ridgeline serve` takes: a YAML file, and settings by their names.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from rich.console import Console

from ridgeline.cluster.commands.serve import started
from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.doctor.checks import refuse_unfit_machine
from ridgeline.cluster.runtime.ray_start import ray_runtime

CONFIG = Path(__file__).parents[1] / "deploy" / "local.yaml"
DRAIN_TIMEOUT_S = 10


async def main() -> None:
    """Print one answer of a deployment that exists for this block only."""
    config = load_config(CONFIG, {"mode": "colocated", "server.port": "0"}).config
    refuse_unfit_machine(config)
    console = Console()
    async with ray_runtime(config), started(config, console) as deployment:
        watching = asyncio.create_task(deployment.watch(print))  # replaces workers that fail
        async with httpx.AsyncClient(base_url=deployment.url, timeout=60, trust_env=False) as http:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            messages = [{"role": "user", "content": "Name three colours."}]
            body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
            reply = await http.post("/v1/chat/completions", json=body)
            reply.raise_for_status()
        print(reply.json()["choices"][0]["message"]["content"])
        watching.cancel()
        await deployment.drain(DRAIN_TIMEOUT_S)


if __name__ == "__main__":
    asyncio.run(main())
