"""The address by which this node is reached in a network: one setting for nodes that each have their own address."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence

import psutil


class NoSuchAddress(RuntimeError):
    """This node has no address in the network, or no such interface; the message lists what it has."""


def network_of(wanted: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Read `10.0.0.0/16`; None for what is no network. Raises ValueError for a network that is written wrongly."""
    return ipaddress.ip_network(wanted) if "/" in wanted else None


def address_here(wanted: str) -> str:
    """Return this node's address for a network (`10.0.0.0/16`) or an interface (`eth1`); other text unchanged.

    Of several addresses the first one counts, IPv4 before IPv6. Raises NoSuchAddress.
    """
    network, here = network_of(wanted), _addresses()
    if network is None and wanted not in here:
        return wanted
    if network is None:
        found = here[wanted]
    else:
        found = [one for ones in here.values() for one in ones if ipaddress.ip_address(one) in network]
    if not found:
        raise _none_for(wanted, here)
    return found[0]


def address_problem(wanted: str | None) -> str:
    """Return why workers of this node could not listen at this `transfer.host`, and the fix; empty if they could."""
    if wanted is None:
        return ""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(address_here(wanted), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except NoSuchAddress as error:
        return f"{error}."
    except (OSError, UnicodeError):  # a name that nobody knows, or that can be none; an address of another node
        return f"{_none_for(wanted, _addresses())}."
    return ""


def _none_for(wanted: str, here: Mapping[str, Sequence[str]]) -> NoSuchAddress:
    has = "; ".join(f"{name}: {', '.join(ones)}" for name, ones in here.items() if ones) or "none"
    return NoSuchAddress(
        f"{socket.gethostname()} has no address for transfer.host {wanted!r}; it has {has}: name a network or an "
        "interface that every worker's node has"
    )


def _addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface, without those of the link alone."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        ours = found.setdefault(name, [])
        for family in (socket.AF_INET, socket.AF_INET6):
            texts = (entry.address for entry in entries if entry.family == family)
            ours += [text for text in texts if not ipaddress.ip_address(text.partition("%")[0]).is_link_local]
    return found
