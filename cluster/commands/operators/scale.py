"""`ridgeline scale` and `ridgeline restart` begin operations; `ridgeline operations` lists and cancels them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

from ridgeline.cluster.commands.operators.client import NoAnswer, OperationRefused, ask, operator_client
from ridgeline.contracts.vocabulary import Pool
from ridgeline.loadtest.errors import ServerError

POLL_S = 0.5
UNKNOWN_S = 60.0
"""How long the routers may take to know of an operation: another one than that which was asked may answer, or one that
was started again, which takes 14 s on two cores, and is then told of all operations that were taken."""
REMIND_S = 30.0
"""How often it is said that an operation is still under way while nothing else is."""
POOLS: tuple[Pool, ...] = get_args(Pool)


class _Given(msgspec.Struct, frozen=True):
    operation: str


class _Progress(_Given, frozen=True):
    kind: str
    workers: dict[str, int]
    given_s_ago: float
    state: str
    sentences: list[str]


class _Operations(msgspec.Struct, frozen=True):
    operations: list[_Progress]


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


async def operations(url: str, *, admin_key_file: Path | None, console: Console) -> None:
    """Print all operations that the server knows. Raises ServerError, ApiKeyError."""
    async with operator_client(url, admin_key_file) as client:
        rows = (await ask(client, "GET", "/ridgeline/operations", _Operations)).operations
    for row in rows:
        wanted = " ".join(f"{pool}={number}" for pool, number in row.workers.items())
        last = f": {row.sentences[-1]}" if row.sentences else ""
        words = filter(None, (row.operation, row.kind, wanted, f"{row.given_s_ago:.0f} s ago,", row.state))
        console.print(escape(" ".join(words) + last), highlight=False)
    if not rows:
        console.print("there are no operations", highlight=False)


async def cancel(url: str, operation: str, *, admin_key_file: Path | None, console: Console) -> None:
    """Return once the operation has ended. Raises ServerError if it has ended before or is not known, ApiKeyError."""
    async with operator_client(url, admin_key_file) as client:
        told = len((await ask(client, "DELETE", f"/ridgeline/operations/{operation}", _Progress)).sentences)
        await _until_ended(client, operation, told, console)


async def _operation(url: str, path: str, body: dict[str, Any], admin_key_file: Path | None, console: Console) -> None:
    async with operator_client(url, admin_key_file) as client:
        operation = (await ask(client, "POST", path, _Given, body)).operation
        console.print(f"operation {operation}; ridgeline operations cancel {operation} ends it", highlight=False)
        progress = await _until_ended(client, operation, 0, console)
        if progress.state != "done":
            raise ServerError(progress.sentences[-1])


async def _until_ended(client: httpx.AsyncClient, operation: str, told: int, console: Console) -> _Progress:
    """Print what is new of an operation until it ends; return how it ended. Raises ServerError if nobody knows it."""
    began_s = known_s = said_s = time.monotonic()
    while True:
        progress, now_s = await _progress(client, operation), time.monotonic()
        if progress is not None:
            known_s = now_s
            for sentence in progress.sentences[told:]:
                console.print(f"  {escape(sentence)}", highlight=False)
                said_s = now_s
            told = max(told, len(progress.sentences))
            if progress.state not in ("given", "running"):
                return progress
        elif now_s - known_s > UNKNOWN_S:
            raise ServerError(
                f"no router of {client.base_url} has known operation {operation} for {UNKNOWN_S:.0f} s: the "
                "one that had it was lost before it was taken; look at what runs (ridgeline operations, GET "
                "/ridgeline/workers), and ask again"
            )
        if now_s - said_s > REMIND_S:
            state = progress.state if progress else "unknown, the server does not answer"
            console.print(f"  {now_s - began_s:.0f} s after it began: {state}", highlight=False)
            said_s = now_s
        await asyncio.sleep(POLL_S)


async def _progress(client: httpx.AsyncClient, operation: str) -> _Progress | None:
    """Return how far the operation is; None while no router that knows it answers. Raises OperationRefused."""
    try:
        return await ask(client, "GET", f"/ridgeline/operations/{operation}", _Progress)
    except NoAnswer:
        return None
    except OperationRefused as error:
        if error.status != httpx.codes.NOT_FOUND:
            raise
        return None
