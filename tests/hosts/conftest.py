"""The network that all tests of this folder are in, and the cluster of `ray up deploy/cluster.yaml`."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from ridgeline.cluster.model_store import DEFAULT_MODEL_NAME, prepare_model
from tests.hosts.ec2 import ADDRESS, METADATA_ADDRESS, OPERATORS_KEY, PREFIX, PUBLIC, REGION, Ec2
from tests.hosts.image import FAILS, PROGRAMS, make_environment
from tests.hosts.namespaces import CannotMakeHosts, Host, Network, left
from tests.hosts.operators_shell import REPOSITORY, OperatorsShell, Running, documented

SERVED = "deploy/cluster-serve.yaml"
DRAIN_S = 5.0
CORES = {"head": "0,1", "prefill": "0", "decode": "1"}
"""Of this machine, by node type."""
REASON_WITHIN_S = 90.0
READY_WITHIN_S = 420.0


class Cluster:
    """The cluster of deploy/cluster.yaml, and the shell that the commands of docs/how-to/deploy.md are typed into."""

    def __init__(self, shell: OperatorsShell, ec2: Ec2) -> None:
        self.shell, self.ec2 = shell, ec2

    def documented(self, beginning: str) -> str:
        """Run the page's command that begins so."""
        return self.shell.run(documented("AWS", beginning))

    def on_head(self, command: str, *, fails: bool = False) -> str:
        """Run a command on the head as the operator does there."""
        return self.shell.run(f"ray exec deploy/cluster.yaml {shlex.quote(command)}", fails=fails)

    @property
    def head(self) -> Host:
        """The host of the head."""
        return self.ec2.hosts_of("head")[-1]

    @property
    def url(self) -> str:
        """Where the deployment says that it serves."""
        return re.findall(r"^ready: (http://\S+)/v1", self.shell.output, re.MULTILINE)[-1]

    @property
    def worker_addresses(self) -> list[str]:
        """The data plane of the first worker of prefill, then decode, as `serve` prints it."""
        rows = [line for line in self.shell.output.splitlines() if re.match(r"│ worker-\d", line)]
        return [
            re.findall(r"[\d.]+:\d+", next(row for row in rows if re.search(rf"│ {pool} +│", row)))[0]
            for pool in ("prefill", "decode")
        ]


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hosts-"))  # pytest's own is too long for a path of a socket
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def network(folder: Path) -> Iterator[Network]:
    """Tests of this folder run in it: nothing that they do reaches another machine."""
    try:
        with Network(folder, [ADDRESS + PREFIX, f"{METADATA_ADDRESS}/32", "10.0.0.254/24"], [PUBLIC]) as network:
            make_environment(network.environment, network.home)
            yield network
    except CannotMakeHosts as why:
        pytest.skip(str(why))
    assert left() == []


@pytest.fixture(scope="session")
def models() -> Path:
    """What a host has in its user's cache."""
    return prepare_model(DEFAULT_MODEL_NAME).parents[1]


@pytest.fixture(scope="session")
def ec2(network: Network, folder: Path, models: Path) -> Iterator[Ec2]:
    """An account of AWS without anything in it."""

    def make_host(name: str, addresses: list[str], node_type: str) -> Host:
        host = Host(network, name, addresses, CORES[node_type], f"AWS_ENDPOINT_URL={cloud.endpoint}")
        host.prepare("" if node_type in cloud.locked else cloud.public_keys, PROGRAMS)
        host.has_environment(models)
        if node_type in cloud.broken:
            (host.folder / "home" / FAILS).touch()
        host.make()
        return host

    with Ec2(make_host) as cloud:
        yield cloud
        assert cloud.failures == []


@pytest.fixture(scope="session")
def shell(ec2: Ec2, folder: Path) -> Iterator[OperatorsShell]:
    """A shell with the credentials of that account."""
    variables = {
        "AWS_ENDPOINT_URL": ec2.endpoint,
        "AWS_ACCESS_KEY_ID": OPERATORS_KEY,
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": REGION,
    }
    shell = OperatorsShell(folder, variables)
    yield shell
    shell.end_all()


@pytest.fixture(scope="session")
def launching(shell: OperatorsShell, ec2: Ec2, folder: Path) -> tuple[Cluster, Running]:
    """The cluster as `serve` begins there: EC2 has no GPU machine, and the head's role may not ask for one."""
    cluster = Cluster(shell, ec2)
    ec2.calls.clear()  # with them, the policy that other tests have attached
    ec2.locked.clear()
    ec2.no_capacity_of.add("p5.48xlarge")
    for beginning in ("pip install", "ray get-auth-token", "ray up"):
        cluster.documented(beginning)
    served = write_served_file(folder)
    shell.run(f"ray rsync-up deploy/cluster.yaml {served} '~/ridgeline/{SERVED}'")
    return cluster, shell.begin(documented("AWS", "ray exec deploy/cluster.yaml 'cd "))


@pytest.fixture(scope="session")
def cluster(launching: tuple[Cluster, Running]) -> Cluster:
    """The cluster, serving."""
    cluster, serve = launching
    serve.wait_for(lambda text: "ssm:GetParameters" in text, REASON_WITHIN_S)
    cluster.documented("aws iam")
    serve.wait_for(lambda text: "InsufficientInstanceCapacity" in text, REASON_WITHIN_S)
    cluster.ec2.no_capacity_of.clear()
    serve.wait_for(lambda text: re.search(r"^ready: ", text, re.MULTILINE), READY_WITHIN_S)
    cluster.shell.took_s["serve"] = serve.wait(60)
    return cluster


def write_served_file(folder: Path) -> Path:
    """Write what takes the place of deploy/cluster-serve.yaml: the default model, one engine a node, on a core."""
    engine = {"workers": 1, "cores_per_worker": 1, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": "512 MiB"}
    served = {
        "model": {"path": DEFAULT_MODEL_NAME},
        "server": {"host": "0.0.0.0", "port": 8000, "drain_timeout_s": DRAIN_S},
        "pools": {
            "prefill": {**engine, "max_num_seqs": 16, "resources": {"ridgeline_prefill": 8}},
            "decode": {**engine, "max_num_seqs": 16, "resources": {"ridgeline_decode": 8}},
        },
        "router": {**yaml.safe_load((REPOSITORY / SERVED).read_text())["router"], "processes": 2},  # as with GPUs: auto
    }
    path = folder / "cluster-serve.yaml"
    path.write_text(yaml.safe_dump(served))
    return path


def wait_until(condition: Callable[[], object], within_s: float, what: str) -> None:
    """Look four times a second."""
    give_up_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_s, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.25)
