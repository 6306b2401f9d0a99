"""Records a server's greedy answers to 60 prompts, and compares two recordings token by token.

A recording is of any OpenAI-compatible server; `plain` starts vLLM's own, run like a decode worker of a configuration.
Prompts are pieces of the shipped book, from a few tokens to several steps. Where two answers part, the two tokens are a
tie if the reference's log-probabilities of them are within `--tie-nat`; what follows is another answer and is not
compared. The time to first token of ten short prompts is recorded too, one after the other.

usage: python -m tools.gpu.answers record URL OUT.json [--longest-chars 16000]
       python -m tools.gpu.answers plain CONFIG.yaml OUT.json [--model NAME] [--longest-chars 16000]
       python -m tools.gpu.answers compare REFERENCE.json OTHER.json [--tie-nat 0.25]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

BOOK: Final = Path(__file__).parents[2] / "loadtest" / "data" / "opticks.txt"
PROMPTS: Final = 60
SHORTEST_CHARS: Final = 20
OUTPUT_TOKENS: Final = 48
TOP: Final = 5
AT_ONCE: Final = 8
SHORT_PROMPTS: Final = 10
SHORT_CHARS: Final = 256
"""About 64 tokens."""
TIMEOUT_S: Final = 300.0
TIE_NAT: Final = 0.25
"""Two steps of bfloat16 between 16 and 32, where the largest logits lie."""


class Answer(msgspec.Struct, frozen=True):
    """One answer."""

    prompt_chars: int
    tokens: list[str]
    top_logprobs: list[dict[str, float]]
    """Of each position, the log-probabilities of the most likely tokens, in nats."""


class Recording(msgspec.Struct, frozen=True):
    """What one server answered."""

    url: str
    model: str
    ttft_ms: list[float]
    """Of short prompts, with nothing beside them."""
    answers: list[Answer]


class Compared(msgspec.Struct, frozen=True):
    """Which answers are equal, part at a tie, or differ; by their number."""

    equal: list[int]
    ties: list[int]
    different: list[tuple[int, str]]
    """With a sentence each."""


def prompts(longest_chars: int) -> list[str]:
    """Return pieces of the book, whose lengths grow by the same factor, each of other text."""
    text = BOOK.read_text(encoding="utf-8")
    growth = (longest_chars / SHORTEST_CHARS) ** (1 / (PROMPTS - 1))
    lengths = [round(SHORTEST_CHARS * growth**number) for number in range(PROMPTS)]
    starts = range(0, len(text) - longest_chars, (len(text) - longest_chars) // PROMPTS)
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def compare(reference: Recording, other: Recording, tie_nat: float) -> Compared:
    """Compare two recordings of the same prompts."""
    equal, ties, different = [], [], []
    for number, (ours, theirs) in enumerate(zip(reference.answers, other.answers, strict=True)):
        behind_nat = _parting_nat(ours, theirs)
        if behind_nat is None:
            equal.append(number)
        elif behind_nat <= tie_nat:
            ties.append(number)
        else:
            at = next(at for at in range(len(ours.tokens) + 1) if ours.tokens[: at + 1] != theirs.tokens[: at + 1])
            sentence = f"prompt of {ours.prompt_chars} characters: token {at} is {behind_nat:.3g} nat behind"
            different.append((number, sentence))
    return Compared(equal, ties, different)


def _parting_nat(reference: Answer, other: Answer) -> float | None:
    """Return how far apart the reference sees the first tokens that differ; None if all are the same."""
    for mine, theirs, top in zip(reference.tokens, other.tokens, reference.top_logprobs, strict=False):
        if mine != theirs:
            return top[mine] - top[theirs] if mine in top and theirs in top else float("inf")
    return None if len(reference.tokens) == len(other.tokens) else float("inf")


async def record(url: str, longest_chars: int) -> Recording:
    """Ask a server for all answers."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
        model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        wanted = prompts(longest_chars)
        await _first_token_ms(http, model, wanted[-1][:SHORT_CHARS])  # warms up
        ttft_ms = [await _first_token_ms(http, model, prompt[-SHORT_CHARS:]) for prompt in wanted[-SHORT_PROMPTS:]]
        room = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_answer(http, room, model, prompt)) for prompt in wanted]
    return Recording(url, model, ttft_ms, [task.result() for task in tasks])


async def record_plain(config: Path, model: str | None, longest_chars: int) -> Recording:
    """Start plain vLLM, ask it for all answers, and stop it."""
    from ridgeline.cluster.config.loader import load_config
    from ridgeline.cluster.runtime.plan import make_plan
    from tools.differential.plain import plain_vllm

    loaded = load_config(config, {"model.path": model} if model else {})
    plan = await asyncio.to_thread(make_plan, loaded.config)
    async with plain_vllm(plan) as server:
        await server.ready(plan.config.supervision.start_timeout_s)
        return await record(str(server.http.base_url), longest_chars)


def save(recording: Recording, path: Path) -> None:
    """Write a recording, and say what it is."""
    path.write_bytes(msgspec.json.encode(recording))
    median_ms = statistics.median(recording.ttft_ms)
    sys.stdout.write(f"{len(recording.answers)} answers, TTFT of short prompts {median_ms:.1f} ms: {path}\n")


def _body(model: str, prompt: str, output_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}


async def _answer(http: httpx.AsyncClient, room: asyncio.Semaphore, model: str, prompt: str) -> Answer:
    async with room:
        response = await http.post("/v1/completions", json=_body(model, prompt, OUTPUT_TOKENS) | {"logprobs": TOP})
    told = response.raise_for_status().json()["choices"][0]["logprobs"]
    return Answer(len(prompt), told["tokens"], told["top_logprobs"])


async def _first_token_ms(http: httpx.AsyncClient, model: str, prompt: str) -> float:
    began_s = time.perf_counter()
    body = _body(model, prompt, 2) | {"stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                return (time.perf_counter() - began_s) * 1e3
    raise SystemExit(f"{http.base_url} ended a stream without a token")


def main() -> int:
    """Record or compare; the exit status is 1 if answers differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording, plain = commands.add_parser("record"), commands.add_parser("plain")
    recording.add_argument("url")
    plain.add_argument("config", type=Path)
    plain.add_argument("--model")
    for one in (recording, plain):
        one.add_argument("out", type=Path)
        one.add_argument("--longest-chars", type=int, default=16_000)
    comparing = commands.add_parser("compare")
    comparing.add_argument("reference", type=Path)
    comparing.add_argument("other", type=Path)
    comparing.add_argument("--tie-nat", type=float, default=TIE_NAT)
    asked = parser.parse_args()
    if asked.command == "record":
        save(asyncio.run(record(asked.url, asked.longest_chars)), asked.out)
        return 0
    if asked.command == "plain":
        save(asyncio.run(record_plain(asked.config, asked.model, asked.longest_chars)), asked.out)
        return 0
    decode = msgspec.json.Decoder(Recording).decode
    compared = compare(decode(asked.reference.read_bytes()), decode(asked.other.read_bytes()), asked.tie_nat)
    sys.stdout.write(
        f"{len(compared.equal)} answers equal, {len(compared.ties)} part at a tie, {len(compared.different)} differ\n"
    )
    sys.stdout.writelines(f"{number}: {sentence}\n" for number, sentence in compared.different)
    return 1 if compared.different else 0


if __name__ == "__main__":
    sys.exit(main())
