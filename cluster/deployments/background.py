"""`ridgeline serve --detach`, `status`, `stop` and `logs`: deployments that outlive their terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
from rich.console import Console
from rich.table import Column, Table

from ridgeline.cluster.deployments.names import AlreadyRunning, DeploymentFolder, State, running, taken
from ridgeline.cluster.errors import ServingError
from ridgeline.cluster.runtime.environment import search_path
from ridgeline.contracts.handoff import UNREADABLE

LOOK_EVERY_S = 0.2
SAY_EVERY_S = 10.0
CONNECT_WITHIN_S = 1.0
BEYOND_PROBE_S = 5.0
"""After a probe that failed, a router asks its workers how they are: two requests of 2 s each
(`ridgeline.router.fleet.worker`)."""
DETACHED = "--detached-child"
"""Hidden option of `serve`: the process that `--detach` has started, whose output goes to the log."""


class NotRunning(ServingError):
    """There is no such deployment on this machine, or it ended before it was ready."""


class _Pool(msgspec.Struct, frozen=True):
    ready: bool
    why: str = ""


class _Ready(msgspec.Struct, frozen=True):
    """The part of GET /ready that `status` shows."""

    ready: bool = False
    mode: str = "?"
    why: str = ""
    pools: dict[str, _Pool] = {}
    router: str = ""

    @property
    def sentences(self) -> list[str]:
        """Say why it is not ready, and whether a router is the bottleneck."""
        pools = [f"{name} is not ready: {pool.why}" for name, pool in self.pools.items() if not pool.ready]
        return [sentence for sentence in (self.why, *pools, self.router) if sentence]


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
    with ThreadPoolExecutor() as threads:  # one that hangs keeps no other's answer back
        answers = dict(zip(found, threads.map(_asked, found.values()), strict=True))
    whole = (Column(title, no_wrap=True) for title in ("name", "state", "mode", "URL", "process"))
    table = Table(*whole, "since", Column("output", overflow="fold"))  # a path or URL that is cut off cannot be used
    for name, state in found.items():
        output = str(DeploymentFolder(name).log) if state.detached else "its terminal"
        answer, phase, mode = answers[name], str(state.phase), state.mode if state.phase == "starting" else "?"
        if answer is not None:
            mode = answer.mode
        if phase == "ready" and (answer is None or not answer.ready):
            phase = "no answer" if answer is None else "not ready"
        table.add_row(name, phase, mode, state.url, str(state.pid), state.began, output)
    console.print(table)
    for name, state in found.items():
        for sentence in (*state.kv, *state.warnings):
            console.print(f"{name}: {sentence}", highlight=False)
        for worker, how in state.away.items():
            console.print(f"{name}: {worker} is {how}", highlight=False)
        for sentence in () if (answer := answers[name]) is None else answer.sentences:
            console.print(f"{name}: {sentence}", highlight=False)


def _asked(state: State) -> _Ready | None:
    """Return what a router says of itself, None without an answer; if it is idle, it makes two tokens for that."""
    within = httpx.Timeout(CONNECT_WITHIN_S, read=state.ready_deadline_s + BEYOND_PROBE_S)
    try:
        answer = httpx.get(f"{state.url}/ready", timeout=within, trust_env=False).content if state.url else b""
        return msgspec.json.decode(answer, type=_Ready)
    except (httpx.HTTPError, *UNREADABLE):
        return None


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


def logs(name: str, *, follow: bool, console: Console, worker: str = "") -> None:
    """Print what a detached deployment has printed, or a worker of any; with `follow` what it prints, until it ends.

    Raises NotRunning if there is nothing to print, NoFolder if it cannot be read.
    """
    place = DeploymentFolder(name)
    state = place.state()
    if worker and not place.worker_log(worker).exists():
        raise NotRunning(_no_log(place, worker))
    if not worker and state is not None and not state.detached:
        raise NotRunning(
            f"{name} was not detached: its output is in its terminal (process {state.pid}); `ridgeline logs --name "
            f"{name} --worker router` has the router's, --worker worker-0 a worker's"
        )
    if not worker and not place.log.exists():
        raise NotRunning(f"no deployment named {name!r} has been detached on this machine{_others()}")
    with place.open_log("r", worker) as lines:
        while True:
            alive = follow and place.state() is not None
            console.out(lines.read(), highlight=False, end="")
            if not alive:
                return
            time.sleep(LOOK_EVERY_S)


def _no_log(place: DeploymentFolder, worker: str) -> str:
    name = place.worker_log(worker).name
    prefix, folder = place.worker_log("").stem, place.worker_log("").parent
    logs = sorted(path.stem for path in folder.iterdir()) if folder.is_dir() else []
    here = [log.removeprefix(prefix) for log in logs if log.startswith(prefix)]
    return (
        f"{place.name} has no log of {worker!r} on this machine, but of {', '.join(here) or 'nobody'}{_others()}. A "
        f"worker of another machine has it there: `ray logs {name} --node-ip ADDRESS`, with the address that GET "
        "/ridgeline/workers has of it"
    )


def _others() -> str:
    names = ", ".join(running())
    return f"; these do: {names}" if names else ""
