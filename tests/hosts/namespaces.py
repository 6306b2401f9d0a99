"""Hosts made of namespaces: each has a network, processes, a home, a hostname, Ray's folder and an sshd of its own.

They share this machine's file system otherwise, so the installed environment need not be copied. Root is needed, and is
what their user `ubuntu` is by another name. Nothing leads out of their network, which is a namespace too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

NETWORK = f"ridgeline-{os.getpid()}"
"""Its namespace; those of the hosts begin so too."""
BRIDGE = "bridge"
USER = "ubuntu"
BRIDGE_ADDRESS = "02:00:00:00:77:fe"
MISSING = {"ip": "iproute2", "sshd": "openssh-server", "ssh-keygen": "openssh-client", "rsync": "rsync"}
UP_WITHIN_S = 30.0
SSH_OPTIONS = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=10")
NET_NAMESPACE = 0x40000000
"""CLONE_NEWNET of <sched.h>."""
CONNECTIONS = f"/tmp/ray_ssh_{hashlib.sha256(USER.encode()).hexdigest()[:10]}"
"""Where Ray's launcher on a host keeps its ssh connections, by address, to use them again within ten seconds."""
PROGRAMS = "/usr/local/sbin"
"""First in the PATH of a login shell, and empty on Debian and Ubuntu: where hosts have programs of their own."""

ENTERED = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
mkdir -p /tmp/ray {connections}
mount --bind {folder}/ray /tmp/ray
mount --bind {folder}/connections {connections}
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/home {home}
mount --bind {folder}/programs {programs}
hostname {name}
exec taskset -c {cores} /usr/sbin/sshd -D -e -o ListenAddress=0.0.0.0 -o HostKey={folder}/host_key \
    -o AuthorizedKeysFile={folder}/authorized_keys -o PidFile=none -o StrictModes=no -o UsePAM=no \
    -o PermitRootLogin=yes -o MaxStartups=100 {environment}
"""
"""What runs inside a host's namespaces, as their process 1."""


class CannotMakeHosts(Exception):
    """Why there can be no hosts here, and what would help."""


