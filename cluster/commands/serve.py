"""`ridgeline serve`: checks, starts, prints what runs where, waits, drains."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.cluster.config.api_keys import open_to_all
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.deployments.names import DeploymentFolder, HeldName
from ridgeline.cluster.doctor.checks import refuse_unfit_machine
from ridgeline.cluster.doctor.gpus import halved
from ridgeline.cluster.ray_nodes import logs_folder
from ridgeline.cluster.runtime.deployment import Deployment, deploy
from ridgeline.cluster.runtime.environment import ray_variables, server_variables
from ridgeline.cluster.runtime.plan import make_plan
from ridgeline.cluster.runtime.ray_start import ray_runtime
from ridgeline.contracts.log_lines import configure
from ridgeline.router.fleet.pairing import KvPair

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StopSignals:
    """What the operator has asked for with Ctrl-C or SIGTERM, so far. A terminal that is closed asks for the same."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first signal: drain and end."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the second signal: end without waiting for requests."""

    def received(self) -> None:
        """Handle either signal."""
        (self.hurry if self.stop.is_set() else self.stop).set()

    def hung_up(self) -> None:
        """Handle the loss of the terminal: nothing can be printed there any more, and to try would be an error."""
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            for stream in (sys.stdout, sys.stderr):
                if stream.isatty():
                    os.dup2(nowhere.fileno(), stream.fileno())
        self.stop.set()


class _Lossy:
    """An output that loses what cannot be written: the disk of a log may be full, or what reads a pipe may be gone.

    To serve on, or to finish what runs, is worth more than to say so.
    """

    def __init__(self, output: IO[str]) -> None:
        self._output = output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._output.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._output.flush()


class _Logged(io.TextIOBase):
    """An output whose lines are logged, for those who collect logs as JSON."""

    def write(self, text: str) -> int:
        for line in filter(None, map(str.strip, text.splitlines())):
            logger.info("%s", line)
        return len(text)


async def serve(config: RidgelineConfig, console: Console, *, detached: bool = False) -> None:
    """Serve until Ctrl-C, SIGTERM or the end of the terminal, then drain; a second one cuts the drain short.

    Raises ServingError.
    """
    configure(config.logging_of("serve"))
    output = _Logged() if config.logging.format == "json" else _Lossy(console.file)
    console = Console(file=cast(IO[str], output), emoji=False, width=console.width)
    with DeploymentFolder(config.name).held(detached=detached, **state_of(config)) as held:
        refuse_unfit_machine(config)
        await _serve(config, console, held)


async def _serve(config: RidgelineConfig, console: Console, held: HeldName) -> None:
    signals, ready = StopSignals(), asyncio.Event()
    async with ray_runtime(config) as ray_messages:
        console.print(f"[dim]what Ray itself says goes to {ray_messages}[/]", highlight=False)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which sets handlers of its own
            loop.add_signal_handler(number, signals.received)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signal.SIGHUP, signals.hung_up)
        running = asyncio.create_task(_run(config, console, ready, signals, held))
        stopped = asyncio.create_task(signals.stop.wait())
        await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ready.is_set() and not running.done():
            console.print("stopping before it was ready")
            running.cancel()
            await asyncio.wait([running])
        else:
            await running
    console.print("stopped")


def how_kv_goes(pairs: Sequence[KvPair]) -> list[str]:
    """Return a sentence for each transport between workers: for how many pairs, and why none better was picked."""
    counted = Counter((pair.transport, pair.why) for pair in pairs)
    return [
        f"KV goes by {transport} for {number} pair{'s' if number > 1 else ''} of workers" + (f" ({why})" if why else "")
        for (transport, why), number in sorted(counted.items())
    ]


def state_of(config: RidgelineConfig) -> dict[str, Any]:
    """Return what `ridgeline status` shows of a deployment that starts."""
    return {"mode": config.mode, "ready_deadline_s": config.router.ready_deadline_s}


def ready_state_of(deployment: Deployment) -> dict[str, Any]:
    """Return what it shows, beside that, of one that is ready."""
    kv = how_kv_goes(deployment.kv_pairs)
    return {"phase": "ready", "url": deployment.url, "warnings": deployment.warnings, "kv": kv}


async def _run(
    config: RidgelineConfig, console: Console, ready: asyncio.Event, signals: StopSignals, held: HeldName
) -> None:
    async with started(config, console, DeploymentFolder(config.name)) as deployment:
        ready.set()
        if config.logging.format == "text":
            console.print(what_runs_where(deployment))
        for row in deployment.rows if config.logging.format == "json" else ():
            facts = {"worker": row.name, "pool": row.pool, "node": row.node, "address": row.address}
            logger.info("serves", extra=facts)
        for sentence in how_kv_goes(deployment.kv_pairs):
            console.print(sentence, highlight=False, markup=False)
        for warning in deployment.warnings:
            console.print(f"[yellow]{escape(warning)}[/]", highlight=False)
        console.print(f"[bold green]ready[/]: {deployment.url}/v1   metrics: {deployment.url}/metrics   Ctrl-C stops")
        held.tell(**ready_state_of(deployment))
        watching = asyncio.create_task(
            deployment.watch(partial(say_with_time, console), lambda away: held.tell(away=dict(away)))
        )
        stopped = asyncio.create_task(signals.stop.wait())
        await asyncio.wait([watching, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if watching.done():
            watching.result()  # raises what failed
        watching.cancel()
        held.tell(phase="draining", away={})
        await _drain(deployment, config.server.drain_timeout_s, console, signals.hurry)


def say_with_time(console: Console, sentence: str) -> None:
    """Print what the supervisor says, with the time of day."""
    console.print(f"[dim]{datetime.now().astimezone():%H:%M:%S}[/]  {escape(sentence)}", highlight=False)


async def _drain(deployment: Deployment, timeout_s: float, console: Console, hurry: asyncio.Event) -> None:
    console.print(
        f"draining: no new requests, up to {timeout_s:.0f} s for the running ones; Ctrl-C again cuts them off now"
    )
    draining = asyncio.create_task(deployment.drain(timeout_s))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait([draining, hurried], return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not draining.done():
        draining.cancel()
        await asyncio.wait([draining])
        console.print("[yellow]not waiting any longer: running requests are cut off[/]")
    elif (left := draining.result()) is None:
        console.print("[yellow]the router does not answer: what it was serving, if anything, is cut off[/]")
    elif left:
        console.print(f"[yellow]{left} requests did not end in time and are cut off[/]")


@asynccontextmanager
async def started(
    config: RidgelineConfig, console: Console, place: DeploymentFolder | None = None
) -> AsyncIterator[Deployment]:
    """Deploy on the Ray that is running and yield the ready deployment; print how its start goes on.

    `place`, whose name the caller holds, notes where the logs of its workers are.
    """
    plan = await asyncio.to_thread(make_plan, config)
    if place is not None:
        place.logs_are_in(logs_folder())
    names = ", ".join(worker.title for worker in plan.workers)
    console.print(f"starting [bold]{config.mode}[/]: {names}; {plan.served_model_name} in {plan.dtype}")
    if ignored := server_variables() + (ray_variables() if config.ray.address is None else []):
        console.print(
            f"[yellow]not passed on, because the configuration alone shapes the server: {', '.join(ignored)}[/]"
        )
    if not plan.keys.clients and (warning := open_to_all(config.server.host)):
        console.print(f"[yellow]{warning}[/]")
    if warning := halved(config):
        console.print(f"[yellow]{warning}[/]")
    began_s = time.monotonic()

    def say(sentence: str) -> None:
        console.print(f"  [dim]{time.monotonic() - began_s:5.0f} s[/]  {sentence}")

    async with deploy(plan, say) as deployment:
        yield deployment


def what_runs_where(deployment: Deployment) -> Table:
    """Build the table that `ridgeline serve` prints when everything is up."""
    table = Table("worker", "pool", "node", "cores", "pid", "engine pid", "data plane", "KV blocks", "start")
    for row in deployment.rows:
        table.add_row(*row)
    return table
