"""The folders below the home, or where the XDG variables say, in which what belongs to a user is kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
