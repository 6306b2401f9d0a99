"""What clients are called: by the hash of their API key, else by their address, through proxies that are trusted."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from contracts.rpc.address import IpAddress, ip_address

ANONYMOUS: Final = "anonymous"
CLIENT_HASH_CHARACTERS: Final = 12
MAX_KEY_BYTES: Final = 1024
"""Longer ones are nobody's, and not hashed."""
IPV6_CLIENT_BITS: Final = 64
"""A network of this prefix is what one customer is given, with more addresses in it than anybody could count."""
MAX_FORWARDED: Final = 16
"""Addresses of X-Forwarded-For that are looked at, the last ones. More trusted proxies in a row nobody has."""

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


def hash_key(key: bytes) -> bytes:
    """What is kept of an API key. Keys are long and random, so a fast hash without salt is enough."""
    return hashlib.sha256(key).digest()


def key_client(key_hash: bytes) -> str:
    """The name of who shows this key."""
    return key_hash.hex()[:CLIENT_HASH_CHARACTERS]


@dataclass(frozen=True)
class AddressClients:
    """Names clients without keys by their addresses, through proxies that are trusted to tell them."""

    trusted_proxies: Sequence[IpNetwork] = ()

    def name(self, peer: str | None, forwarded_for: Sequence[bytes]) -> str:
        """The client whose request came from the socket's `peer` with these X-Forwarded-For headers, in order.

        Each proxy adds the address it was called from at the end. So reading from there, the first address that is no
        trusted proxy's was told by one, and what stands before it was written by whoever has that address.
        """
        address = ip_address(peer or "")
        if address is None:
            return peer or ANONYMOUS
        if not self._trusts(address):
            return _client(address)
        texts = b",".join(forwarded_for).rsplit(b",", MAX_FORWARDED)[-MAX_FORWARDED:]
        for text in reversed(texts):
            told = _forwarded_address(text.strip())
            if told is None:
                break
            address = told
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
    """With or without a port, which some proxies add: 192.0.2.7, 192.0.2.7:80, 2001:db8::7, [2001:db8::7]:80."""
    written = text.decode("latin-1")
    if written.startswith("["):
        written = written[1:].partition("]")[0]
    elif written.count(":") == 1:
        written = written.partition(":")[0]
    return ip_address(written)
