"""`ridgeline drain`: lets one worker of a running server leave, and tells how far it is. Called by `cluster.cli`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from cluster.config.api_keys import first_admin_key
from loadtest.errors import ServerError

POLL_S = 0.5
ANSWER_WITHIN_S = 20.0
BEYOND_TIMEOUT_S = 120.0
"""How long it may take, after the running requests' time is up, until nobody needs the worker's KV any more."""


async def drain(
    url: str, worker: str, timeout_s: float, *, force: bool, admin_key_file: Path | None, console: Console
) -> None:
    """Return once the worker is gone. Raises ServerError with the server's sentence when it refuses, ApiKeyError."""
    headers = {"Authorization": f"Bearer {first_admin_key(str(admin_key_file))}"} if admin_key_file else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_WITHIN_S, trust_env=False) as client:
        wish = {"worker": worker, "timeout_s": timeout_s, "force": force}
        leaving = await _ask(client, "POST", "/ridgeline/drain", wish)
        title = f"{worker} ({leaving['pool']})"
        console.print(f"{title} takes no new requests; the running ones get {timeout_s:.0f} s", highlight=False)
        try:
            async with asyncio.timeout(timeout_s + BEYOND_TIMEOUT_S):
                await _until_gone(client, worker, console)
        except TimeoutError as error:
            raise ServerError(f"{title} still has not left; GET {url}/ridgeline/workers says what it holds") from error
    console.print(f"{title} is gone", highlight=False)


async def _until_gone(client: httpx.AsyncClient, worker: str, console: Console) -> None:
    told = ""
    while True:
        rows = (await _ask(client, "GET", "/ridgeline/workers"))["workers"]
        row = next((row for row in rows if row["worker"] == worker), None)
        if row is None:
            return
        held = f"{row['tasks'] or 0} requests, {row['leases'] or 0:.0f} hand-offs still to be fetched"
        if held != told:
            console.print(f"  {row['state']}: {held}", highlight=False)
            told = held
        await asyncio.sleep(POLL_S)


async def _ask(client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        response = await client.request(method, path, json=body)
        if response.is_success:
            answer: dict[str, Any] = response.json()
            return answer
        raise ServerError(_sentence(response))
    except httpx.TransportError as error:
        raise ServerError(
            f"no answer from {client.base_url}: {error or type(error).__name__}; is the server running?"
        ) from error
    except ValueError as error:
        raise ServerError(f"{client.base_url} answers {path} with something else than JSON") from error


def _sentence(response: httpx.Response) -> str:
    """Return the server's own message, if it has one."""
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return (
            "the server asks for an admin key: say --admin-key-file with the file that its security.admin_keys_file "
            "names"
        )
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    return message or f"{response.request.url} answers {response.status_code}: is it a Ridgeline server?"
