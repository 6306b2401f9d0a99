"""The names of clients: a hash of their API key, or else their address, taken through trusted proxies."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ridgeline.contracts.rpc.address import IpAddress, ip_address

ANONYMOUS: Final = "anonymous"
CLIENT_HASH_CHARACTERS: Final = 12
MAX_KEY_BYTES: Final = 1024
"""Longest key that is hashed; a longer one is treated as unknown."""
IPV6_CLIENT_BITS: Final = 64
"""A network with a prefix this long is what one customer usually gets, with more addresses than could be counted."""
MAX_FORWARDED: Final = 16
"""Addresses in X-Forwarded-For that are read, from the end; nobody has more trusted proxies in a row."""

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


def hash_key(key: bytes) -> bytes:
    """Return the hash that is kept of an API key. Keys are long and random, so a fast hash without salt is enough."""
    return hashlib.sha256(key).digest()


def key_client(key_hash: bytes) -> str:
    """Return the name of the client that uses this key."""
    return key_hash.hex()[:CLIENT_HASH_CHARACTERS]


@dataclass(frozen=True)
class AddressClients:
    """Names clients without keys by their address, which trusted proxies may report."""

    trusted_proxies: Sequence[IpNetwork] = ()

    def name(self, peer: str | None, forwarded_for: Sequence[bytes]) -> str:
        """Return the client's name, given the socket's `peer` and the X-Forwarded-For headers in order.

        Each proxy appends the address that it was called from. So, reading from the end, the first address that is not
        a trusted proxy's was reported by one, and anything before it could have been written by that client itself.
        """
        address = ip_address(peer or "")
        if address is None:
            return peer or ANONYMOUS
        if not self._trusts(address):
            return _client(address)
        texts = b",".join(forwarded_for).rsplit(b",", MAX_FORWARDED)[-MAX_FORWARDED:]
        for text in reversed(texts):
            forwarded = _forwarded_address(text.strip())
            if forwarded is None:
                break
            address = forwarded
            if not self._trusts(address):
                break
        return _client(address)

    def _trusts(self, address: IpAddress) -> bool:
        return any(address in network for network in self.trusted_proxies)


def _client(address: IpAddress) -> str:
    if address.version == 4:
        return str(address)
    return str(ipaddress.IPv6Network((int(address), IPV6_CLIENT_BITS), strict=False))


def _forwarded_address(text: bytes) -> IpAddress | None:
    """Parse an address with or without a port: 192.0.2.7, 192.0.2.7:80, 2001:db8::7, [2001:db8::7]:80."""
    written = text.decode("latin-1")
    if written.startswith("["):
        written = written[1:].partition("]")[0]
    elif written.count(":") == 1:
        written = written.partition(":")[0]
    return ip_address(written)
