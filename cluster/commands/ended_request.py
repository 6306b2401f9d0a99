"""`ridgeline trace ID`: where the time of one request went, stage by stage over both legs, as bars on one clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.cluster.commands.decisions import ago_text, printable, sentences
from ridgeline.cluster.commands.operators import ask, operator_client
from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.run.quantities import duration_text
from ridgeline.router.observe.ended_requests import KEPT, EndedRequest, RequestsAnswer
from ridgeline.router.observe.timeline import Stage

PATH: Final = "/ridgeline/requests"
TRIES_PER_ROUTER: Final = 8
"""Connections for each of several routers: of two, one is missed once in 2 ** 16 times, of 64 one in 3000."""
BAR_CHARACTERS: Final = 40
COLOURS: Final = {"prefill": "cyan", "decode": "green", "wire": "magenta", "handoff_wait": "magenta", "lost": "red"}
"""Of stages in which something moves; those that wait are dim."""


async def show(url: str, wanted: str, *, admin_key_file: Path | None, console: Console) -> None:
    """Print the sequences of a request. Raises ServerError if the server refuses, or no longer has it; ApiKeyError."""
    for number, one in enumerate(reversed(await _found(url, wanted, admin_key_file))):
        if number:
            console.print()
        for line in _head(one):
            console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
        console.print(_bars(one))
        for line in [*_handoff(one), *list(sentences(one))[1:]]:
            console.print(printable(line.strip()), highlight=False, markup=False, soft_wrap=True)


async def _found(url: str, wanted: str, admin_key_file: Path | None) -> list[EndedRequest]:
    """Return its sequences, newest first, from whichever router has them: each new connection reaches another one."""
    tries, most = 0, 1
    while tries < most:
        async with operator_client(url, admin_key_file) as client:
            answer = await ask(client, "GET", f"{PATH}?last={KEPT}&id={quote(wanted, safe='')}", RequestsAnswer)
        if answer.requests:
            return answer.requests
        tries, most = tries + 1, TRIES_PER_ROUTER * answer.routers if answer.routers > 1 else 1
    kept = f"its latest {answer.most} sequences" if answer.routers == 1 else f"{answer.most} for each of its routers"
    raise ServerError(
        f"{url} has no ended request {printable(wanted)!r}: it keeps {kept}, and has {answer.kept} now; give the id of "
        f"an answer, its x-request-id or its trace id ({PATH} lists the latest)"
    )


def _head(one: EndedRequest) -> Iterator[str]:
    outcome = f"{one.outcome} ({one.error})" if one.error else one.outcome
    yield (
        f"{one.request_id}: {one.prompt_tokens} tokens in, {one.output_tokens} out, {outcome} "
        f"{ago_text(one.ended_s_ago)} ago, {one.path}"
    )
    known = []
    for name, seen_s, limit_s in (("TTFT", one.ttft_s, one.ttft_limit_s), ("TPOT", one.tpot_s, one.tpot_limit_s)):
        if seen_s is not None:
            limit = "" if limit_s is None else f" (limit {duration_text(limit_s)})"
            known.append(f"{name} {duration_text(seen_s)}{limit}")
    if one.trace_id:
        known.append(f"trace {one.trace_id}")
    yield ", ".join(known)


def _bars(one: EndedRequest) -> Table:
    table = Table("stage", "where", box=None, pad_edge=False)
    for title in ("start ms", "took ms"):
        table.add_column(title, justify="right")
    table.add_column("")
    for stage in one.stages:
        where = f"{stage.worker} ({stage.pool})" if stage.worker else "router"
        times = (f"{seconds * 1e3:,.1f}" for seconds in (stage.start_s, stage.duration_s))
        table.add_row(stage.name, Text(where), *times, _bar(stage, one.latency_s))
    table.add_row("latency", "", "", f"{one.latency_s * 1e3:,.1f}", "")
    return table


def _bar(stage: Stage, latency_s: float) -> Text:
    scale = BAR_CHARACTERS / latency_s
    begin = min(round(stage.start_s * scale), BAR_CHARACTERS - 1)
    length = max(1, round((stage.start_s + stage.duration_s) * scale) - begin)
    return Text(" " * begin + "█" * length, style=COLOURS.get(stage.name, "dim"))


def _handoff(one: EndedRequest) -> Iterator[str]:
    moved = one.handoff
    if moved is not None:
        why = f" ({moved.reason})" if moved.reason else ""
        yield (
            f"hand-off {moved.source} -> {moved.target}: {moved.outcome}{why}, {moved.num_bytes:,} bytes by "
            f"{moved.transport or 'no transport'}, first byte after {duration_text(moved.wait_s)}, then "
            f"{duration_text(moved.wire_s)}"
            + ("; fetched during prefill, times of the last segment" * moved.overlapped)
        )
