"""`ridgeline decisions`: explains which workers mode adaptive chose, and what came of it. Called by `cluster.cli`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from cluster.commands.operators.client import ask, operator_client
from loadtest.run.calibration import duration_text

PATH = "/ridgeline/decisions"
REASONS: Final = {
    "within_limits": "its limits and those of others can be kept",
    "fewest_broken": "a limit is likely to be missed whatever is chosen, here the fewest",
    "least_latency": "it has no limits, and this is the least latency",
}


async def decisions(url: str, last: int, *, admin_key_file: Path | None, console: Console) -> None:
    """Print the latest decisions of a running server, newest last. Raises ServerError when the server refuses."""
    async with operator_client(url, admin_key_file) as client:
        told = await ask(client, "GET", f"{PATH}?last={last}")
    for row in reversed(told["decisions"]):
        for line in sentences(row):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if not told["decisions"]:
        console.print(_why_none(told["mode"]), highlight=False)


def sentences(row: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that explain one decision to people."""
    seen, (chosen, *others) = row["seen"], row["options"]
    yield (
        f"{_printable(row['request_id'])}: {row['prompt_tokens']:.0f} tokens in, {seen['output_tokens']} out "
        f"({row['expected']['output_tokens']:.0f} expected), {row['outcome']} {duration_text(row['ended_s_ago'])} ago"
    )
    yield f"  {_workers(chosen)}: {REASONS.get(row['reason'], row['reason'])}{_history(row)}"
    yield "  " + "; ".join(
        _latency(name, chosen[key], seen[key], row[limit])
        for name, key, limit in (("TTFT", "ttft_s", "ttft_limit_s"), ("TPOT", "tpot_s", "tpot_limit_s"))
    )
    for other in others:
        yield f"  or {_workers(other)}: {_loses(other, chosen)}" + "; ".join(
            f"{name} {duration_text(other[key])}" for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
        )


def _history(row: dict[str, Any]) -> str:
    """Return what had happened before the choice, and what happened after it."""
    chosen, lost_workers = row["options"][0], row["seen"]["lost_workers"]
    parts = [f"chosen {duration_text(row['waited_s'])} after it came"]
    if row["held_s"]:
        parts.append(f"held for {duration_text(row['held_s'])} until this worker had room")
    if chosen["cached_tokens"]:
        parts.append(f"{chosen['cached_tokens']} tokens were in the worker's cache")
    if chosen["against"]:
        parts.append("against what the workers favour")
    if lost_workers:
        parts.append(f"{lost_workers} worker{'s' * (lost_workers != 1)} lost, and this is the choice after that")
    return "; " + "; ".join(parts)


def _latency(name: str, predicted_s: float, seen_s: float | None, limit_s: float | None) -> str:
    seen = "not seen" if seen_s is None else f"{duration_text(seen_s)} seen"
    limit = "no limit" if limit_s is None else f"limit {duration_text(limit_s)}"
    return f"{name} {duration_text(predicted_s)} predicted, {seen}, {limit}"


def _loses(other: dict[str, Any], chosen: dict[str, Any]) -> str:
    """Return by how much another option was worse, in the unit in which options are compared."""
    if other["lost"] is None:
        return (
            f"{duration_text(other['latency_s'])} of latency, its own and what it adds to others', instead of "
            f"{duration_text(chosen['latency_s'])}; "
        )
    more = other["lost"] - chosen["lost"]
    return f"loses {abs(more):.2f} requests {'more' if more >= 0 else 'fewer, but takes longer'}; "


def _workers(option: dict[str, Any]) -> str:
    prompt, decode = option["prompt_worker"], option["decode_worker"]
    return f"{prompt} alone" if prompt == decode else f"{prompt} -> {decode}"


def _why_none(mode: str) -> str:
    if mode != "adaptive":
        return f"the server serves {mode}, which predicts nothing: ridgeline mode adaptive, or cluster.mode: adaptive"
    return "no request has ended that was placed by prediction: a worker's model needs some steps first"


def _printable(request_id: str) -> str:
    """Return a request's id without what would change the terminal, since a client may have chosen it."""
    return "".join(character if character.isprintable() else "?" for character in request_id)
