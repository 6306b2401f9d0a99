"""A `ridgeline serve` process as its operator sees it: started, read, and certainly ended.

Used by the tests of processes and by the drivers in `tests/chaos`, which kill parts of it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from ridgeline.cluster.deployments.names import DeploymentFolder
from ridgeline.cluster.runtime.service_process.launch import PRELOADED

REPOSITORY = Path(__file__).parents[2]
RIDGELINE = Path(sys.executable).parent / "ridgeline"
SHARED_PARENT = "RIDGELINE_TESTS_PARENT"
"""Variable with the process id of the preloaded parent of all deployments of a test session, if there is one."""
START_WITHIN_S = 600.0
"""Ends a test that would hang, like the next one: a start takes 20 to 60 s where nothing else runs."""
EXIT_WITHIN_S = 300.0
GONE_WITHIN_S = 60.0
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Small helpers of Ray that look for their raylet only now and then: they end by themselves within about a minute."""


@dataclass(frozen=True)
class Worker:
    """A row of the printed table."""

    pool: str
    cores: str
    actor_pid: int
    engine_pids: tuple[int, ...]

    @property
    def engine_pid(self) -> int:
        """The engine process; its ranks, if it is split, are its children."""
        return next(pid for pid in self.engine_pids if psutil.Process(pid).ppid() == self.actor_pid)


class Serve:
    """One `ridgeline serve` process and what it has printed."""

    def __init__(self, process: subprocess.Popen[str], parent: int | None) -> None:
        self.process = process
        self._parent = parent
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self) -> str:
        """Returns the URL."""
        deadline_s = time.monotonic() + START_WITHIN_S
        while time.monotonic() < deadline_s:
            found = re.search(r"^ready: (http://\S+)/v1", self.output, re.MULTILINE)
            if found:
                return found[1]
            assert self.process.poll() is None, self.output
            time.sleep(0.1)
        raise AssertionError(f"not ready within {START_WITHIN_S:.0f} s:\n{self.output}")

    def wait_said(self, pattern: str, within_s: float) -> str:
        """The first line that has it, also one of long ago."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            for line in list(self.lines):
                if re.search(pattern, line):
                    return line
            assert self.process.poll() is None, self.output
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} was not said within {within_s:.0f} s:\n{self.output}")

    def table(self) -> dict[str, Worker]:
        """What runs where, as printed."""
        rows = {}
        for line in self.lines:
            cells = [cell.strip() for cell in line.strip("│ ").split("│")]
            if len(cells) == 9:
                rows[cells[0]] = Worker(cells[1], cells[3], int(cells[4]), tuple(map(int, cells[5].split(","))))
        return rows

    def family(self) -> list[psutil.Process]:
        """All that it has started, itself or by the shared parent, and that still runs."""
        return [*descendants(self.process.pid), *([] if self._parent is None else descendants(self._parent))]

    def wait_exit(self, within_s: float = EXIT_WITHIN_S) -> int:
        """Its exit status; raises subprocess.TimeoutExpired."""
        status = self.process.wait(within_s)
        self._reader.join(5)
        return status

    def close(self) -> None:
        """Stop reading; the process has ended."""
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


def _as_in_a_terminal() -> None:
    """Not as under nohup, which `serve` respects."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def serving(
    *arguments: str,
    folder: Path = REPOSITORY,
    shell: Mapping[str, str] = {},
    program: tuple[str, ...] = (str(RIDGELINE),),
    shares_parent: bool = True,
) -> Iterator[Serve]:
    """`ridgeline serve` on the shipped configuration; whatever the test did, nothing of it runs afterwards.

    `folder` is the working folder, `shell` has variables of the operator's, `program` is what to run instead. Unless it
    `shares_parent`, it imports vLLM in a preloaded parent of its own, as it does for its users.
    """
    shared = os.environ.get(SHARED_PARENT) if shares_parent else None
    environment = dict(os.environ) if shared else without_parent()
    name = f"test-{secrets.token_hex(4)}"  # several may run at a time, and beside one that is no test
    command = [*program, "serve", "-c", str(REPOSITORY / "deploy/local.yaml"), "--port", "0", "--name", name]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "COLUMNS": "250", "NO_COLOR": "1", **shell},
        start_new_session=True,
        preexec_fn=_as_in_a_terminal,
    )
    serve = Serve(process, int(shared) if shared else None)
    family: list[psutil.Process] = []
    try:
        yield serve
        raw = [line for line in serve.lines if line.startswith("(raylet)")]
        assert not raw, "Ray's own words belong to its file, whatever was killed"
    finally:
        if process.poll() is None:
            family = serve.family()
            process.kill()
        process.wait(10)
        shutil.rmtree(DeploymentFolder(name).folder, ignore_errors=True)
        for member in family:
            if member.is_running():
                member.kill()
        serve.close()


def words_of(settings: Mapping[str, str]) -> list[str]:
    """The settings as a command line has them."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def without_parent() -> dict[str, str]:
    """The variables of this process, for one that is to have a preloaded parent of its own."""
    return {name: value for name, value in os.environ.items() if name != PRELOADED}


def descendants(pid: int) -> list[psutil.Process]:
    """All that it, or one of them, has started and that still runs."""
    return psutil.Process(pid).children(recursive=True)


def still_there(processes: list[psutil.Process], within_s: float) -> list[str]:
    """Names of those that have not ended by then. A zombie that nobody collects has ended."""
    deadline_s = time.monotonic() + within_s
    while True:
        left = [process for process in processes if alive(process)]
        if not left or time.monotonic() > deadline_s:
            return [f"{process.pid} {name_of(process)}" for process in left]
        time.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    """False for a zombie as well."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def name_of(process: psutil.Process) -> str:
    """The beginning of its command line."""
    return _command(process)[:80]


def engines_below(worker: psutil.Process) -> list[psutil.Process]:
    """The engine processes of a worker that run, without Python's resource tracker."""
    return [child for child in worker.children() if alive(child) and "resource_tracker" not in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "gone just now"


def body(num_tokens: int) -> dict[str, object]:
    """A completion of exactly so many tokens."""
    return {"model": "smollm2-135m", "prompt": "The light of the sun", "max_tokens": num_tokens, "ignore_eos": True}
