"""Sends random requests to a disaggregated deployment and to plain vLLM, whose answers must be the same.

Everything is real: the router over HTTP, Ray, a prefill and a decode engine with KV shipped between them, and vLLM's
server with the same model and settings on the same cores. The model is a small random one in whose answers every token
of the prompt matters: a Llama, or one of another family, whose layers have windows or states. With LoRA adapters each
request draws one or none. Plain vLLM never speculates, so drafts must change nothing. Prints each difference with the
number of its case; the exit code is 1 if there is one, 2 if plain vLLM has ended.

usage: python -m tools.differential.run [--seed 1] [--cases 500] [--only 17] [--at-once 4] [--dtype float32]
                                        [--family gemma3] [--adapters | --drafts]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import httpx

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.model_store import prepare_model
from ridgeline.cluster.runtime.deployment import deploy
from ridgeline.cluster.runtime.plan import Plan, make_plan
from ridgeline.cluster.runtime.ray_start import ray_runtime
from ridgeline.engine.connector.transferable_models import why_unsupported
from tests.engines.tiny_model import make_tiny_model_like
from tests.support.adapter_files import RANK, make_adapter
from tests.support.model_families import FAMILIES, make_family
from tools.differential.cases import Case, Material, drawn
from tools.differential.compare import Judge, Verdict
from tools.differential.plain import PlainServer, PlainServerEnded, plain_vllm

REPOSITORY = Path(__file__).parents[2]
STEP_TOKENS = 128
MAX_MODEL_LEN_TOKENS = 1024
KV_CACHE = "256 MiB"
PROGRESS_EVERY = 10
TIMEOUT_S = 300
ADAPTERS = {"one": 1, "two": 2, "three": 3}
"""With the seeds of their weights; a step has one adapter fewer."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Variant:
    """The model that both serve, and what Ridgeline does with it."""

    dtype: str = "auto"
    family: str | None = None
    """As in `tests/support/model_families.py`; None: a Llama."""
    adapters: bool = False
    drafts: bool = False


@dataclass(frozen=True)
class Both:
    """The two servers, ready to answer."""

    plan: Plan
    split: httpx.AsyncClient
    plain: Sequence[PlainServer]
    """Requests without an adapter have their own, without LoRA: on CPUs vLLM gives them an adapter of others."""
    judge: Judge


