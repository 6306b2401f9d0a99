"""`ray up deploy/cluster-onprem.yaml`, unchanged, on three hosts with the addresses that it names; no engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.harness import Figure
from tests.hosts.conftest import wait_until
from tests.hosts.image import PROGRAMS
from tests.hosts.namespaces import Host, Network
from tests.hosts.operators_shell import OperatorsShell, documented

pytestmark = pytest.mark.hosts

ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
PAGE = "Your own machines"
WITHIN_S = 90.0


@pytest.fixture
def hosts(network: Network, models: Path) -> Iterator[list[Host]]:
    """The head and two others, on which the owner's key lets in."""
    hosts = [Host(network, f"own{number}", [f"{address}/24"]) for number, address in enumerate(ADDRESSES, start=1)]
    for host in hosts:
        host.prepare("", PROGRAMS)
        host.has_environment(models)
        host.make()
    for host in hosts:
        host.wait_answers()
    yield hosts
    for host in hosts:
        host.kill()


@pytest.fixture
def owner(network: Network, tmp_path: Path) -> Iterator[OperatorsShell]:
    """A shell whose user has the key that the file names."""
    shell = OperatorsShell(tmp_path, {})
    (shell.home / ".ssh").mkdir()
    shutil.copy(network.key, shell.home / ".ssh/id_ed25519")
    yield shell
    shell.end_all()


@pytest.mark.long
def test_ray_up_joins_every_machine_with_places_for_both_pools_and_ray_down_leaves_nothing(
    hosts: list[Host], owner: OperatorsShell, figure: Figure
):
    owner.run(documented(PAGE, "ray get-auth-token"))
    owner.run(documented(PAGE, "ray up"))

    def joined() -> bool:
        status = owner.run("ray exec deploy/cluster-onprem.yaml 'ray status'")
        return "3 local.cluster.node" in status and all(
            f"0.0/16.0 ridgeline_{p}" in status for p in ("decode", "prefill")
        )

    wait_until(joined, WITHIN_S, "the head and both others have joined, started by Ray itself")
    assert "no deployment runs" in owner.run("ray exec deploy/cluster-onprem.yaml 'ridgeline status'")
    owner.run(documented(PAGE, "ray down"))
    for host in hosts[1:]:
        host.ssh("ridgeline/.venv/bin/ray stop")  # as the page says: `ray down` ends Ray on the head alone
    for host in hosts:
        wait_until(lambda host=host: not host.processes(), WITHIN_S, f"{host.name} is idle: {host.processes()}")
    figure(", ".join(f"{command}: {seconds:.0f} s" for command, seconds in owner.took_s.items()))
