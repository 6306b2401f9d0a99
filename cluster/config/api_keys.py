"""Reads the keys of clients and of operators, from files and from the environment, and gives away only their hashes.

Called before anything starts, on the machine where `ridgeline serve` runs: neither the files nor the variable are
needed on another one, and no other process sees a key. `ridgeline drain` reads its own key here as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ridgeline.contracts.rpc.address import is_loopback
from ridgeline.router.client_identity import MAX_KEY_BYTES, hash_key

KEYS_VARIABLE: Final = "RIDGELINE_API_KEYS"
MAKE_ONE: Final = "make one with `openssl rand -hex 32`"
_CLIENTS: Final = "security.api_keys_file"
_ADMINS: Final = "security.admin_keys_file"
_METRICS: Final = "security.metrics_keys_file"


class ApiKeyError(ValueError):
    """The keys cannot be used as they are; the message names the place and the fix, never a key."""


@dataclass(frozen=True)
class KeyHashes:
    """The hash of every key, by what it gives access to."""

    clients: frozenset[bytes] = frozenset()
    """Hashes of clients' keys; if empty, the server is open to everybody."""
    admins: frozenset[bytes] = frozenset()
    metrics: frozenset[bytes] = frozenset()
    """Of those that read /metrics; if empty, everybody may."""


def key_hashes(
    api_keys_file: str | None,
    admin_keys_file: str | None,
    environment: Mapping[str, str] = os.environ,
    *,
    metrics_keys_file: str | None = None,
) -> KeyHashes:
    """Read the keys of clients, of operators and of those that read /metrics.

    Raises ApiKeyError, also for a key that is in both: a client's key never gives access to an operator's path. A file
    or a variable that is set and holds no key is an error: it was meant to close the server.
    """
    clients, admins, metrics = (
        frozenset() if path is None else _hashes(path, _lines(setting, path))
        for setting, path in ((_CLIENTS, api_keys_file), (_ADMINS, admin_keys_file), (_METRICS, metrics_keys_file))
    )
    if given := environment.get(KEYS_VARIABLE):
        clients |= _hashes(KEYS_VARIABLE, given.split(","))
    if clients & admins:
        raise ApiKeyError(f"a key of {_ADMINS} {admin_keys_file} is a client's key too: {MAKE_ONE} for operators only.")
    return KeyHashes(clients, admins, metrics)


def first_admin_key(path: str) -> str:
    """Read the key that `ridgeline drain` sends. Raises ApiKeyError."""
    for key in _keys(path, _lines("--admin-key-file", path)):
        return key.decode("ascii")
    raise ApiKeyError(f"--admin-key-file {path} holds no key: name the file that security.admin_keys_file names.")


def _lines(setting: str, path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ApiKeyError(
            f"{setting} {path} cannot be read ({error.strerror}): name a file with one key a line; {MAKE_ONE}."
        ) from error
    except UnicodeDecodeError as error:
        raise ApiKeyError(f"{setting} {path} is not text: write one key a line; {MAKE_ONE}.") from error


def _hashes(where: str, texts: list[str]) -> frozenset[bytes]:
    hashes = frozenset(hash_key(key) for key in _keys(where, texts))
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
        if len(key) > MAX_KEY_BYTES:
            raise ApiKeyError(f"{where}: key {number} is longer than {MAX_KEY_BYTES} characters: {MAKE_ONE}.")
        yield key.encode("ascii")


def open_to_all(host: str) -> str:
    """Return a warning for a server without keys that other machines can reach; empty for one that they cannot."""
    if is_loopback(host):
        return ""
    return (
        f"server.host {host} can be reached from other machines and no API key is asked for: set "
        f"security.api_keys_file or {KEYS_VARIABLE}, or keep the port on a network you trust."
    )
