"""Folders of this machine: what is kept below a user's home, and temporary ones in which sockets fit.

A user's are below the home, or where the XDG variables say. The path of a Unix socket has little room, and Ray and vLLM
take RAY_TMPDIR and TMPDIR whatever their length: where a job scheduler gives each job a temporary folder of its own,
their sockets do not fit.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SOCKET_PATH_BYTES = 107
"""The longest path that the kernel takes for a Unix socket (unix(7): sun_path, less its final zero)."""
LONGEST_BELOW = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path of a socket that Ray makes below its folder, with the largest process id there is."""
LONGEST_OF_OURS = "/ridgeline-abcdefgh/01234567-0123-0123-0123-0123456789ab"
"""The longest of our own: vLLM calls its sockets by a UUID."""
INSTEAD = "/tmp"
MARK = "ridgeline"
"""A file in the folder of a Ray's session that says whose it is; locked while that Ray runs."""


class NoHome(RuntimeError):
    """Nobody says where this user keeps files; the message names the fix."""


def state_folder() -> Path:
    """Return where the deployments of this user say what they do. Raises NoHome."""
    return _folder("XDG_STATE_HOME", ".local/state")


def cache_folder() -> Path:
    """Return where models and measured facts about this machine are kept. Raises NoHome."""
    return _folder("XDG_CACHE_HOME", ".cache")


def _folder(variable: str, below_home: str) -> Path:
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home) / "ridgeline"
    except RuntimeError as error:
        raise NoHome("this user has no home: set HOME to a folder that can be written") from error


def why_unwritable(path: Path) -> str:
    """Return why the folder, or the nearest one above that exists, takes no files; empty if it does. It is tried."""
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def own_folder() -> Path:
    """Make a folder that no other user may enter, in the temporary folder or, if sockets do not fit there, /tmp."""
    return Path(tempfile.mkdtemp(prefix="ridgeline-", dir=_fitting(tempfile.gettempdir(), LONGEST_OF_OURS)))


def _fitting(path: str, longest_below: str) -> str:
    return path if len(os.fsencode(path + longest_below)) <= SOCKET_PATH_BYTES else INSTEAD


@dataclass(frozen=True)
class RayFolder:
    """The folder in which Ray makes its own, called `ray`."""

    path: str
    asked: str
    """What the shell's variables ask for."""
    variable: str
    """The variable that does; empty without one."""
    problem: str = ""
    """Why Ray cannot start with it; names the fix."""

    @property
    def logs(self) -> str:
        """Where the newest Ray's logs are."""
        return f"{self.path}/ray/session_latest/logs"


def log_name(deployment: str, process: str) -> str:
    """Return the file with the output of a worker, router or dispatcher, beside Ray's own logs of its machine."""
    return f"{MARK}-{deployment}-{process}.log"


def ray_folder(environment: Mapping[str, str] = os.environ) -> RayFolder:
    """Return the folder that the variables name or, if sockets do not fit there, /tmp."""
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if environment.get(name)), "")
    asked = os.path.abspath(environment[variable]) if variable else tempfile.gettempdir()
    path = _fitting(asked, LONGEST_BELOW)
    if not why_unwritable(Path(path, "ray")):
        return RayFolder(path, asked, variable)
    most = SOCKET_PATH_BYTES - len(LONGEST_BELOW)
    set_it = f"set {variable or 'TMPDIR'} to a folder that can be written, of at most {most} characters"
    return RayFolder(path, asked, variable, f"Ray keeps its sockets in {path}, which cannot be written: {set_it}.")


@contextmanager
def session_kept(session: Path) -> Iterator[None]:
    """Have `remove_ended_sessions` spare the folder of a Ray of ours while the block runs."""
    with (session / f".{MARK}").open("wb") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        Path(mark.name).rename(session / MARK)
        yield


def remove_ended_sessions(sessions: Path) -> None:
    """Remove what Rays of ours have left there that have ended: until now somebody may have read their logs."""
    for path in sessions.glob(f"session_*/{MARK}"):
        with suppress(OSError), path.open("rb") as mark:  # OSError: it runs, or another start has removed it
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(mark.fileno()).st_uid == os.geteuid():
                shutil.rmtree(path.parent, ignore_errors=True)
