"""Two network namespaces of this machine, joined by a cable of 1 Gbit/s; each has room for one process."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
RATE_BYTES_S = 125_000_000
SHAPING = "tbf rate 1gbit burst 256kb latency 50ms"
SLOW = "tbf rate 100mbit burst 256kb latency 50ms"
SILENCE = "bfifo limit 1"  # no packet fits into a queue of one byte: all are dropped
HOSTS = ("10.213.0.1", "10.213.0.2")


class CannotLink(Exception):
    """Why there can be no namespaces here, and what would help."""


class Link:
    """`with Link() as link`: both ends are up; afterwards nothing is left."""

    def __init__(self):
        self._names = [f"ridgeline-{os.getpid()}-{side}" for side in "ab"]

    def __enter__(self):
        if os.geteuid() != 0:
            raise CannotLink("network namespaces need root: run as root")
        if not (shutil.which("ip") and shutil.which("tc")):
            raise CannotLink("`ip` and `tc` are missing: install Debian's iproute2")
        try:
            for name in self._names:
                _run(f"ip netns add {name}")
            left, right = self._names
            _run(f"ip link add cable netns {left} type veth peer name cable netns {right}")
            for name, host in zip(self._names, HOSTS, strict=True):
                _run(f"ip -n {name} addr add {host}/30 dev cable")
                _run(f"tc -n {name} qdisc add dev cable root {SHAPING}")
                for device in ("lo", "cable"):
                    _run(f"ip -n {name} link set {device} up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise CannotLink(
                f"`{' '.join(error.cmd)}` failed ({error.stderr.strip()}): a container needs NET_ADMIN and SYS_ADMIN"
            ) from error
        return self

    def __exit__(self, *_):
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                _run(f"ip netns del {name}")

    def slow_down(self):
        """A hand-off then takes seconds: far longer than it takes to cut the link in its middle."""
        for name in self._names:
            _run(f"tc -n {name} qdisc replace dev cable root {SLOW}")

    def pull_out(self):
        """Both hosts see that the cable is dead."""
        _run(f"ip -n {self._names[0]} link set cable down")

    def silence(self):
        """Nothing arrives any more, and nobody is told."""
        for name in self._names:
            _run(f"tc -n {name} qdisc replace dev cable root {SILENCE}")

    def mend(self):
        """After any of these."""
        for name in self._names:
            _run(f"tc -n {name} qdisc replace dev cable root {SHAPING}")
            _run(f"ip -n {name} link set cable up")

    def received_bytes(self, side):
        """By this end of the cable so far."""
        shown = json.loads(_run(f"ip -n {self._names[side]} -json -statistics link show dev cable"))
        return shown[0]["stats64"]["rx"]["bytes"]

    @asynccontextmanager
    async def peer(self, side, kv_fetch_timeout_s=30.0):
        """A process at this end, see `peer.py`."""
        process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", self._names[side], sys.executable, "-m", "tests.network.peer"),
            *(HOSTS[side], str(kv_fetch_timeout_s)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "GRPC_VERBOSITY": "ERROR", "PYTHONFAULTHANDLER": "1"},
        )
        try:
            line = await asyncio.wait_for(process.stdout.readline(), 120)
            assert line == b"ready\n", "the peer did not start; its error stands above"
            yield PeerHandle(process)
        finally:
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.send_signal(signal.SIGABRT)  # Python then tells where each thread is
                await process.wait()
                pytest.fail("a peer did not end within 20 s of being told to; its stacks stand above")


class PeerHandle:
    """Asks a peer; every answer has a deadline."""

    def __init__(self, process):
        self._process = process

    async def ask(self, command, *arguments, timeout_s=60.0):
        self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        await self._process.stdin.drain()
        answer = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        assert answer, f"the peer ended at {command}; its error stands above"
        return json.loads(answer)


def _run(command):
    return subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=30).stdout
