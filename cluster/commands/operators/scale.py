"""`ridgeline scale` and `ridgeline restart` begin operations and follow them; one at a time is under way."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

from ridgeline.cluster.commands.operators.client import NoAnswer, ask, operator_client
from ridgeline.contracts.vocabulary import Pool
from ridgeline.loadtest.errors import ServerError

PATH = "/ridgeline/operation"
POLL_S = 0.5
UNKNOWN_S = 60.0
"""How long a router may take to know of an operation: one that was started again, which takes 14 s on two cores."""
REMIND_S = 30.0
"""How often it is said that an operation is still under way while nothing else is."""
POOLS: tuple[Pool, ...] = get_args(Pool)


class _Given(msgspec.Struct, frozen=True):
    operation: str
    sentences: list[str]


class _Progress(msgspec.Struct, frozen=True):
    operation: str = ""
    """Empty if the router that answers knows of none."""
    state: str = ""
    sentences: list[str] = []


def wanted_workers(words: list[str]) -> dict[str, int]:
    """Read `prefill=2 decode=1`. Raises ValueError, whose message says what is wrong with which word."""
    wanted: dict[str, int] = {}
    for word in words:
        pool, _, number = word.partition("=")
        if pool not in POOLS or not number.isdecimal() or int(number) < 1:
            raise ValueError(
                f"{word!r} is no pool with its number of workers: say prefill=2, decode=1, colocated=3 or adaptive=3"
            )
        if pool in wanted:
            raise ValueError(f"{pool} is given twice")
        wanted[pool] = int(number)
    return wanted


async def scale(
    url: str, wanted: dict[str, int], timeout_s: float, *, admin_key_file: Path | None, console: Console
) -> None:
    """Return once each of these pools has as many workers. Raises ServerError if that fails, ApiKeyError."""
    await _operation(url, "/ridgeline/scale", {"workers": wanted, "timeout_s": timeout_s}, admin_key_file, console)


async def restart(url: str, timeout_s: float, *, admin_key_file: Path | None, console: Console) -> None:
    """Return once every worker has been started again. Raises ServerError if that fails, ApiKeyError."""
    await _operation(url, "/ridgeline/restart", {"timeout_s": timeout_s}, admin_key_file, console)


async def cancel(url: str, *, admin_key_file: Path | None, console: Console) -> None:
    """Return once the operation that is under way has ended. Raises ServerError if there is none, ApiKeyError."""
    async with operator_client(url, admin_key_file) as client:
        running = await ask(client, "DELETE", PATH, _Given)
        await _until_ended(client, running.operation, len(running.sentences), console)


async def _operation(url: str, path: str, body: dict[str, Any], admin_key_file: Path | None, console: Console) -> None:
    async with operator_client(url, admin_key_file) as client:
        operation = (await ask(client, "POST", path, _Given, body)).operation
        console.print(f"operation {operation}; `ridgeline scale --cancel` ends it", highlight=False)
        progress = await _until_ended(client, operation, 0, console)
        if progress.state != "done":
            raise ServerError(progress.sentences[-1])


async def _until_ended(client: httpx.AsyncClient, operation: str, told: int, console: Console) -> _Progress:
    """Print what is new of an operation until it ends; return how it ended. Raises ServerError if nobody knows it."""
    began_s = known_s = said_s = time.monotonic()
    while True:
        try:
            progress = await ask(client, "GET", PATH, _Progress)
        except NoAnswer:
            progress = _Progress()
        now_s = time.monotonic()
        if progress.operation == operation:
            known_s = now_s
            for sentence in progress.sentences[told:]:
                console.print(f"  {escape(sentence)}", highlight=False)
                said_s = now_s
            told = max(told, len(progress.sentences))
            if progress.state != "running":
                return progress
        elif now_s - known_s > UNKNOWN_S:
            raise ServerError(
                f"{client.base_url} has not told of operation {operation} for {UNKNOWN_S:.0f} s, but of "
                f"{progress.operation or 'none'}: look at what runs (GET /ridgeline/workers), and ask again"
            )
        if now_s - said_s > REMIND_S:
            console.print(f"  {now_s - began_s:.0f} s after it began: {progress.state or 'no answer'}", highlight=False)
            said_s = now_s
        await asyncio.sleep(POLL_S)