@asynccontextmanager
async def tiny(variant: Variant, say: Say) -> AsyncIterator[Both]:
    """Start a deployment of the small random model, whose prompts soon take several steps, and plain vLLM like it."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = await asyncio.to_thread(_config, Path(folder), variant)
        await stack.enter_async_context(ray_runtime(config))
        plan = await asyncio.to_thread(make_plan, config)
        plans = [_without_adapters(plan), plan] if variant.adapters else [plan]
        plain = [await stack.enter_async_context(plain_vllm(each)) for each in plans]
        deployment = await stack.enter_async_context(deploy(plan, say))
        split = await stack.enter_async_context(
            httpx.AsyncClient(base_url=deployment.url, timeout=TIMEOUT_S, trust_env=False)
        )
        for server in plain:
            await server.ready()
        judge = Judge(split, plain[0].http, plan.served_model_name, plan.dtype, adapted=plain[-1].http)
        yield Both(plan, split, plain, judge)


def random_cases(plan: Plan, at: int, cases: int) -> list[Case]:
    """Draw requests for the small model, by seed `at`."""
    made_from = material(str(plan.model_path), STEP_TOKENS, 4 * STEP_TOKENS)
    adapters = tuple(module["name"] for module in plan.lora_modules)
    return drawn(replace(made_from, adapters=adapters, speculates=plan.router_settings().speculates), at, cases)


async def judged(servers: Both, cases: Sequence[Case], say: Say, at_once: int = 1) -> list[Verdict]:
    """Judge so many cases at a time, and report each verdict when it is there. Raises PlainServerEnded."""
    room = asyncio.Semaphore(at_once)
    done = count(1)
    began_s = time.monotonic()

    async def judge(case: Case) -> Verdict:
        async with room:
            verdict = await servers.judge.verdict(case)
        _tell(verdict, say)
        if verdict.difference:
            for server in servers.plain:
                server.check()
        if (number := next(done)) % PROGRESS_EVERY == 0:
            say(progress(number, len(cases), time.monotonic() - began_s))
        return verdict

    return await asyncio.gather(*map(judge, cases))


def progress(done: int, of: int, seconds: float) -> str:
    """Return the progress, and the time that the rest takes at the rate so far."""
    rate = done / seconds
    return f"{done} of {of}, {rate:.2f} cases/s, {(of - done) / rate:.0f} s left"


async def main(at: int, cases: int, only: int | None, variant: Variant, at_once: int) -> int:
    """Run everything and return the exit code."""
    async with tiny(variant, _say) as servers:
        near_nat = servers.judge.tolerance_nat
        _say(f"seed {at}, {cases} cases, {servers.plan.dtype}: log-probabilities within {near_nat:.2g} nat")
        made = random_cases(servers.plan, at, cases)
        verdicts = await judged(servers, made if only is None else [made[only]], _say, at_once)
        _say(await paths(servers.split))
    return _summary(verdicts, at)


def _config(folder: Path, variant: Variant) -> RidgelineConfig:
    base = load_config(REPOSITORY / "deploy" / "local.yaml", {"model.dtype": variant.dtype}).config
    model = _model(base, folder / "model", variant.family)
    flags = {
        "server.port": "0",
        "model.path": str(model),
        "model.served_model_name": "tiny",
        "model.dtype": variant.dtype,
        # Else plain vLLM lets a model write any number of blanks, and we one at most.
        "engine_args.structured_outputs_config": "{backend: guidance, disable_any_whitespace: true}",
        "model.max_model_len": str(MAX_MODEL_LEN_TOKENS),
        "router.prefill_window_tokens": str(2 * STEP_TOKENS),
        "engine_args.enable_prefix_caching": "true" if _can_cache_prefixes(model) else "false",
    }
    if variant.adapters:
        flags |= _adapters(model, folder)
    if variant.drafts:
        flags["pools.decode.engine_args.speculative_config"] = json.dumps(DRAFTS)
    for pool in ("prefill", "decode"):
        flags |= {
            f"pools.{pool}.kv_cache_memory_bytes": KV_CACHE,
            f"pools.{pool}.max_num_batched_tokens": str(STEP_TOKENS),
        }
    return load_config(REPOSITORY / "deploy" / "local.yaml", flags).config


def _model(config: RidgelineConfig, folder: Path, family: str | None) -> Path:
    if family is None:
        return make_tiny_model_like(config, folder, MAX_MODEL_LEN_TOKENS)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare_model(config.model.path))
    tokenizer.save_pretrained(make_family(family, folder, len(tokenizer), MAX_MODEL_LEN_TOKENS))
    return folder


def _can_cache_prefixes(model: Path) -> bool:
    config = json.loads((model / "config.json").read_text())
    return why_unsupported(config, on_cpu=True, prefix_caching=True) is None


def _adapters(model: Path, folder: Path) -> dict[str, str]:
    import torch
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, at in ADAPTERS.items():
        make_adapter(folder / name, weights, at)
    return {
        "engine_args.enable_lora": "true",
        "engine_args.max_loras": str(len(ADAPTERS) - 1),
        "engine_args.max_lora_rank": str(RANK),
        "server_args.lora_modules": json.dumps([f"{name}={folder / name}" for name in ADAPTERS]),
    }


def _without_adapters(plan: Plan) -> Plan:
    engine_args = {name: value for name, value in plan.engine_args.items() if "lora" not in name}
    return replace(plan, engine_args=engine_args, lora_modules=())


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
        "ridgeline_drafted_tokens_total",
        "ridgeline_accepted_tokens_total",
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
    parser.add_argument("--at-once", type=int, default=1, help="requests that run together")
    parser.add_argument("--dtype", default="auto", help="as model.dtype of the configuration")
    parser.add_argument("--family", choices=[family.key for family in FAMILIES], help="of the model; a Llama otherwise")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--adapters", action="store_true", help="requests for three LoRA adapters, and for none")
    either.add_argument("--drafts", action="store_true", help="decode drafts by n-grams; all requests are greedy")
    asked = parser.parse_args()
    serves = Variant(asked.dtype, asked.family, asked.adapters, asked.drafts)
    try:
        sys.exit(asyncio.run(main(asked.seed, asked.cases, asked.only, serves, asked.at_once)))
    except PlainServerEnded as ended:
        _say(str(ended))
        sys.exit(2)
