"""Temporary folders in which sockets fit: Ray's, which also has its logs, and those of our own processes.

The path of a Unix socket has little room, and Ray and vLLM take RAY_TMPDIR and TMPDIR whatever their length: where a
job scheduler gives each job a temporary folder of its own, their sockets do not fit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOCKET_PATH_BYTES = 107
"""The longest path that the kernel takes for a Unix socket (unix(7): sun_path, less its final zero)."""
LONGEST_BELOW = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path of a socket that Ray makes below its folder, with the largest process id there is."""
LONGEST_OF_OURS = "/ridgeline-abcdefgh/01234567-0123-0123-0123-0123456789ab"
"""The longest of our own: vLLM calls its sockets by a UUID."""
INSTEAD = "/tmp"


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


def ray_folder(environment: Mapping[str, str] = os.environ) -> RayFolder:
    """Return the folder that the variables name or, if sockets do not fit there, /tmp."""
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if environment.get(name)), "")
    asked = os.path.abspath(environment[variable]) if variable else tempfile.gettempdir()
    path = _fitting(asked, LONGEST_BELOW)
    if _can_be_written(path):
        return RayFolder(path, asked, variable)
    most = SOCKET_PATH_BYTES - len(LONGEST_BELOW)
    set_it = f"set {variable or 'TMPDIR'} to a folder that can be written, of at most {most} characters"
    return RayFolder(path, asked, variable, f"Ray keeps its sockets in {path}, which cannot be written: {set_it}.")


def _can_be_written(path: str) -> bool:
    """Return whether the folder, or the nearest one above that exists, takes files."""
    there = next(folder for folder in (Path(path, "ray"), *Path(path, "ray").parents) if folder.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
