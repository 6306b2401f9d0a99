"""Finds and loads NIXL, which is an optional package, named after the CUDA version that it can use.

It works without CUDA too. Loading it takes half a second and starts UCX, so it is done only where it is configured.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from typing import Any

import torch

from ridgeline.kv_transfer.names import NIXL_PACKAGES


class NixlFailed(Exception):
    """NIXL is not installed, or could not do what it was asked to; the message says why."""


def package() -> str:
    """Return the name of the package that fits this build of torch."""
    newest, *_ = NIXL_PACKAGES.values()
    return NIXL_PACKAGES.get((torch.version.cuda or "").partition(".")[0], newest)


def why_missing() -> str | None:
    """Return a sentence that says what to install, or None if NIXL is installed. Does not load it."""
    if importlib.util.find_spec(_module()) is not None:
        return None
    return f"the package {package()} is not installed: run `pip install {package()}` in this environment"


@cache
def load() -> Any:
    """Return NIXL's bindings. Raises NixlFailed if they are not installed or cannot be loaded.

    The bindings rather than its Python API, whose agents spin: it sets no pause between two looks for messages.
    """
    if (why := why_missing()) is not None:
        raise NixlFailed(why)
    raises = logging.raiseExceptions
    try:
        return importlib.import_module(f"{_module()}._bindings")
    except ImportError as error:
        raise NixlFailed(f"{package()} cannot be loaded: {error}") from error
    finally:
        logging.raiseExceptions = raises  # it switches this off for the whole process


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that NIXL's calls raise; they have no common base class."""
    bindings = load()
    return tuple(
        getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")
    )


def _module() -> str:
    return package().replace("-", "_")
