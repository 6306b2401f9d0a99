"""`ridgeline scale` and `ridgeline restart`: order another number of workers, or a restart, and tell how it goes.

Called by `cluster.cli`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, get_args

import httpx
from rich.console import Console
from rich.markup import escape

from cluster.commands.operators.client import ask, operator_client
from contracts.vocabulary import Pool
from loadtest.errors import ServerError

POLL_S = 0.5
UNKNOWN_S = 30.0
"""How long the routers may take to know of an order: another one than that which was asked may answer, or a new one."""
POOLS: tuple[Pool, ...] = get_args(Pool)


def wanted_workers(words: list[str]) -> dict[str, int]:
    """Read `prefill=2 decode=1`. Raises ValueError, whose message says what is wrong with which word."""
    wanted: dict[str, int] = {}
    for word in words:
        pool, _, number = word.partition("=")
        if pool not in POOLS or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"{word!r} is no pool with its number of workers: say prefill=2, decode=1 or colocated=3")
        if pool in wanted:
            raise ValueError(f"{pool} is given twice")
        wanted[pool] = int(number)
    return wanted


async def scale(
    url: str, wanted: dict[str, int], timeout_s: float, *, admin_key_file: Path | None, console: Console
) -> None:
    """Return once each of these pools has as many workers. Raises ServerError if that fails, ApiKeyError."""
    await _order(url, "/ridgeline/scale", {"workers": wanted, "timeout_s": timeout_s}, admin_key_file, console)


async def restart(url: str, timeout_s: float, *, admin_key_file: Path | None, console: Console) -> None:
    """Return once every worker has been started again. Raises ServerError if that fails, ApiKeyError."""
    await _order(url, "/ridgeline/restart", {"timeout_s": timeout_s}, admin_key_file, console)


async def _order(url: str, path: str, body: dict[str, Any], admin_key_file: Path | None, console: Console) -> None:
    async with operator_client(url, admin_key_file) as client:
        order = (await ask(client, "POST", path, body))["order"]
        told, known_s = 0, time.monotonic()
        while True:
            progress = await _progress(client, order)
            if progress is not None:
                known_s = time.monotonic()
                for sentence in progress["sentences"][told:]:
                    console.print(f"  {escape(sentence)}", highlight=False)
                told = max(told, len(progress["sentences"]))
                if progress["state"] == "done":
                    return
                if progress["state"] == "failed":
                    raise ServerError(progress["sentences"][-1])
            elif time.monotonic() - known_s > UNKNOWN_S:
                raise ServerError(
                    f"no router of {url} has known order {order} for {UNKNOWN_S:.0f} s: look at what runs "
                    f"(GET {url}/ridgeline/workers), and order again"
                )
            await asyncio.sleep(POLL_S)


async def _progress(client: httpx.AsyncClient, order: str) -> dict[str, Any] | None:
    """Return how far the order is; None while no router that knows it answers."""
    try:
        return await ask(client, "GET", f"/ridgeline/orders/{order}")
    except ServerError:
        return None
