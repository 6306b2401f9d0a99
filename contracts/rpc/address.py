"""Hosts, ports and URLs as text. IPv6 has colons of its own, so they are written and read here and nowhere else."""

from __future__ import annotations

import ipaddress

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def join_host_port(host: str, port: int) -> str:
    """Write `host:port`, with brackets around an IPv6 address; gRPC, URLs and `split_host_port` understand it."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Split `host:port` into its halves; the host without brackets. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not host:port; an IPv6 address is written as [::1]:8000")
    return host[1:-1] if bracketed else host, int(port)


def http_url(host: str, port: int) -> str:
    """Return the URL of a server that listens there."""
    return f"http://{join_host_port(host, port)}"


def ip_address(text: str) -> IpAddress | None:
    """Read an IP address, without brackets and port; None for a name or nonsense.

    IPv4 within IPv6, as a socket for both shows an IPv4 peer, becomes the IPv4 address.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_loopback(host: str) -> bool:
    """Return whether this name or address always means this machine."""
    address = ip_address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback
