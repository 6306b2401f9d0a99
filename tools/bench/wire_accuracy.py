"""Measures what quantised KV on the wire does to answers, against a second Ridgeline with `transfer.wire_dtype` none.

usage: python -m tools.bench.wire_accuracy BASE_URL OTHER_URL --prompts 100 --out FILE.json

BASE_URL is the reference (`none`). Both must serve the same model and dtype in mode disaggregated with
`--set transfer.transport=grpc` or the same in the file: shared memory would copy the blocks as they are. Prompts are
passages of the shipped book, sent to both servers one at a time, greedily and with logprobs, so that batches are equal
and only the KV's encoding differs. No two prompts begin alike. After a run, restart both servers or use another --seed,
because KV that a decode worker still has cached is not fetched again.

The first token comes from prefill and has seen no transferred KV; the second is the first that has. If the first
tokens already differ, the servers differ by more than the wire, and the prompt counts for nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.run.server_metrics import MetricsDelta, parse_metrics
from loadtest.trace.prompts import TEXT_FILE

NUM_TOKENS = 16
NUM_LOGPROBS = 5
SHORTEST_WORDS = 30
LONGEST_WORDS = 700
"""Longest prompt in words, about 1000 tokens."""
STATUS_LAG_S = 1.5
"""Time to wait for counters, which workers report every half second."""


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, with the logprob of each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """The comparison of one prompt's two answers."""

    first_agrees: bool
    second_agrees: bool
    whole_agrees: bool
    first_difference: int | None
    """The position of the first difference, from 0; None if there is none."""
    errors_nat: tuple[float, ...]
    """|difference| of the reference token's logprob, at positions from 1 up to the first difference."""


@dataclass(frozen=True)
class Report:
    """The figures of all prompts. Shares are of prompts whose first tokens agree; None without such prompts."""

    prompts: int
    first_tokens_agree: int
    second_tokens_agree: int
    answers_agree: int
    second_token_agreement: float | None
    whole_answer_agreement: float | None
    compared_positions: int
    mean_logprob_error_nat: float | None
    max_logprob_error_nat: float | None


def compare(reference: Answer, other: Answer) -> Comparison:
    """Compare two answers. Raises ValueError unless both have the same number of tokens, at least 2."""
    if len(reference.token_ids) != len(other.token_ids) or len(reference.token_ids) < 2:
        raise ValueError(f"answers of {len(reference.token_ids)} and {len(other.token_ids)} tokens cannot be compared")
    pairs = list(zip(reference.token_ids, other.token_ids, strict=True))
    difference = next((position for position, (one, two) in enumerate(pairs) if one != two), None)
    common = len(pairs) if difference is None else difference
    errors = [abs(one - two) for one, two in zip(reference.logprobs[1:common], other.logprobs[1:common], strict=True)]
    return Comparison(
        first_agrees=common > 0,
        second_agrees=common > 1,
        whole_agrees=difference is None,
        first_difference=difference,
        errors_nat=tuple(errors),
    )


def summarise(comparisons: Sequence[Comparison]) -> Report:
    """Compute the figures of a run."""
    comparable = [each for each in comparisons if each.first_agrees]
    errors = [error for each in comparable for error in each.errors_nat]
    second = sum(each.second_agrees for each in comparable)
    whole = sum(each.whole_agrees for each in comparable)
    return Report(
        prompts=len(comparisons),
        first_tokens_agree=len(comparable),
        second_tokens_agree=second,
        answers_agree=whole,
        second_token_agreement=second / len(comparable) if comparable else None,
        whole_answer_agreement=whole / len(comparable) if comparable else None,
        compared_positions=len(errors),
        mean_logprob_error_nat=statistics.fmean(errors) if errors else None,
        max_logprob_error_nat=max(errors) if errors else None,
    )


def make_prompts(text: str, count: int, seed: int, longest_words: int = LONGEST_WORDS) -> list[str]:
    """Cut passages of many lengths from a text, no two of which begin alike. Raises ValueError if it is too short."""
    words = text.split()
    chosen = random.Random(seed)
    places = (len(words) - LONGEST_WORDS) // SHORTEST_WORDS
    if places < count:
        raise ValueError(f"a text of {len(words)} words has no {count} different beginnings")
    starts = [SHORTEST_WORDS * place for place in chosen.sample(range(places), count)]
    return [" ".join(words[start : start + chosen.randint(SHORTEST_WORDS, longest_words)]) for start in starts]


