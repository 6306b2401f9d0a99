"""A deployment seen from outside: the processes of `ridgeline serve` and its /metrics, whatever has been restarted.

Nothing here uses our object model: actors are found by their process name, and identified by asking every port they
listen on. So the checks see only what an operator could see.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import httpx
import psutil

from ridgeline.contracts.errors import WorkerLost
from ridgeline.contracts.workers import WorkerDescription
from ridgeline.worker_runtime.client import WorkerClient
from tests.engines.harness import Engines, Metrics, connected
from tests.engines.serve_process import Serve, alive, engines_below, name_of

WORKER: Final = "ridgeline::worker"
ROUTER: Final = "ridgeline::router"
DESCRIBE_WITHIN_S: Final = 3.0
STEADY_POLLS: Final = 3
POLL_S: Final = 0.5


@dataclass(frozen=True)
class Member:
    """One worker: its actor process, and how it describes itself."""

    description: WorkerDescription
    address: str
    actor: psutil.Process

    @property
    def worker_id(self) -> str:
        return self.description.worker_id

    @property
    def pool(self) -> str:
        return self.description.pool

    def engine(self) -> psutil.Process | None:
        """Return its engine process if that runs, else None."""
        try:
            engines = engines_below(self.actor)
        except psutil.NoSuchProcess:
            return None
        return engines[0] if engines else None

    @property
    def whole(self) -> bool:
        """Whether actor and engine both run."""
        return alive(self.actor) and self.engine() is not None


class Deployment:
    """A running deployment; create it once `serve` is ready."""

    def __init__(self, serve: Serve, url: str, http: httpx.AsyncClient) -> None:
        self.serve = serve
        self.url = url
        self.http = http
        self._members: dict[psutil.Process, Member] = {}

    async def members(self, pool: str | None = None) -> list[Member]:
        """Return the workers whose actors run, sorted by name; one that is still starting is left out."""
        if self.serve.process.poll() is not None:
            return []
        actors = await asyncio.to_thread(self._actors)
        self._members = {actor: member for actor, member in self._members.items() if actor in actors}
        for actor in actors:
            if actor not in self._members:
                found = await _described(actor)
                if found is not None:
                    self._members[actor] = Member(found[0], found[1], actor)
        members = sorted(self._members.values(), key=lambda member: (member.worker_id, member.actor.pid))
        return [member for member in members if pool in (None, member.pool)]

    def _actors(self) -> list[psutil.Process]:
        """Return the worker actors.

        Run it on a thread: reading the command line of a process that maps memory can block.
        """
        actors = [process for process in self.serve.family() if alive(process)]
        return [process for process in actors if name_of(process).startswith(WORKER)]

    def router(self) -> psutil.Process:
        """Return the process that serves HTTP."""
        return next(p for p in self.serve.family() if name_of(p).startswith(ROUTER))

    async def metrics(self) -> Metrics:
        """Return what /metrics says now."""
        return Metrics((await self.http.get("/metrics", follow_redirects=True, timeout=30)).text)

    async def full(self, pool: str, size: int, without: frozenset[int] = frozenset()) -> bool:
        """Return whether `size` whole workers of the pool run, none of them in `without`, and the router has all."""
        members, pids = await asyncio.to_thread(_whole, await self.members(pool))
        if len({member.worker_id for member in members}) != size or pids & without:
            return False
        try:
            return (await self.metrics()).sum("ridgeline_workers", pool=pool) == size
        except httpx.TransportError:
            return False  # the router is busy or gone; the caller has a deadline

    async def wait_full(self, pool: str, size: int, within_s: float, without: frozenset[int] = frozenset()) -> bool:
        """Wait until `full` holds a few times in a row, since the router's figures lag; False if it takes too long."""
        deadline_s, in_a_row = time.monotonic() + within_s, 0
        while in_a_row < STEADY_POLLS and time.monotonic() < deadline_s and self.serve.process.poll() is None:
            in_a_row = in_a_row + 1 if await self.full(pool, size, without) else 0
            await asyncio.sleep(POLL_S)
        return in_a_row >= STEADY_POLLS

    @asynccontextmanager
    async def past_the_router(self, model: str, model_path: str, tokenizer: Any) -> AsyncIterator[list[Engines]]:
        """Connect to the workers directly, as pairs of a decode and a prefill worker that include every worker."""
        members = await self.members()
        async with AsyncExitStack() as stack:
            clients = await stack.enter_async_context(connected([member.address for member in members]))
            pools: dict[str, list[WorkerClient]] = {"prefill": [], "decode": []}
            for member, client in zip(members, clients, strict=True):
                pools[member.pool].append(client)
            longer = max(map(len, pools.values()))
            pairs = list(zip(cycle(pools["prefill"]), cycle(pools["decode"]), range(longer), strict=False))
            dtype = members[0].description.layout.dtype
            yield [
                Engines(self.url, model, dtype, model_path, tokenizer, self.http, (prefill, decode))
                for prefill, decode, _ in pairs
            ]


def _whole(members: list[Member]) -> tuple[list[Member], set[int]]:
    """Return the members of which both processes run, and the pids of those processes."""
    engines = [(member, engine) for member in members if alive(member.actor) and (engine := member.engine())]
    pids = {process.pid for member, engine in engines for process in (member.actor, engine)}
    return [member for member, _ in engines], pids


def _listening(actor: psutil.Process) -> list[int]:
    return sorted({c.laddr.port for c in actor.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr})


async def _described(actor: psutil.Process) -> tuple[WorkerDescription, str] | None:
    """Ask every port it listens on; one is the worker's, the others are Ray's and cannot answer."""
    try:
        ports = await asyncio.to_thread(_listening, actor)
    except psutil.NoSuchProcess:
        return None
    for port in ports:
        address = f"127.0.0.1:{port}"
        client = WorkerClient(address, "chaos-probe")
        try:
            async with asyncio.timeout(DESCRIBE_WITHIN_S):
                return await client.describe(), address
        except (WorkerLost, TimeoutError):
            continue
        finally:
            await client.close()
    return None


def can_cut_connections() -> bool:
    """Return whether this kernel lets us end TCP connections of other processes; tried on one of our own."""
    import socket

    if shutil.which("ss") is None:
        return False
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
            cut_connections(port)
            try:
                client.send(b"x")
            except OSError:
                return True
    return False


def cut_connections(port: int) -> None:
    """End all TCP connections of this host from or to that port, like a broken network; listeners stay."""
    command = ["ss", "-K", "-t", "state", "established", f"( sport = :{port} or dport = :{port} )"]
    subprocess.run(command, capture_output=True, timeout=10, check=False)
