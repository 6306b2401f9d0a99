"""Sends prompts of 900 tokens and asks for their log-probabilities, as evaluation harnesses do, to the default model.

Every answer must equal plain vLLM's, with its KV really transferred. Then it measures the time that each option adds to
the first token: the same prompts with and without the option, ours and plain vLLM's in alternation, with answers of one
token. The exit code is 1 if an answer differs or was not transferred, 2 if plain vLLM ended. The times are reported but
not judged: a row of logits for each position is arithmetic that plain vLLM needs as well.

usage: python -m tools.differential.scored [--prompts 20] [--dtype float32]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import httpx

from cluster.config.loader import load_config
from tests.engines.harness import Increase, Metrics
from tools.differential.cases import Case, Material
from tools.differential.plain import PlainServerEnded
from tools.differential.run import REPOSITORY, Both, both, judged, material

PROMPT_TOKENS = 900
OUTPUT_TOKENS = 8
APART_TOKENS = 1000
FROM_TOKEN = 5000
LABELS = (253, 282, 411, 905)
COMPLETIONS, CHAT, SCORING = "/v1/completions", "/v1/chat/completions", "/generative_scoring"
OPTIONS: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 1},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "logprob_token_ids": {"logprobs": len(LABELS), "logprob_token_ids": list(LABELS)},
}
FETCHED, RECOMPUTED = "ridgeline_fetches_total", "ridgeline_recompute_total"
COUNTED_WITHIN_S = 10.0
WARM_UP = 2


def prompts(book: Sequence[int], count: int) -> list[list[int]]:
    """Return passages of the shipped book, no two of which begin alike."""
    starts = range(FROM_TOKEN, FROM_TOKEN + count * APART_TOKENS, APART_TOKENS)
    return [list(book[start : start + PROMPT_TOKENS]) for start in starts]


def variants(prompt: list[int], source: Material) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the variants of a request for one prompt, by name: path and body."""
    common = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    made = {name: (COMPLETIONS, {"prompt": prompt, **common, **option}) for name, option in OPTIONS.items()}
    messages = [{"role": "user", "content": source.tokenizer.decode(prompt)}]
    made["prompt_logprobs, chat"] = (CHAT, {"messages": messages, **common, "prompt_logprobs": 1})
    scoring = {"query": prompt[:-10], "items": [prompt[-10:], prompt[-20:-10]], "label_token_ids": list(LABELS)}
    made["generative_scoring"] = (SCORING, scoring)
    return made


async def equal(servers: Both, source: Material, count: int) -> bool:
    """Send each variant to both servers and count what was transferred; return whether all was right."""
    by_variant: dict[str, list[Case]] = defaultdict(list)
    for number, prompt in enumerate(prompts(source.book, count)):
        for name, (path, body) in variants(prompt, source).items():
            salted = {**body, "cache_salt": f"{name} {number}"}
            by_variant[name].append(Case(number, path, salted, again=False))
    fine = True
    for name, cases in by_variant.items():
        before = Metrics((await servers.split.get("/metrics")).text)
        verdicts = await judged(servers, cases, _say)
        handed_over = 0 if name == "generative_scoring" else len(cases)  # its answers are one token, prefill's
        counted = await _counted(servers.split, before, handed_over)
        differ = sum(bool(verdict.difference) for verdict in verdicts)
        tied = sum(bool(verdict.ties) for verdict in verdicts)
        _say(f"{name}: {len(cases) - differ} of {len(cases)} equal ({tied} by a tie); " + _told(counted))
        fine = fine and not differ and counted.sum(FETCHED, result="ok") == handed_over and not counted.sum(RECOMPUTED)
    return fine


async def _counted(split: httpx.AsyncClient, before: Metrics, fetches: int) -> Increase:
    """Return the counts since `before`, waiting for workers, which report within half a second."""
    deadline_s = time.monotonic() + COUNTED_WITHIN_S
    while True:
        counted = Increase(before, Metrics((await split.get("/metrics")).text))
        if counted.sum(FETCHED) >= fetches or time.monotonic() > deadline_s:
            return counted
        await asyncio.sleep(0.5)


def _told(counted: Increase) -> str:
    disaggregated = counted.sum("ridgeline_requests_total", path="disaggregated", outcome="finished")
    received_mb = counted.sum("ridgeline_kv_transfer_bytes_total", pool="decode", direction="received") / 1e6
    return (
        f"path disaggregated {disaggregated:.0f}, fetched {counted.sum(FETCHED, result='ok'):.0f} "
        f"({received_mb:.1f} MB), recomputed {counted.sum(RECOMPUTED):.0f}"
    )


async def first_tokens(servers: Both, source: Material, count: int) -> None:
    """Measure the seconds to an answer of one token with and without each option, by the client's clock."""
    asked: dict[str, dict[str, Any]] = {"without": {}, **OPTIONS}
    clients = {"ours": servers.split, "plain vLLM": servers.plain.http}
    taken_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number, prompt in enumerate(prompts(source.book, count + WARM_UP)):
        names = [*asked, *asked][number % len(asked) :][: len(asked)]
        for name in names:
            for who in sorted(clients, reverse=bool(number % 2)):
                body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **asked[name]}
                began_s = time.perf_counter()
                response = await clients[who].post(
                    COMPLETIONS,
                    json={"model": servers.plan.served_name, "cache_salt": f"{name} {number} timed", **body},
                )
                response.raise_for_status()
                if number >= WARM_UP:
                    taken_s[who, name].append(time.perf_counter() - began_s)
    for who in clients:
        without_s = taken_s[who, "without"]
        _say(f"{who}, without: first token after {1e3 * median(without_s):.0f} ms (median of {count})")
        for name in OPTIONS:
            ratios = [with_s / base_s for with_s, base_s in zip(taken_s[who, name], without_s, strict=True)]
            _say(
                f"{who}, {name}: {1e3 * median(taken_s[who, name]):.0f} ms, x {median(ratios):.3f} "
                f"(median of the pairs; {min(ratios):.2f} to {max(ratios):.2f})"
            )


async def main(count: int, dtype: str) -> int:
    """Run everything and return the exit code."""
    config = load_config(REPOSITORY / "deploy" / "local.yaml", {"server.port": "0", "model.dtype": dtype}).config
    async with both(config, _say) as servers:
        source = material(str(servers.plan.model_path), config.pools.prefill.max_num_batched_tokens, PROMPT_TOKENS)
        _say(f"{count} prompts of {PROMPT_TOKENS} tokens, {servers.plan.served_name}, {servers.plan.dtype}")
        fine = await equal(servers, source, count)
        await first_tokens(servers, source, count)
    return 0 if fine else 1


def _say(sentence: str) -> None:
    print(sentence, flush=True)  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--dtype", default="auto", help="as model.dtype of the configuration")
    given = parser.parse_args()
    try:
        sys.exit(asyncio.run(main(given.prompts, given.dtype)))
    except PlainServerEnded as ended:
        _say(str(ended))
        sys.exit(2)
