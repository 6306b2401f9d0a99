"""Commands for operators of a running server, whose side is `ridgeline.router.front.admin`.

`ridgeline drain` lets one worker leave, `mode` tells or changes the mode, `record` writes what happens to the scheduler
into a file, `scale` and `restart` begin operations and follow them: one at a time is under way.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, get_args

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

from ridgeline.cluster.config.api_keys import first_admin_key
from ridgeline.contracts.handoff import UNREADABLE
from ridgeline.contracts.section import MIB
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.loadtest.errors import ServerError

T = TypeVar("T")
POLL_S = 0.5
ANSWER_WITHIN_S = 30.0
"""More than an answer takes: a drain may wait for another one, and each asks a worker within 10 s and all within 2."""
BEYOND_TIMEOUT_S = 120.0
"""How long it may take, after the running requests' time is up, until nobody needs the worker's KV any more."""
MODE_WITHIN_S = 90.0
"""More than a server takes for a change while another one is under way: with several routers a minute
(`ridgeline.router.decisions`), of which each change is half."""
UNKNOWN_S = 60.0
"""How long a router may take to know of an operation: one that was started again, which takes 14 s on two cores."""
REMIND_S = 30.0
"""How often it is said that an operation is still under way while nothing else is."""
SAY_EVERY_S: Final = 10.0
RECORDING: Final = "application/x-ndjson"
OPERATION: Final = "/ridgeline/operation"
_LOOK: Final = {"/ridgeline/drain": "GET /ridgeline/workers", "/ridgeline/mode": "`ridgeline mode`"}
"""Where to see whether a request was accepted, if not in the operation that it begins or cancels."""
POOLS: tuple[Pool, ...] = get_args(Pool)


class NoAnswer(ServerError):
    """Nobody answered; the request may have been received."""


class CannotRecord(ServerError):
    """Nothing was recorded."""


class _Worker(msgspec.Struct, frozen=True):
    worker: str
    pool: str
    state: str
    tasks: int | None
    leases: float | None


class _Workers(msgspec.Struct, frozen=True):
    workers: list[_Worker]


class _Now(msgspec.Struct, frozen=True):
    mode: Mode
    modes: list[Mode]
    why_not: dict[Mode, str]


class _Change(msgspec.Struct, frozen=True):
    rerouted_prompts: int
    took_s: float


class _Given(msgspec.Struct, frozen=True):
    operation: str
    sentences: list[str]


class _Progress(msgspec.Struct, frozen=True):
    operation: str = ""
    """Empty if the router that answers knows of none."""
    state: str = ""
    sentences: list[str] = []


def operator_client(url: str, admin_key_file: Path | None) -> httpx.AsyncClient:
    """Return a client that sends the file's first admin key, if there is a file. Raises ApiKeyError."""
    headers = {"Authorization": f"Bearer {first_admin_key(str(admin_key_file))}"} if admin_key_file else {}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_WITHIN_S, trust_env=False)


async def ask(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    kind: type[T],
    body: dict[str, Any] | None = None,
    within_s: float = ANSWER_WITHIN_S,
) -> T:
    """Return the server's answer. Raises ServerError with the server's own sentence, NoAnswer if there is none.

    Another program may listen there, so an answer that is no `kind` is a ServerError too.
    """
    try:
        response = await client.request(method, path, json=body, timeout=within_s)
        if response.is_success:
            return msgspec.json.decode(response.content, type=kind)
        raise _refusal(response)
    except httpx.TimeoutException as error:
        look = _LOOK.get(path, f"GET {OPERATION}")
        done = f", but the request may have been accepted: look at {look} before you repeat it" * (method != "GET")
        raise NoAnswer(f"no answer from {client.base_url} within {within_s:.0f} s{done}") from error
    except httpx.TransportError as error:
        raise NoAnswer(
            f"no answer from {client.base_url}: {error or type(error).__name__}; is the server running?"
        ) from error
    except UNREADABLE as error:
        raise ServerError(f"{client.base_url} answers {path} in another form than this version: {error}") from error


def _refusal(response: httpx.Response) -> ServerError:
    """Return an error with the server's own message, if it has one."""
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return ServerError(
            "the server asks for an admin key: say --admin-key-file with the file that its security.admin_keys_file "
            "names"
        )
    try:
        return ServerError(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        where = response.request.url
        return ServerError(f"{where} answers {response.status_code}: is it a Ridgeline server of this version?")


# --- drain and mode


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


async def mode(url: str, wanted: Mode | None, *, admin_key_file: Path | None, console: Console) -> None:
    """Print the mode, or change it and say how long that took. Raises ServerError when the server refuses."""
    async with operator_client(url, admin_key_file) as client:
        now = await ask(client, "GET", "/ridgeline/mode", _Now)
        if wanted is None:
            console.print(f"the server serves {now.mode}", highlight=False)
            for other in now.modes:
                if other != now.mode:
                    console.print(f"it can change to {other} while it serves: ridgeline mode {other}", highlight=False)
            for other, why in now.why_not.items():
                console.print(f"it cannot become {other}: {why}", highlight=False, markup=False)
            return
        if wanted == now.mode:
            console.print(f"the server serves {wanted} already", highlight=False)
            return
        console.print(f"changing from {now.mode} to {wanted}", highlight=False)
        change = await ask(client, "POST", "/ridgeline/mode", _Change, {"mode": wanted}, within_s=MODE_WITHIN_S)
    waiting = change.rerouted_prompts
    console.print(
        f"{now.mode} -> {wanted} in {change.took_s:.2f} s; {waiting} waiting prompt{'s' * (waiting != 1)} "
        "rerouted, what runs goes on where it is",
        highlight=False,
    )


# --- record


async def record(
    file: Path, url: str, seconds: float, most_bytes: int, *, admin_key_file: Path | None, console: Console
) -> None:
    """Record until that time is over, so much is recorded, or Ctrl-C. Raises ServerError when the server refuses."""
    console.print(f"recording into {file} for {seconds:.0f} s, {most_bytes / MIB:.0f} MiB at most", highlight=False)
    path, query = "/ridgeline/record", {"seconds": str(seconds), "most_bytes": str(most_bytes)}
    async with operator_client(url, admin_key_file) as client:
        try:
            async with client.stream("GET", path, params=query, timeout=httpx.Timeout(30.0, read=None)) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                if not response.headers.get("content-type", "").startswith(RECORDING):
                    raise CannotRecord(f"{url} answers {path} with no recording: is it a Ridgeline server?")
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


# --- scale and restart


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
            raise ValueError(f"{pool} is given twice: leave one out")
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
        running = await ask(client, "DELETE", OPERATION, _Given)
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
            progress = await ask(client, "GET", OPERATION, _Progress)
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