class Host:
    """One of them; its addresses are with their prefixes, and the first one is that which others know it by."""

    def __init__(
        self,
        network: Network,
        name: str,
        addresses: Sequence[str],
        cores: str = "0-1023",
        environment: str = "",
    ) -> None:
        self.name = name
        self.addresses = list(addresses)
        self.address = addresses[0].partition("/")[0]
        self.folder = network.folder / f"{name}-{len(network.hosts)}"
        self._network = network
        self._space = f"{NETWORK}-{len(network.hosts)}"
        self._cable = f"host{len(network.hosts)}"
        self._cores = cores
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        network.hosts.append(self)

    def prepare(self, authorized_keys: str, programs: dict[str, str]) -> None:
        """Give it its folders: a home as on a new machine, who is let in, and programs that this machine may lack."""
        for part in ("ray", "connections", "home/.ssh", "programs"):
            (self.folder / part).mkdir(parents=True)
        users = Path("/etc/passwd").read_text().splitlines()
        ours = [f"{name}:x:0:0:{name}:{self._network.home}:/bin/bash" for name in (USER, "root")]
        others = [line for line in users if line.partition(":")[0] not in (USER, "root")]
        (self.folder / "passwd").write_text("\n".join([*ours, *others]) + "\n")
        for skeleton in Path("/etc/skel").glob(".*"):
            shutil.copy(skeleton, self.folder / "home")
        self.let_in(authorized_keys)
        for name, script in programs.items():
            program = self.folder / "programs" / name
            program.write_text(script)
            program.chmod(0o755)
        _run(f"ssh-keygen -q -t ed25519 -N '' -f {self.folder}/host_key")

    def let_in(self, authorized_keys: str) -> None:
        """Let in who has one of these keys, and this process."""
        own_key = self._network.key.with_suffix(".pub").read_text()
        (self.folder / "authorized_keys").write_text(f"{own_key}\n{authorized_keys}\n")

    def make(self) -> None:
        """Lay its cable and start its sshd."""
        _run(f"ip netns add {self._space}")
        _run(f"ip link add {self._cable} type veth peer name eth0 netns {self._space}")
        _run(f"ip link set {self._cable} master {BRIDGE} up")
        for address in self.addresses:
            _run(f"ip -n {self._space} addr add {address} dev eth0")
        for device in ("lo", "eth0"):
            _run(f"ip -n {self._space} link set {device} up")
        # Without a way out Ray takes 127.0.0.1 for the address of its node.
        _run(f"ip -n {self._space} route add default dev eth0 src {self.address}")
        script = ENTERED.format(
            name=self.name,
            cores=self._cores,
            folder=self.folder,
            home=self._network.home,
            programs=PROGRAMS,
            connections=CONNECTIONS,
            environment=f"-o 'SetEnv={self._environment}'" if self._environment else "",
        )
        with (self.folder / "sshd.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._space),
                    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts"),
                    *("bash", "-c", script),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"PATH": os.environ["PATH"]},
            )

    def has_environment(self, models: Path | None) -> None:
        """Let its copy of the repository be set up already, and its user have these prepared models."""
        (self.folder / "home/ridgeline").mkdir()
        (self.folder / "home/ridgeline/.venv").symlink_to(self._network.environment)
        if models is not None:
            (self.folder / "home/.cache").mkdir()
            (self.folder / "home/.cache/ridgeline").symlink_to(models)

    def wait_answers(self) -> None:
        """Until its sshd lets us in."""
        give_up_s = time.monotonic() + UP_WITHIN_S
        while (tried := self.ssh("true", check=False)).returncode:
            log = (self.folder / "sshd.log").read_text()
            assert time.monotonic() < give_up_s, f"{self.name}: {tried.stderr}\n{log}"
            time.sleep(0.2)

    def ssh(self, command: str, *, timeout_s: float = 60.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command there as its user does, in a login shell."""
        options = [word for option in SSH_OPTIONS for word in ("-o", option)]
        return subprocess.run(
            ["ssh", *options, "-i", str(self._network.key), f"{USER}@{self.address}", command],
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
        _run(f"ip link set {self._cable} nomaster")

    def join_again(self) -> None:
        """After it was cut off."""
        _run(f"ip link set {self._cable} master {BRIDGE}")

    def kill(self) -> None:
        """The host is gone, as without power: its cable is dead, and no process of it runs."""
        with suppress(subprocess.CalledProcessError):
            _run(f"ip link del {self._cable}")
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
        with suppress(subprocess.CalledProcessError):
            _run(f"ip netns del {self._space}")

    @property
    def runs(self) -> bool:
        """Whether it was made, and not killed."""
        return self._process is not None


class Network:
    """`with Network(folder, addresses, routes) as network`: this process is in it, and afterwards nothing is left.

    `addresses` are those that this process has there, `routes` what else it reaches.
    """

    def __init__(self, folder: Path, addresses: Sequence[str], routes: Sequence[str] = ()) -> None:
        self.folder = folder
        self.key = folder / "key"
        self.home = folder / "home"
        """The home of the hosts' user: the same path on each, with a content of its own."""
        self.environment = folder / "environment"
        """What `make setup` makes on a host: this environment's packages, with the code that the host has."""
        self.hosts: list[Host] = []
        self._addresses, self._routes = addresses, routes
        self._undo = ExitStack()

    def __enter__(self) -> Network:
        if os.geteuid() != 0:
            raise CannotMakeHosts("namespaces need root: run as root")
        missing = [
            package for command, package in MISSING.items() if not shutil.which(command, path="/usr/sbin:/usr/bin")
        ]
        if missing:
            raise CannotMakeHosts(f"install Debian's {', '.join(missing)}")
        self.home.mkdir()
        Path("/run/sshd").mkdir(exist_ok=True)
        _run(f"ssh-keygen -q -t ed25519 -N '' -f {self.key}")
        with ExitStack() as undo:
            try:
                _run(f"ip netns add {NETWORK}")
                undo.callback(_run, f"ip netns del {NETWORK}")
                undo.enter_context(_inside(Path("/run/netns", NETWORK)))
                _run("ip link set lo up")
                # Else it takes the lowest address of its cables, and another one when such a cable is cut or laid
                # again: what the hosts then send to the former one is dropped for a minute or two.
                _run(f"ip link add {BRIDGE} address {BRIDGE_ADDRESS} type bridge")
                for address in self._addresses:
                    _run(f"ip addr add {address} dev {BRIDGE}")
                _run(f"ip link set {BRIDGE} up")
                for route in self._routes:
                    _run(f"ip route add {route} dev {BRIDGE}")
            except (subprocess.CalledProcessError, OSError) as error:
                why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
                raise CannotMakeHosts(f"{why}: a container needs NET_ADMIN and SYS_ADMIN") from error
            undo.callback(self._kill_all)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _kill_all(self) -> None:
        for host in self.hosts:
            host.kill()


class _inside:
    """This thread, and those that it starts, in another network."""

    def __init__(self, namespace: Path) -> None:
        self._namespace = namespace
        self._before = -1

    def __enter__(self) -> None:
        self._before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(self._namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(there)
        finally:
            os.close(there)

    def __exit__(self, *_: object) -> None:
        _setns(self._before)
        os.close(self._before)


def _setns(descriptor: int) -> None:
    """What `os.setns` does from Python 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, NET_NAMESPACE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def left() -> list[str]:
    """Return the names of namespaces that are still there."""
    return [name for name in _run("ip netns list").split() if name.startswith(NETWORK)]


def _run(command: str) -> str:
    return subprocess.run(shlex.split(command), check=True, capture_output=True, text=True, timeout=30).stdout
