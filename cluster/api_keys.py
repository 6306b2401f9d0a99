"""Reads the API keys that clients may use, from a file and from the environment, and gives away only their hashes.

Called before anything starts, on the machine where `ridgeline serve` runs: neither the file nor the variable is needed
on another one, and no other process sees a key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from router.client_identity import hash_key

KEYS_VARIABLE: Final = "RIDGELINE_API_KEYS"
MAKE_ONE: Final = "make one with `openssl rand -hex 32`"


class ApiKeyError(ValueError):
    """The keys cannot be used as they are; the message names place and fix, never a key."""


def api_key_hashes(api_keys_file: str | None, environment: Mapping[str, str] = os.environ) -> frozenset[bytes]:
    """The hash of every key; empty if neither file nor variable is set, which opens the server to all.

    Raises ApiKeyError. A file or a variable that is set and holds no key is an error: it was meant to close the server.
    """
    hashes: set[bytes] = set()
    if api_keys_file is not None:
        hashes |= set(_hashes(api_keys_file, _lines(api_keys_file)))
    if KEYS_VARIABLE in environment and environment[KEYS_VARIABLE] != "":
        hashes |= set(_hashes(KEYS_VARIABLE, environment[KEYS_VARIABLE].split(",")))
    return frozenset(hashes)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ApiKeyError(
            f"security.api_keys_file {path} cannot be read ({error.strerror}): name a file with one key a line; "
            f"{MAKE_ONE}."
        ) from error
    except UnicodeDecodeError as error:
        raise ApiKeyError(f"security.api_keys_file {path} is not text: write one key a line; {MAKE_ONE}.") from error


def _hashes(where: str, texts: list[str]) -> list[bytes]:
    hashes = [hash_key(key) for key in _keys(where, texts)]
    if not hashes:
        raise ApiKeyError(f"{where} holds no API key: add one ({MAKE_ONE}), or leave the setting out.")
    return hashes


def _keys(where: str, texts: list[str]) -> Iterator[bytes]:
    for number, text in enumerate(texts, start=1):
        key = text.strip()
        if not key or key.startswith("#"):
            continue
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ApiKeyError(
                f"{where}: key {number} has a space or a character that no HTTP header can carry: {MAKE_ONE}."
            )
        yield key.encode("ascii")


def open_to_all(host: str) -> str:
    """A warning for a server without keys that other machines can reach; empty for one that they cannot."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return ""
    return (
        f"server.host {host} can be reached from other machines and no API key is asked for: set "
        f"security.api_keys_file or {KEYS_VARIABLE}, or keep the port on a network you trust."
    )
