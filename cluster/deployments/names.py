"""Which `ridgeline serve` processes run on this machine, by name, and what they are doing.

Each has a folder, `~/.local/state/ridgeline/NAME` (XDG_STATE_HOME), whose lock its process holds: the lock is free
again however the process ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from ridgeline.cluster.errors import ServingError
from ridgeline.cluster.folders import log_name, state_folder
from ridgeline.contracts.handoff import UNREADABLE

Phase = Literal["starting", "ready", "draining"]
_LOCK, _DETACHING, _STATE, _LOG, _LOGS = "lock", "detaching", "state.json", "serve.log", "logs"
READ_WITHIN_S = 1.0
READ_AGAIN_S = 0.02
logger = logging.getLogger(__name__)


class AlreadyRunning(ServingError):
    """A deployment of this name runs on this machine; the message names the fix."""


class NoFolder(ServingError):
    """What is known of a deployment cannot be written; the message names the fix."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a serving process says about itself."""

    pid: int
    began: str
    """The date and time of its start, with the zone."""
    phase: Phase = "starting"
    mode: str = ""
    """The mode in which it starts; while it serves, the router knows the present one."""
    url: str = ""
    """Where it serves, once it is ready."""
    ready_deadline_s: float = 0.0
    """Seconds within which its router knows whether it is ready: router.ready_deadline_s."""
    detached: bool = False
    """Whether its output goes to the log instead of to a terminal."""
    away: dict[str, str] = {}
    """Workers that are lost again and again, and how they are tried again."""
    warnings: list[str] = []
    """What its operator should mend in its settings."""
    kv: list[str] = []
    """By which transport KV went between its workers when it became ready, and why by none better."""


@dataclass(frozen=True)
class DeploymentFolder:
    """The folder of one name."""

    name: str

    @property
    def folder(self) -> Path:
        """The folder, which need not exist."""
        return state_folder() / self.name

    @property
    def log(self) -> Path:
        """The file with the output of the last one that was detached."""
        return self.folder / _LOG

    def worker_log(self, process: str) -> Path:
        """The file with the output of a worker, router or dispatcher of this machine."""
        return self.folder / _LOGS / log_name(self.name, process)

    def logs_are_in(self, folder: Path) -> None:
        """Note where Ray has these files. Raises NoFolder."""
        link = self.folder / _LOGS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(folder)
        except OSError as error:
            raise self._unusable(error) from error

    def open_log(self, mode: Literal["r", "w"], process: str = "") -> IO[str]:
        """Open the log, or that of a worker; what is no text in it is replaced. Raises NoFolder."""
        return self._opened(self.worker_log(process) if process else self.log, mode)

    def _opened(self, path: Path, mode: Literal["r", "w", "a"]) -> IO[str]:
        try:
            if mode != "r":
                self.folder.mkdir(parents=True, exist_ok=True)
            return path.open(mode, encoding="utf-8", errors="replace")
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> NoFolder:
        return NoFolder(
            f"{error.filename or self.folder} cannot be used ({error.strerror}): set XDG_STATE_HOME to a directory "
            "that can be written, and has room"
        )

    @contextmanager
    def being_detached(self) -> Iterator[None]:
        """Let no other process detach this name, whose child holds it some seconds later only, while the block runs.

        Raises AlreadyRunning, or NoFolder.
        """
        with self._opened(self.folder / _DETACHING, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise AlreadyRunning(
                    f"a deployment named {self.name!r} is being started on this machine: look at it with `ridgeline "
                    "status`, or give this one another --name"
                ) from None
            yield

    @contextmanager
    def held(self, **facts: Any) -> Iterator[HeldName]:
        """Hold the name while the block runs, with these fields of `State`.

        Raises AlreadyRunning if another process holds it, or NoFolder.
        """
        with self._opened(self.folder / _LOCK, "a") as lock:
            self._take(lock)
            began = time.strftime("%Y-%m-%d %H:%M:%S %z")
            held = HeldName(self.folder / _STATE, State(pid=os.getpid(), began=began, **facts))
            try:
                held.write()
            except OSError as error:
                raise self._unusable(error) from error
            try:
                yield held
            finally:
                with suppress(OSError):
                    (self.folder / _STATE).unlink()

    def _take(self, lock: IO[str]) -> None:
        give_up_s = time.monotonic() + READ_WITHIN_S
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:  # held, or another process has just looked whether it is
                if time.monotonic() > give_up_s:
                    raise AlreadyRunning(taken(self.name, self.state())) from None
                time.sleep(READ_AGAIN_S)

    def state(self) -> State | None:
        """Return what the process that holds the name says, or None if there is none."""
        give_up_s = time.monotonic() + READ_WITHIN_S
        while self._is_held():
            with suppress(FileNotFoundError, *UNREADABLE):
                return msgspec.json.decode((self.folder / _STATE).read_bytes(), type=State)
            if time.monotonic() > give_up_s:
                break
            time.sleep(READ_AGAIN_S)  # it has the lock and has not written yet
        return None

    def _is_held(self) -> bool:
        try:
            lock = (self.folder / _LOCK).open("a")
        except OSError:  # nobody has held it, or nobody could
            return False
        with lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False


def taken(name: str, state: State | None) -> str:
    """Say that a name is taken, by whom, and what to do."""
    who = f" (process {state.pid}, started {state.began})" if state else ""
    return (
        f"a deployment named {name!r} runs on this machine already{who}: end it with `ridgeline stop --name {name}`, "
        "or give this one another --name"
    )


class HeldName:
    """A name that this process holds."""

    def __init__(self, file: Path, state: State) -> None:
        self._file = file
        self._state = state

    def tell(self, **changes: Any) -> None:
        """Write which fields of `State` have changed.

        On a disk that is full by now others read what was told before: that ends no deployment.
        """
        self._state = msgspec.structs.replace(self._state, **changes)
        try:
            self.write()
        except OSError as error:
            logger.warning("`ridgeline status` does not show what is so now: %s (%s)", self._file, error.strerror)

    def write(self) -> None:
        """Write what was told last. Raises OSError."""
        unfinished = self._file.with_suffix(".tmp")
        unfinished.write_bytes(msgspec.json.encode(self._state))
        unfinished.replace(self._file)


def running() -> dict[str, State]:
    """Return all deployments that run on this machine, by name."""
    folder = DeploymentFolder("").folder
    places = [DeploymentFolder(path.name) for path in sorted(folder.iterdir())] if os.path.isdir(folder) else []
    states = {place.name: place.state() for place in places}
    return {name: state for name, state in states.items() if state is not None}
