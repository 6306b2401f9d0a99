"""Random requests to a disaggregated deployment and to plain vLLM: both must answer the same.

Everything is real: the router over HTTP, Ray, a prefill and a decode engine, KV shipped between them; and vLLM's server
with the same model and settings, on the same cores. The model is a small random one, in whose answers every token of
the prompt counts. Prints each difference with the number of its case; exit code 1 if there is one.

usage: python -m tests.differential.run [--seed 1] [--cases 500] [--only 17]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from cluster.actors import engine_environment
from cluster.config import RidgelineConfig, load_config
from cluster.deployment import deploy, ray_runtime
from cluster.model_store import prepare_model
from cluster.plan import Plan, make_plan
from tests.differential.cases import Material, drawn
from tests.differential.compare import Judge, Verdict
from tests.engines.tiny_model import make_tiny_model

REPOSITORY = Path(__file__).parents[2]
STEP_TOKENS = 128
MAX_MODEL_LEN_TOKENS = 1024
KV_CACHE = "256 MiB"
STARTS_WITHIN_S = 300
PROGRESS_EVERY = 25


async def main(at: int, count: int, only: int | None) -> int:
    """The exit code."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(Path(folder))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(ray_runtime(config))
            plan = await asyncio.to_thread(make_plan, config)
            deployment = await stack.enter_async_context(deploy(plan, _say))
            split = await stack.enter_async_context(httpx.AsyncClient(base_url=deployment.url, timeout=300))
            plain = await stack.enter_async_context(plain_vllm(plan))
            judge = Judge(split, plain, plan.served_name, plan.dtype)
            _say(f"seed {at}, {count} cases, {plan.dtype}: log-probabilities within {judge.tolerance_nat:.2g} nat")
            cases = drawn(_material(str(plan.model_path)), at, count)
            chosen = cases if only is None else [cases[only]]
            verdicts = []
            for case in chosen:
                verdicts.append(await judge.verdict(case))
                _tell(verdicts[-1], len(verdicts), len(chosen))
            paths = await _paths(split)
    return _summary(verdicts, at, paths)


def _config(folder: Path) -> RidgelineConfig:
    from transformers import AutoTokenizer

    base = load_config(REPOSITORY / "deploy" / "local.yaml", {"server.port": "0"}).config
    tokenizer = AutoTokenizer.from_pretrained(prepare_model(base.model.path))
    from cluster.doctor import resolve_dtype

    model = make_tiny_model(folder / "model", tokenizer, resolve_dtype(base), MAX_MODEL_LEN_TOKENS)
    flags = {
        "server.port": "0",
        "model.path": str(model),
        "model.served_name": "tiny",
        "model.max_model_len_tokens": str(MAX_MODEL_LEN_TOKENS),
        "router.prefill_window_tokens": str(2 * STEP_TOKENS),
    }
    for pool in ("prefill", "decode"):
        flags |= {f"pools.{pool}.kv_cache_bytes": KV_CACHE, f"pools.{pool}.max_num_batched_tokens": str(STEP_TOKENS)}
    return load_config(REPOSITORY / "deploy" / "local.yaml", flags).config


def _material(model_path: str) -> Material:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    text = (REPOSITORY / "loadtest" / "data" / "opticks.txt").read_text()
    book = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return Material(book, tokenizer, len(tokenizer), STEP_TOKENS, 4 * STEP_TOKENS)


@asynccontextmanager
async def plain_vllm(plan: Plan) -> AsyncIterator[httpx.AsyncClient]:
    """vLLM's own server with one engine, as the decode worker's is, but for what Ridgeline adds."""
    pool, model = plan.config.pools.decode, plan.config.model
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "model": plan.model_path,
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": plan.served_name,
        "dtype": plan.dtype,
        "max-model-len": model.max_model_len_tokens,
        "block-size": model.block_size_tokens,
        "max-num-seqs": pool.max_num_seqs,
        "max-num-batched-tokens": pool.max_num_batched_tokens,
        "kv-cache-memory-bytes": pool.kv_cache_bytes,
        "distributed-executor-backend": "uni",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", *words]
    environment = os.environ | engine_environment(pool.cores_per_worker, on_cpu=True)
    core = max(os.sched_getaffinity(0))
    server = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
        [*command, "--enforce-eager", "--disable-log-stats", "--disable-uvicorn-access-log"],
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
            await _until_it_answers(server, http)
            yield http
    finally:
        server.terminate()
        await asyncio.to_thread(server.wait)


async def _until_it_answers(server: subprocess.Popen[Any], http: httpx.AsyncClient) -> None:
    deadline_s = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline_s and server.poll() is None:
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            await asyncio.sleep(0.5)
    raise RuntimeError("plain vLLM did not start")


def _tell(verdict: Verdict, done: int, of: int) -> None:
    if verdict.difference:
        _say(f"DIFFERENCE {verdict.difference}\n  in {verdict.case}")
    for tie in verdict.ties:
        _say(f"tie in case {verdict.case.number}, {tie}")
    if done % PROGRESS_EVERY == 0:
        _say(f"{done} of {of}")


async def _paths(http: httpx.AsyncClient) -> str:
    lines = (await http.get("/metrics")).text.splitlines()
    names = (
        "ridgeline_requests_total",
        "ridgeline_first_token_total",
        "ridgeline_recompute_total",
        "ridgeline_followed",
    )
    return "\n".join(line for line in lines if line.startswith(names) and not line.endswith(" 0.0"))


def _summary(verdicts: list[Verdict], at: int, paths: str) -> int:
    different = [verdict.case.number for verdict in verdicts if verdict.difference]
    statuses = Counter(verdict.status for verdict in verdicts)
    _say(paths)
    _say(
        f"seed {at}: {len(verdicts)} cases, {len(different)} differences {different}, "
        f"{sum(bool(verdict.ties) for verdict in verdicts)} with ties; statuses {dict(statuses)}"
    )
    return 1 if different else 0


def _say(sentence: str) -> None:
    print(sentence, flush=True)  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--only", type=int, help="the number of one case of that seed")
    asked = parser.parse_args()
    sys.exit(asyncio.run(main(asked.seed, asked.cases, asked.only)))
