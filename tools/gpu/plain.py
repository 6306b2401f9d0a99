"""Records what plain vLLM answers, run like a decode worker of a configuration.

usage: python -m tools.gpu.plain CONFIG.yaml OUT.json [--model NAME] [--longest-chars 16000]
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.runtime.plan import make_plan
from tools.differential.plain import plain_vllm
from tools.gpu.answers import Recording, record, save


async def answers(config: Path, model: str | None, longest_chars: int) -> Recording:
    """Start plain vLLM, record its answers, and stop it."""
    loaded = load_config(config, {"model.path": model} if model else {})
    plan = await asyncio.to_thread(make_plan, loaded.config)
    async with plain_vllm(plan) as server:
        await server.ready(plan.config.supervision.start_timeout_s)
        return await record(str(server.http.base_url), longest_chars)


def main() -> None:
    """Write the recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--longest-chars", type=int, default=16_000)
    asked = parser.parse_args()
    save(asyncio.run(answers(asked.config, asked.model, asked.longest_chars)), asked.out)


if __name__ == "__main__":
    main()
