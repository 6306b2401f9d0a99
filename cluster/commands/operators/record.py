"""`ridgeline record`: writes what happens to a server's scheduler into a file, which `ridgeline whatif` reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO, Final

import httpx
from rich.console import Console

from ridgeline.cluster.commands.operators.client import operator_client, refusal
from ridgeline.contracts.section import MIB
from ridgeline.loadtest.errors import ServerError

PATH: Final = "/ridgeline/record"
MEDIA_TYPE: Final = "application/x-ndjson"
SAY_EVERY_S: Final = 10.0


class CannotRecord(ServerError):
    """Nothing was recorded."""


async def record(
    file: Path, url: str, seconds: float, most_bytes: int, *, admin_key_file: Path | None, console: Console
) -> None:
    """Record until that time is over, so much is recorded, or Ctrl-C. Raises ServerError when the server refuses."""
    console.print(f"recording into {file} for {seconds:.0f} s, {most_bytes / MIB:.0f} MiB at most", highlight=False)
    query = {"seconds": str(seconds), "most_bytes": str(most_bytes)}
    async with operator_client(url, admin_key_file) as client:
        try:
            async with client.stream("GET", PATH, params=query, timeout=httpx.Timeout(30.0, read=None)) as response:
                if not response.is_success:
                    await response.aread()
                    raise refusal(response)
                if not response.headers.get("content-type", "").startswith(MEDIA_TYPE):
                    raise CannotRecord(f"{url} answers {PATH} with no recording: is it a Ridgeline server?")
                with _new(file) as out:
                    await _write(out, response, console)
        except httpx.TransportError as error:
            raise ServerError(f"the recording from {url} has ended: {error or type(error).__name__}") from error


def _new(file: Path) -> BinaryIO:
    try:
        return file.open("xb")
    except FileExistsError as error:
        raise CannotRecord(f"{file} exists already: name another file, or remove it") from error
    except OSError as error:
        raise CannotRecord(f"{file} cannot be written: {error.strerror}") from error


async def _write(out: BinaryIO, response: httpx.Response, console: Console) -> None:
    size_bytes, lines, says_s = 0, 0, time.monotonic() + SAY_EVERY_S
    try:
        async for some in response.aiter_bytes():
            out.write(some)
            out.flush()
            size_bytes += len(some)
            lines += some.count(b"\n")
            if time.monotonic() >= says_s:
                says_s = time.monotonic() + SAY_EVERY_S
                console.print(f"{lines} events, {size_bytes / MIB:.1f} MiB", highlight=False)
    except OSError as error:
        raise CannotRecord(f"{out.name} cannot be written: {error.strerror}") from error
    finally:
        console.print(f"{lines} events, {size_bytes / MIB:.1f} MiB: ridgeline whatif {out.name}", highlight=False)
