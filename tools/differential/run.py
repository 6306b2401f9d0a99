"""Sends random requests to a disaggregated deployment and to plain vLLM, whose answers must be the same.

Everything is real: the router over HTTP, Ray, a prefill and a decode engine with KV shipped between them, and vLLM's
server with the same model and settings on the same cores. The model is a small random one in whose answers every token
of the prompt matters. Prints each difference with the number of its case; the exit code is 1 if there is one, 2 if
plain vLLM has ended.

usage: python -m tools.differential.run [--seed 1] [--cases 500] [--only 17] [--dtype float32]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.runtime.deployment import deploy
from ridgeline.cluster.runtime.plan import Plan, make_plan
from ridgeline.cluster.runtime.ray_start import ray_runtime
from tests.engines.tiny_model import make_tiny_model_like
from tools.differential.cases import Case, Material, drawn
from tools.differential.compare import Judge, Verdict
from tools.differential.plain import PlainServer, PlainServerEnded, plain_vllm

REPOSITORY = Path(__file__).parents[2]
STEP_TOKENS = 128
MAX_MODEL_LEN_TOKENS = 1024
KV_CACHE = "256 MiB"
PROGRESS_EVERY = 10
TIMEOUT_S = 300

Say = Callable[[str], None]


@dataclass(frozen=True)
class Both:
    """The two servers, ready to answer."""

    plan: Plan
    split: httpx.AsyncClient
    plain: PlainServer
    judge: Judge


@asynccontextmanager
async def tiny(dtype: str, say: Say) -> AsyncIterator[Both]:
    """Start a deployment of the small random model, whose prompts soon take several steps, and plain vLLM like it."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = await asyncio.to_thread(_config, Path(folder), dtype)
        await stack.enter_async_context(ray_runtime(config))
        plan = await asyncio.to_thread(make_plan, config)
        plain = await stack.enter_async_context(plain_vllm(plan))
        deployment = await stack.enter_async_context(deploy(plan, say))
        split = await stack.enter_async_context(
            httpx.AsyncClient(base_url=deployment.url, timeout=TIMEOUT_S, trust_env=False)
        )
        await plain.ready()
        yield Both(plan, split, plain, Judge(split, plain.http, plan.served_model_name, plan.dtype))


def random_cases(plan: Plan, at: int, count: int) -> list[Case]:
    """Draw requests for the small model, by seed `at`."""
    return drawn(material(str(plan.model_path), STEP_TOKENS, 4 * STEP_TOKENS), at, count)


async def judged(servers: Both, cases: Sequence[Case], say: Say) -> list[Verdict]:
    """Judge the cases one after the other, and report each verdict at once. Raises PlainServerEnded."""
    verdicts: list[Verdict] = []
    began_s = time.monotonic()
    for case in cases:
        verdict = await servers.judge.verdict(case)
        verdicts.append(verdict)
        _tell(verdict, say)
        if verdict.difference:
            servers.plain.check()
        if len(verdicts) % PROGRESS_EVERY == 0:
            say(progress(len(verdicts), len(cases), time.monotonic() - began_s))
    return verdicts


def progress(done: int, of: int, seconds: float) -> str:
    """Return the progress, and the time that the rest takes at the rate so far."""
    rate = done / seconds
    return f"{done} of {of}, {rate:.2f} cases/s, {(of - done) / rate:.0f} s left"


async def main(at: int, count: int, only: int | None, dtype: str) -> int:
    """Run everything and return the exit code."""
    async with tiny(dtype, _say) as servers:
        near_nat = servers.judge.tolerance_nat
        _say(f"seed {at}, {count} cases, {servers.plan.dtype}: log-probabilities within {near_nat:.2g} nat")
        cases = random_cases(servers.plan, at, count)
        verdicts = await judged(servers, cases if only is None else [cases[only]], _say)
        _say(await paths(servers.split))
    return _summary(verdicts, at)


def _config(folder: Path, dtype: str) -> RidgelineConfig:
    base = load_config(REPOSITORY / "deploy" / "local.yaml", {"model.dtype": dtype}).config
    model = make_tiny_model_like(base, folder / "model", MAX_MODEL_LEN_TOKENS)
    flags = {
        "server.port": "0",
        "model.path": str(model),
        "model.served_model_name": "tiny",
        "model.dtype": dtype,
        # Else plain vLLM lets a model write any number of blanks, and we one at most.
        "engine_args.structured_outputs_config": "{backend: guidance, disable_any_whitespace: true}",
        "model.max_model_len": str(MAX_MODEL_LEN_TOKENS),
        "router.prefill_window_tokens": str(2 * STEP_TOKENS),
    }
    for pool in ("prefill", "decode"):
        flags |= {
            f"pools.{pool}.kv_cache_memory_bytes": KV_CACHE,
            f"pools.{pool}.max_num_batched_tokens": str(STEP_TOKENS),
        }
    return load_config(REPOSITORY / "deploy" / "local.yaml", flags).config


def material(model_path: str, step_tokens: int, longest_tokens: int) -> Material:
    """Return the shipped book in this model's tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    text = (REPOSITORY / "loadtest" / "data" / "opticks.txt").read_text()
    book = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return Material(book, tokenizer, len(tokenizer), step_tokens, longest_tokens)


def _tell(verdict: Verdict, say: Say) -> None:
    if verdict.difference:
        say(f"DIFFERENCE {verdict.difference}\n  in {verdict.case}")
    if verdict.plain_failed:
        say(f"plain vLLM failed: {verdict.plain_failed[:300]}\n  in {verdict.case}")
    for tie in verdict.ties:
        say(f"tie in case {verdict.case.number}, {tie}")


async def paths(http: httpx.AsyncClient) -> str:
    """Return what the router has counted of the paths that requests took."""
    lines = (await http.get("/metrics")).text.splitlines()
    names = (
        "ridgeline_requests_total",
        "ridgeline_first_token_total",
        "ridgeline_recompute_total",
        "ridgeline_overlapped",
        "ridgeline_fetches_total",
        "ridgeline_kv_transfer_bytes_total",
    )
    return "\n".join(line for line in lines if line.startswith(names) and not line.endswith(" 0.0"))


def _summary(verdicts: list[Verdict], at: int) -> int:
    different = [verdict.case.number for verdict in verdicts if verdict.difference]
    statuses = Counter(verdict.status for verdict in verdicts)
    tied = sum(bool(verdict.ties) for verdict in verdicts)
    failed = sum(bool(verdict.plain_failed) for verdict in verdicts)
    _say(
        f"seed {at}: {len(verdicts)} cases, {len(different)} differences {different}, {tied} with ties, "
        f"{failed} on which plain vLLM failed; statuses {dict(statuses)}"
    )
    return 1 if different else 0


def _say(sentence: str) -> None:
    print(sentence, flush=True)  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--only", type=int, help="the number of one case of that seed")
    parser.add_argument("--dtype", default="auto", help="as model.dtype of the configuration")
    asked = parser.parse_args()
    try:
        sys.exit(asyncio.run(main(asked.seed, asked.cases, asked.only, asked.dtype)))
    except PlainServerEnded as ended:
        _say(str(ended))
        sys.exit(2)
