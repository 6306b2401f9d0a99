"""`ridgeline decisions`: explains which workers mode adaptive chose, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from ridgeline.cluster.commands.operators import ask, operator_client
from ridgeline.loadtest.run.quantities import duration_text
from ridgeline.router.observe.ended_requests import ChosenWorkers, EndedRequest

PATH = "/ridgeline/decisions"
LEAST_HELD_S: Final = 0.001
"""Shorter waits are not worth a word."""


REASONS: Final = {
    "fewest_prompt_tokens": "fewest prompt tokens to compute",
    "short_prompt": "a prompt too short to be split",
    "in_shape": "one worker for prompts, another for decode",
    "to_meet_slo": "an exception, to meet an SLO",
}


class _Answer(msgspec.Struct, frozen=True):
    mode: str
    decisions: list[EndedRequest]


async def decisions(url: str, last: int, *, admin_key_file: Path | None, console: Console) -> None:
    """Print the latest decisions of a running server, newest last. Raises ServerError when the server refuses."""
    async with operator_client(url, admin_key_file) as client:
        answer = await ask(client, "GET", f"{PATH}?last={last}", _Answer)
    lines = [line for one in reversed(answer.decisions) for line in sentences(one)] or [_why_none(answer.mode)]
    for line in lines:
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def sentences(one: EndedRequest) -> Iterator[str]:
    """Yield the lines that explain one decision to people; none if there was no decision."""
    chosen = one.decision
    if chosen is None:
        return
    yield (
        f"{one.request_id}: {one.prompt_tokens} tokens in, {one.output_tokens} out "
        f"({chosen.expected_output_tokens:.0f} expected), {one.outcome} {ago_text(one.ended_s_ago)} ago"
    )
    why = f"policy {chosen.policy!r}, {REASONS.get(chosen.reason, chosen.reason)}"
    yield f"  {_workers(chosen)}: {'; '.join([why, *_history(one, chosen)])}"
    yield "  " + "; ".join(
        (
            _latency("TTFT", chosen.predicted_ttft_s, one.ttft_s, one.ttft_limit_s, is_whole=one.placements == 1),
            _latency("TPOT", chosen.predicted_tpot_s, one.tpot_s, one.tpot_limit_s, is_whole=one.placements == 1),
        )
    )


def _history(one: EndedRequest, chosen: ChosenWorkers) -> Iterator[str]:
    """Yield what had happened before the choice, and what it relied on."""
    yield f"placed {duration_text(chosen.placed_after_s)} after arrival"
    if chosen.held_s >= LEAST_HELD_S:
        yield f"waited {duration_text(chosen.held_s)} for a worker that had enough prompts already"
    if chosen.cached_tokens:
        yield f"{chosen.cached_tokens} tokens of the prompt expected in the worker's cache"
    if one.placements > 1:
        yield f"placement {one.placements}, after it was taken from a worker that was lost or drained"


def _latency(name: str, predicted_s: float, seen_s: float | None, limit_s: float | None, *, is_whole: bool) -> str:
    """Return a latency in words. What was predicted for the rest of a request says nothing of the whole."""
    predicted = f"{duration_text(predicted_s)} predicted, " if is_whole else ""
    seen = "not seen" if seen_s is None else f"{duration_text(seen_s)} seen"
    limit = "no limit" if limit_s is None else f"limit {duration_text(limit_s)}"
    return f"{name} {predicted}{seen}, {limit}"


def _workers(chosen: ChosenWorkers) -> str:
    if chosen.prompt_worker == chosen.decode_worker:
        return f"{chosen.prompt_worker} alone"
    return f"{chosen.prompt_worker} -> {chosen.decode_worker}"


def ago_text(seconds: float) -> str:
    """Format for how long something is over."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.0f} h"


def _why_none(mode: str) -> str:
    if mode != "adaptive":
        return f"the server serves {mode}, which predicts nothing: run `ridgeline mode adaptive`, or set mode: adaptive"
    return "this router has ended no request yet that it placed by prediction: a worker's model needs some steps first"


def printable(line: str) -> str:
    """Return a line without what would change the terminal, since a client may have chosen a part of it."""
    return "".join(character if character.isprintable() else "?" for character in line)
