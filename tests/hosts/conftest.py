"""One cluster for all tests of this folder: `ray up` on three hosts, the head, a prefill and a decode worker."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.cluster.model_store import DEFAULT_MODEL_NAME, prepare_model
from tests.hosts.cluster_file import CLUSTER, REPOSITORY, SERVED, remote_name, write_cluster_file, write_served_file
from tests.hosts.namespaces import CannotMakeHosts, Hosts

COMMAND_WITHIN_S = 900.0
"""Five processes import vLLM there, which a busy machine takes minutes for."""
DRAIN_S = 5.0


class Cluster:
    """The hosts, and the operator's shell that the commands of docs/how-to/deploy.md are typed into."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.head, self.prefill, self.decode = hosts.all
        self.served = write_served_file(hosts, DRAIN_S)
        self.file = write_cluster_file(hosts, self.head, {"prefill": self.prefill, "decode": self.decode}, self.served)
        home = hosts.folder / "operator"
        home.mkdir()
        path = f"{REPOSITORY}/.venv/bin:{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._environment = {**kept, "HOME": str(home), "PATH": path, "COLUMNS": "250"}
        self.took_s: dict[str, float] = {}
        """Seconds of each command so far, by its first two words."""
        self.output = ""
        """What the commands have printed."""

    def shell(self, command: str) -> str:
        """Run a command of the operator's in the repository, as `source .venv/bin/activate` leaves the shell."""
        began_s = time.monotonic()
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=REPOSITORY,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_WITHIN_S,
        )
        self.took_s[" ".join(command.split()[:2])] = time.monotonic() - began_s
        self.output += ran.stdout
        assert ran.returncode == 0, f"{command} ended with {ran.returncode}:\n{ran.stdout[-6000:]}"
        return ran.stdout

    def documented(self, beginning: str) -> str:
        """Run the page's command that begins so, with the files of these hosts in place of those it names."""
        (command,) = [line for line in documented_commands() if line.startswith(beginning)]
        return self.shell(command.replace(SERVED, remote_name(self.served)).replace(CLUSTER, str(self.file)))

    def on_head(self, command: str) -> str:
        """Run a command on the head as the operator does there."""
        return self.shell(f"ray exec {self.file} {shlex.quote(command)}")

    @property
    def url(self) -> str:
        """Where the deployment says that it serves."""
        return re.findall(r"^ready: (http://\S+)/v1", self.output, re.MULTILINE)[-1]

    @property
    def worker_addresses(self) -> list[str]:
        """The data plane of prefill, then decode, as `serve` prints it."""
        return [
            re.findall(rf"│ {pool}\s+│.*?({host.address}:\d+)", self.output)[-1]
            for pool, host in (("prefill", self.prefill), ("decode", self.decode))
        ]


def documented_commands() -> list[str]:
    """Return the lines of the page's code blocks, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (REPOSITORY / "docs/how-to/deploy.md").read_text(), re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, serving; each part is left to a test of its own to judge."""
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))  # pytest's own is too long for a path of a socket
    models = prepare_model(DEFAULT_MODEL_NAME).parents[1]
    try:
        with Hosts(folder, cores=["0,1", "0", "1"]) as hosts:
            cluster = Cluster(hosts)
            for host in hosts.all:
                host.has_environment(REPOSITORY / ".venv", None if host is cluster.decode else models)
            cluster.documented("ray get-auth-token")
            cluster.documented("ray up")
            cluster.documented("ray exec deploy/cluster-onprem.yaml 'cd ")
            yield cluster
        assert hosts.left() == []
    except CannotMakeHosts as why:
        pytest.skip(str(why))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(condition, within_s: float, what: str) -> None:
    """Look four times a second."""
    give_up_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_s, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.25)
