"""Starts a deployment by `ridgeline serve`, with a client and a text to cut prompts from."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from transformers import AutoTokenizer

from ridgeline.loadtest.run.server import first_model, open_http
from ridgeline.loadtest.trace.prompts import load_text_tokens
from tests.engines.serve_process import REPOSITORY, serving
from tools.chaos.deployment import Deployment

LOCAL: Final = REPOSITORY / "deploy/local.yaml"
STOPPED_WITHIN_S: Final = 90.0


@dataclass(frozen=True)
class Running:
    """A running deployment and what is needed to use it."""

    deployment: Deployment
    http: httpx.AsyncClient
    model: str
    model_path: str
    tokenizer: Any
    text_tokens: tuple[int, ...]

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of an answer, as the server makes it."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


@asynccontextmanager
async def running(settings: Sequence[str], config: Path) -> AsyncIterator[Running]:
    """Run `ridgeline serve` on this configuration with these `--set` values until the block ends."""
    last = {setting.partition("=")[0]: setting for setting in settings}  # a caller's own overrides the tool's
    arguments = ["-c", str(config), *(word for setting in last.values() for word in ("--set", setting))]
    with serving(*arguments) as serve:
        url = await asyncio.to_thread(serve.wait_ready)
        async with open_http(url) as http:
            card = await first_model(http)
            assert card.root is not None, "the server does not say where its model is"
            tokenizer = AutoTokenizer.from_pretrained(card.root)
            tokens = load_text_tokens(card.root)
            yield Running(Deployment(serve, url, http), http, card.id, card.root, tokenizer, tokens)


async def stop(running: Running) -> str:
    """Stop it with Ctrl-C, as an operator would; return what went wrong, or an empty string."""
    serve = running.deployment.serve
    if serve.process.poll() is not None:
        last = next((line for line in reversed(serve.lines) if line.strip()), "")
        return f"serve had ended by itself with exit status {serve.process.returncode}: {last}"
    serve.process.send_signal(signal.SIGINT)
    try:
        status = await asyncio.to_thread(serve.wait_exit, STOPPED_WITHIN_S)
    except subprocess.TimeoutExpired:
        return f"serve did not stop within {STOPPED_WITHIN_S:.0f} s"
    return "" if status == 0 else f"serve ended with exit status {status}: {serve.lines[-1] if serve.lines else ''}"


def pool_settings(prefill: int, decode: int, kv_cache: str, step_tokens: int) -> list[str]:
    """Return settings for each pool's workers, alike in both modes; engines share cores if there are too few cores."""
    found = [f"pools.prefill.workers={prefill}", f"pools.decode.workers={decode}"]
    found.append(f"pools.colocated.workers={prefill + decode}")
    for pool in ("prefill", "decode", "colocated"):
        found += [
            f"pools.{pool}.kv_cache_memory_bytes={kv_cache}",
            f"pools.{pool}.max_num_batched_tokens={step_tokens}",
        ]
    return [*found, "ray.share_cores=true"] if prefill + decode > len(os.sched_getaffinity(0)) else found
