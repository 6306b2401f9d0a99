"""`ridgeline drain`: lets one worker of a running server leave, and tells how far it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
from rich.console import Console

from ridgeline.cluster.commands.operators.client import ask, operator_client
from ridgeline.loadtest.errors import ServerError

POLL_S = 0.5
BEYOND_TIMEOUT_S = 120.0
"""How long it may take, after the running requests' time is up, until nobody needs the worker's KV any more."""


class _Worker(msgspec.Struct, frozen=True):
    worker: str
    pool: str
    state: str
    tasks: int | None
    leases: float | None


class _Workers(msgspec.Struct, frozen=True):
    workers: list[_Worker]


async def drain(
    url: str, worker: str, timeout_s: float, *, force: bool, admin_key_file: Path | None, console: Console
) -> None:
    """Return once the worker is gone. Raises ServerError with the server's sentence when it refuses, ApiKeyError."""
    async with operator_client(url, admin_key_file) as client:
        wish = {"worker": worker, "timeout_s": timeout_s, "force": force}
        leaving = await ask(client, "POST", "/ridgeline/drain", _Worker, wish)
        title = f"{worker} ({leaving.pool})"
        console.print(f"{title} takes no new requests; the running ones get {timeout_s:.0f} s", highlight=False)
        try:
            async with asyncio.timeout(timeout_s + BEYOND_TIMEOUT_S):
                await _until_gone(client, worker, console)
        except TimeoutError as error:
            raise ServerError(
                f"{title} still has not left, and leaves when its hand-offs are fetched or their leases "
                f"(transfer.lease_s) end; GET {url}/ridgeline/workers says what it holds"
            ) from error
    console.print(f"{title} is gone", highlight=False)


async def _until_gone(client: httpx.AsyncClient, worker: str, console: Console) -> None:
    told = ""
    while True:
        rows = (await ask(client, "GET", "/ridgeline/workers", _Workers)).workers
        row = next((row for row in rows if row.worker == worker), None)
        if row is None:
            return
        held = f"{row.tasks or 0} requests, {row.leases or 0:.0f} hand-offs still to be fetched"
        if held != told:
            console.print(f"  {row.state}: {held}", highlight=False)
            told = held
        await asyncio.sleep(POLL_S)