def answer_of(choice: dict[str, Any]) -> Answer:
    """Read an answer from a choice of /v1/completions with token ids and logprobs."""
    return Answer(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))


class Server:
    """One deployment that is asked."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = client
        self._model = client.get(f"{self.url}/v1/models").raise_for_status().json()["data"][0]["id"]
        self._before = self._counters()

    def ask(self, prompt: str) -> Answer:
        """Ask greedily for exactly NUM_TOKENS tokens."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": NUM_LOGPROBS,
            "return_token_ids": True,
        }
        reply = self._client.post(f"{self.url}/v1/completions", json=body).raise_for_status()
        return answer_of(reply.json()["choices"][0])

    def counted(self) -> dict[str, float]:
        """Return the counts since the start: successful fetches, recomputed prompts, bytes sent, bytes received."""
        after = self._counters()
        gained = {key: value - self._before.get(key, 0.0) for key, value in after.items()}
        delta = MetricsDelta(gained, {}, wall_s=0.0)
        moved = "ridgeline_kv_transfer_bytes_total"
        return {
            "fetches_ok": delta.total("ridgeline_fetches_total", result="ok"),
            "recomputed": delta.total("ridgeline_recompute_total"),
            "bytes_sent": delta.total(moved, direction="sent"),
            "bytes_received": delta.total(moved, direction="received"),
        }

    def _counters(self) -> dict[Any, float]:
        text = self._client.get(f"{self.url}/metrics", follow_redirects=True).raise_for_status().text
        return dict(parse_metrics(text).counters)


def print_report(report: Report, counted: dict[str, dict[str, float]], console: Console) -> None:
    """Print a table, and for each server a line that shows whether KV travelled, and how many bytes."""

    def share(part: int, value: float | None) -> str:
        return "-" if value is None else f"{part} of {report.first_tokens_agree} ({100 * value:.1f} %)"

    def nat(value: float | None) -> str:
        return "-" if value is None else f"{value:.2e} nat"

    table = Table("against the reference", "")
    table.add_row("first tokens equal (prefill's own)", f"{report.first_tokens_agree} of {report.prompts}")
    table.add_row("second tokens equal", share(report.second_tokens_agree, report.second_token_agreement))
    table.add_row(f"all {NUM_TOKENS} tokens equal", share(report.answers_agree, report.whole_answer_agreement))
    table.add_row("mean logprob error", nat(report.mean_logprob_error_nat))
    table.add_row("largest logprob error", nat(report.max_logprob_error_nat))
    table.add_row("positions compared", str(report.compared_positions))
    console.print(table)
    for name, counts in counted.items():
        console.print(f"{name}: " + ", ".join(f"{key} {value:,.0f}" for key, value in counts.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask both servers, compare, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_url")
    parser.add_argument("other_url")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--longest-words", type=int, default=LONGEST_WORDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    console = Console(width=120)
    prompts = make_prompts(TEXT_FILE.read_text(encoding="utf-8"), options.prompts, options.seed, options.longest_words)
    comparisons = []
    with httpx.Client(timeout=120, trust_env=False) as client:
        reference, other = Server(options.base_url, client), Server(options.other_url, client)
        for prompt in prompts:
            comparisons.append(compare(reference.ask(prompt), other.ask(prompt)))
            if len(comparisons) % 10 == 0:
                console.print(f"{len(comparisons)} of {len(prompts)} prompts")
        time.sleep(STATUS_LAG_S)
        counted = {"reference": reference.counted(), "other": other.counted()}
    report = summarise(comparisons)
    print_report(report, counted, console)
    result = {
        "base_url": reference.url,
        "other_url": other.url,
        "seed": options.seed,
        "tokens_per_answer": NUM_TOKENS,
        "report": asdict(report),
        "counted": counted,
        "prompts": [
            {"words": len(prompt.split()), **asdict(each)} for prompt, each in zip(prompts, comparisons, strict=True)
        ],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if min(counts["fetches_ok"] for counts in counted.values()) < len(prompts):
        sys.exit("not every prompt's KV was fetched: the figures say less about the wire than they seem to")


if __name__ == "__main__":
    main()
