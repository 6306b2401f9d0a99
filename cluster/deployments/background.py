"""`ridgeline serve --detach`, `status`, `stop` and `logs`: deployments that outlive their terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx
import msgspec
from rich.console import Console
from rich.table import Column, Table

from ridgeline.cluster.deployments.names import AlreadyRunning, DeploymentFolder, running, taken
from ridgeline.cluster.errors import ServingError
from ridgeline.cluster.runtime.environment import search_path
from ridgeline.contracts.handoff import UNREADABLE

LOOK_EVERY_S = 0.2
SAY_EVERY_S = 10.0
DETACHED = "--detached-child"
"""Hidden option of `serve`: the process that `--detach` has started, whose output goes to the log."""


class NotRunning(ServingError):
    """There is no such deployment on this machine, or it ended before it was ready."""


class _Ready(msgspec.Struct, frozen=True):
    """The part of GET /ready that `status` shows."""

    router: str = ""


def detach(name: str, arguments: Sequence[str], console: Console) -> None:
    """Start `ridgeline serve` with these arguments in a session of its own and return when it is ready.

    What it prints until then is printed here too. Raises AlreadyRunning, NoFolder, and NotRunning if it ends before it
    is ready.
    """
    place = DeploymentFolder(name)
    with place.being_detached():
        if (state := place.state()) is not None:
            raise AlreadyRunning(taken(name, state))
        with place.open_log("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ridgeline.cluster.cli", "serve", *arguments, DETACHED],
                env={**os.environ, "PYTHONPATH": search_path()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _until_ready(place, process, console)
        except KeyboardInterrupt:
            console.print(
                f"it goes on starting without this terminal: `ridgeline status`, `ridgeline logs --name {name} "
                f"--follow`, `ridgeline stop --name {name}`",
                highlight=False,
            )


def _until_ready(place: DeploymentFolder, process: subprocess.Popen[bytes], console: Console) -> None:
    with place.open_log("r") as lines:
        while True:
            ended, state = process.poll() is not None, place.state()
            console.out(lines.read(), highlight=False, end="")  # what had come by then, since the last time
            if ended:
                raise NotRunning(f"it ended with status {process.returncode} before it was ready; see {place.log}")
            if state is not None and state.pid == process.pid and state.phase == "ready":
                break
            time.sleep(LOOK_EVERY_S)
    console.print(
        f"{place.name} runs without this terminal (process {process.pid}): ridgeline status, logs --follow, stop",
        highlight=False,
    )


def status(console: Console) -> None:
    """Print a table of all deployments that run on this machine, how KV goes, what to mend, and lost workers."""
    found = running()
    if not found:
        console.print("no deployment runs on this machine")
        return
    whole = (Column(title, no_wrap=True) for title in ("name", "state", "URL", "process"))
    table = Table(*whole, "since", Column("output", overflow="fold"))  # a path or URL that is cut off cannot be used
    for name, state in found.items():
        output = str(DeploymentFolder(name).log) if state.detached else "its terminal"
        table.add_row(name, state.phase, state.url, str(state.pid), state.began, output)
    console.print(table)
    for name, state in found.items():
        for sentence in (*state.kv, *state.warnings):
            console.print(f"{name}: {sentence}", highlight=False)
        for worker, how in state.away.items():
            console.print(f"{name}: {worker} is {how}", highlight=False)
        if late := _late(state.url):
            console.print(f"{name}: {late}", highlight=False)


def _late(url: str) -> str:
    """Return what a router says of itself if it is the bottleneck; nothing if it does not answer in a second."""
    try:
        answer = httpx.get(f"{url}/ready", timeout=1.0, trust_env=False).content if url else b"{}"
        return msgspec.json.decode(answer, type=_Ready).router
    except (httpx.HTTPError, *UNREADABLE):
        return ""


def stop(name: str, *, now: bool, console: Console) -> None:
    """Have a deployment drain and end, and return once it has. Raises NotRunning.

    With `now` it does not wait for running requests.
    """
    place = DeploymentFolder(name)
    if (state := place.state()) is None:
        raise NotRunning(f"no deployment named {name!r} runs on this machine{_others()}")
    began_s = said_s = time.monotonic()
    os.kill(state.pid, signal.SIGTERM)
    console.print(f"{name} (process {state.pid}) drains and ends", highlight=False)
    hurried = False
    while (state_now := place.state()) is not None and state_now.pid == state.pid:
        if now and not hurried and state_now.phase == "draining":
            os.kill(state.pid, signal.SIGTERM)
            hurried = True
        time.sleep(LOOK_EVERY_S)
        if time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            console.print(f"  {said_s - began_s:.0f} s: still {state_now.phase}", highlight=False)
    console.print(f"{name} has ended", highlight=False)


def logs(name: str, *, follow: bool, console: Console) -> None:
    """Print what a detached deployment has printed, and with `follow` what it prints, until it ends.

    Raises NotRunning if there is nothing to print, NoFolder if it cannot be read.
    """
    place = DeploymentFolder(name)
    state = place.state()
    if state is not None and not state.detached:
        raise NotRunning(f"{name} was not detached: its output is in its terminal (process {state.pid})")
    if not place.log.exists():
        raise NotRunning(f"no deployment named {name!r} has been detached on this machine{_others()}")
    with place.open_log("r") as lines:
        while True:
            alive = follow and place.state() is not None
            console.out(lines.read(), highlight=False, end="")
            if not alive:
                return
            time.sleep(LOOK_EVERY_S)


def _others() -> str:
    names = ", ".join(running())
    return f"; these do: {names}" if names else ""
