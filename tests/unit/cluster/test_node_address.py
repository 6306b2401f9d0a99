"""One setting names each node's own address: a network or an interface."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from ridgeline.cluster.config.loader import ConfigError, load_config
from ridgeline.cluster.node_address import NoSuchAddress, address_here, address_problem

INTERFACES = {
    "lo": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    "eth0": [(psutil.AF_LINK, "0a:00:00:00:00:01"), (socket.AF_INET, "192.168.0.7")],
    "eth1": [(socket.AF_INET6, "fe80::1%eth1"), (socket.AF_INET6, "fd00::7"), (socket.AF_INET, "10.1.2.3")],
    "eth2": [],
}


@pytest.fixture(autouse=True)
def _interfaces(monkeypatch):
    found = {
        name: [SimpleNamespace(family=family, address=address) for family, address in entries]
        for name, entries in INTERFACES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.parametrize(
    ("wanted", "address"),
    [
        ("10.1.0.0/16", "10.1.2.3"),
        ("fd00::/8", "fd00::7"),
        ("eth1", "10.1.2.3"),
        ("eth0", "192.168.0.7"),
        ("10.9.9.9", "10.9.9.9"),
        ("a-node.example", "a-node.example"),
    ],
)
def test_a_network_or_an_interface_becomes_this_nodes_address_and_other_text_stays(wanted, address):
    assert address_here(wanted) == address


@pytest.mark.parametrize("wanted", ["10.2.0.0/16", "eth2", "fe80::/10"])
def test_a_node_without_such_an_address_says_which_it_has(wanted):
    with pytest.raises(
        NoSuchAddress, match=r"no address for transfer\.host .*eth0: 192\.168\.0\.7; eth1: 10\.1\.2\.3, fd00"
    ):
        address_here(wanted)


@pytest.mark.parametrize("wanted", ["eth9", "192.0.2.1", "10.2.0.0/16", "eth2", "a..b"])
def test_what_is_no_address_network_or_interface_of_this_node_is_refused_with_those_it_has(wanted):
    assert f"transfer.host {wanted!r}; it has lo: 127.0.0.1" in address_problem(wanted)


@pytest.mark.parametrize("wanted", [None, "lo", "127.0.0.0/8", "127.0.0.1", "localhost"])
def test_what_workers_can_listen_on_here_is_no_problem(wanted):
    assert address_problem(wanted) == ""


@pytest.mark.parametrize("wrong", ["10.0.0.1/16", "10.0.0.0/99", "eth1/16"])
def test_a_network_that_is_written_wrongly_is_refused_with_the_configuration(wrong):
    with pytest.raises(ConfigError, match="is not a network"):
        load_config(None, {"transfer.host": wrong})
