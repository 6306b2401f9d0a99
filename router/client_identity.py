"""Who sent the request that is being served: set by `router.guard` for every HTTP request, read where clients share.

A module of its own so that admission needs not import the HTTP side. Tasks made while a request is served inherit it.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from typing import Final

ANONYMOUS: Final = "anonymous"

CLIENT: Final[ContextVar[str]] = ContextVar("ridgeline_client", default=ANONYMOUS)
"""A short hash of the API key where keys are configured, else the peer's IP address; never the key itself."""


def hash_key(key: bytes) -> bytes:
    """What is kept of an API key. Keys are long and random, so a fast hash without salt is enough."""
    return hashlib.sha256(key).digest()
