"""Hosts made of namespaces: each has a network, processes, a home, a hostname, Ray's folder and an sshd of its own.

They share this machine's file system otherwise, so the installed environment need not be copied. Root is needed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

NETWORK = "10.77.3"
BRIDGE = "ridgeline77"
BRIDGE_ADDRESS = "02:00:00:00:77:fe"
GATEWAY = f"{NETWORK}.254"
MISSING = {"ip": "iproute2", "sshd": "openssh-server", "ssh-keygen": "openssh-client", "rsync": "rsync"}
UP_WITHIN_S = 30.0
SSH_OPTIONS = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=10")

ENTERED = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
mkdir -p /tmp/ray && mount --bind {folder}/ray /tmp/ray
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/home {home}
hostname {name}
exec taskset -c {cores} /usr/sbin/sshd -D -e -o ListenAddress={address} -o HostKey={folder}/host_key \
    -o AuthorizedKeysFile={key}.pub -o PidFile=none -o StrictModes=no -o UsePAM=no -o PermitRootLogin=yes \
    -o MaxStartups=100
"""
"""What runs inside a host's namespaces, as their process 1."""


class CannotMakeHosts(Exception):
    """Why there can be no hosts here, and what would help."""


class Host:
    """One of them."""

    def __init__(self, hosts: Hosts, number: int, cores: str) -> None:
        self.name = f"host{number}"
        self.address = f"{NETWORK}.{number}"
        self.cable = f"ridgeline77-{number}"
        self.folder = hosts.folder / self.name
        self._hosts = hosts
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        """Lay its cable and start its sshd."""
        for part in ("ray", "home"):
            (self.folder / part).mkdir(parents=True)
        users = Path("/etc/passwd").read_text().splitlines()
        root = f"root:x:0:0:root:{self._hosts.home}:/bin/bash"
        (self.folder / "passwd").write_text("\n".join([root, *(u for u in users if not u.startswith("root:"))]) + "\n")
        _run(f"ssh-keygen -q -t ed25519 -N '' -f {self.folder}/host_key")
        _run(f"ip netns add {self.cable}")
        _run(f"ip link add {self.cable} type veth peer name eth0 netns {self.cable}")
        _run(f"ip link set {self.cable} master {BRIDGE} up")
        _run(f"ip -n {self.cable} addr add {self.address}/24 dev eth0")
        for device in ("lo", "eth0"):
            _run(f"ip -n {self.cable} link set {device} up")
        # Without a way out Ray takes 127.0.0.1 for the address of its node.
        _run(f"ip -n {self.cable} route add default via {GATEWAY}")
        places = {"folder": self.folder, "home": self._hosts.home, "key": self._hosts.key}
        script = ENTERED.format(name=self.name, address=self.address, cores=self._cores, **places)
        with (self.folder / "sshd.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.cable),
                    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts"),
                    *("bash", "-c", script),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HF_", "VLLM_"))
                },
            )

    def has_environment(self, venv: Path, models: Path | None) -> None:
        """Let its copy of the repository have this environment, and its user these prepared models."""
        (self.folder / "home/ridgeline").mkdir()
        (self.folder / "home/ridgeline/.venv").symlink_to(venv)
        if models is not None:
            (self.folder / "home/.cache").mkdir()
            (self.folder / "home/.cache/ridgeline").symlink_to(models)

    def wait_answers(self) -> None:
        """Until its sshd lets us in."""
        give_up_s = time.monotonic() + UP_WITHIN_S
        while (tried := self.ssh("true", check=False)).returncode:
            assert time.monotonic() < give_up_s, (
                f"{self.name}: {tried.stderr}\n{(self.folder / 'sshd.log').read_text()}"
            )
            time.sleep(0.2)

    def ssh(self, command: str, *, timeout_s: float = 60.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command there as its user does, in a login shell."""
        options = [word for option in SSH_OPTIONS for word in ("-o", option)]
        return subprocess.run(
            ["ssh", *options, "-i", str(self._hosts.key), f"root@{self.address}", command],
            check=check,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def processes(self) -> list[str]:
        """Return the command lines that run there, without sshd's and the question's own."""
        lines = self.ssh("ps -eo args=").stdout.splitlines()
        return [line for line in lines if not line.startswith(("sshd:", "/usr/sbin/sshd", "ps ", "bash -c ps"))]

    def cut_off(self) -> None:
        """Nothing reaches it or leaves it, and nobody is told."""
        _run(f"ip link set {self.cable} nomaster")

    def join_again(self) -> None:
        """After it was cut off."""
        _run(f"ip link set {self.cable} master {BRIDGE}")

    def kill(self) -> None:
        """The host is gone, as without power: its cable is dead, and no process of it runs."""
        with suppress(subprocess.CalledProcessError):
            _run(f"ip link del {self.cable}")
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
        with suppress(subprocess.CalledProcessError):
            _run(f"ip netns del {self.cable}")


class Hosts:
    """`with Hosts(folder, cores) as hosts`: all of them let us in; afterwards nothing is left.

    `cores` says for each host which cores of this machine it has.
    """

    def __init__(self, folder: Path, cores: list[str]) -> None:
        self.folder = folder
        self.key = folder / "key"
        self.home = folder / "home"
        """The home of the hosts' user: the same path on each, with a content of its own."""
        self.all = [Host(self, number, its_cores) for number, its_cores in enumerate(cores, start=1)]

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0:
            raise CannotMakeHosts("namespaces need root: run as root")
        missing = [
            package for command, package in MISSING.items() if not shutil.which(command, path="/usr/sbin:/usr/bin")
        ]
        if missing:
            raise CannotMakeHosts(f"install Debian's {', '.join(missing)}")
        self.home.mkdir()
        Path("/run/sshd").mkdir(exist_ok=True)
        try:
            _run(f"ssh-keygen -q -t ed25519 -N '' -f {self.key}")
            # Else it takes the lowest address of its cables, and another one when such a cable is cut or laid again:
            # what the hosts then send to the former one is dropped for a minute or two.
            _run(f"ip link add {BRIDGE} address {BRIDGE_ADDRESS} type bridge")
            _run(f"ip addr add {GATEWAY}/24 dev {BRIDGE}")
            _run(f"ip link set {BRIDGE} up")
            for host in self.all:
                host.make()
            for host in self.all:
                host.wait_answers()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise CannotMakeHosts(
                f"`{' '.join(error.cmd)}` failed ({error.stderr.strip()}): a container needs NET_ADMIN and SYS_ADMIN"
            ) from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.all:
            host.kill()
        with suppress(subprocess.CalledProcessError):
            _run(f"ip link del {BRIDGE}")

    def left(self) -> list[str]:
        """Return the names of links and namespaces that are still there."""
        links = json.loads(_run("ip -json link show"))
        spaces = json.loads(_run("ip -json netns list") or "[]")
        ours = {BRIDGE, *(host.cable for host in self.all)}
        return sorted(ours & {one[key] for listed, key in ((links, "ifname"), (spaces, "name")) for one in listed})


def _run(command: str) -> str:
    return subprocess.run(shlex.split(command), check=True, capture_output=True, text=True, timeout=30).stdout
