"""`ridgeline serve --address`: a Ray cluster that runs already, here of one node, is joined and left as it was."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.engines.serve_process import GONE_WITHIN_S, body, descendants, name_of, serving, still_there
from tests.engines.test_processes import ONE_REPLICA

RAY = Path(sys.executable).parent / "ray"
HEAD_WITHIN_S = 60.0
LOOPBACK = "127.0.0.1"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for Ray, whose sockets' paths must not be longer than 107 characters."""
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def ray_head(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run a Ray cluster of one node; yield its address and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2", "--object-store-memory=100000000"]
    options += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}", "--block"]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen([str(RAY), "start", "--head", *options], env=env, stdout=subprocess.DEVNULL)
    head = psutil.Process(process.pid)
    try:
        yield f"127.0.0.1:{port}", head
    finally:
        family = [head, *descendants(head.pid)]
        for member in family:
            with suppress(psutil.NoSuchProcess):  # Ray's processes end one another
                member.kill()
        process.wait(10)
        assert still_there(family, GONE_WITHIN_S) == []


def wait_answers(address: str, head: psutil.Process) -> None:
    """Until the cluster's control store can be reached."""
    host, _, port = address.partition(":")
    give_up_s = time.monotonic() + HEAD_WITHIN_S
    while time.monotonic() < give_up_s and head.is_running():
        with socket.socket() as trial:
            answers = trial.connect_ex((host, int(port))) == 0
        if answers and any("raylet" in name_of(process) for process in descendants(head.pid)):
            return
        time.sleep(0.2)
    raise AssertionError("Ray's head did not start")


def test_a_ray_that_runs_already_is_joined_and_left_without_a_process_of_ours(short_folder: Path):
    with ray_head(short_folder) as (address, head):
        wait_answers(address, head)
        everywhere = ("--host", "0.0.0.0", "--set", "transfer.host=127.0.0.0/8")
        with serving("--address", address, *everywhere, *ONE_REPLICA) as serve:
            url = serve.wait_ready()
            assert urlsplit(url).hostname != "0.0.0.0", "no client can use that"
            assert f" {LOOPBACK}:" in serve.output, "the worker's data plane is in the network of transfer.host"
            reply = httpx.post(f"{url}/v1/completions", json=body(5), timeout=60)
            assert reply.json()["usage"]["completion_tokens"] == 5
            (worker,) = serve.table().values()
            ours = [psutil.Process(pid) for pid in (worker.actor_pid, *worker.engine_pids)]
            serve.process.send_signal(signal.SIGINT)
            assert serve.wait_exit(60) == 0, serve.output
        assert still_there(ours, GONE_WITHIN_S) == []
        assert head.is_running()


def test_two_deployments_on_one_ray_have_cores_and_a_name_of_their_own(
    short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with ray_head(short_folder) as (address, head):
        wait_answers(address, head)
        joined = ("--address", address, *ONE_REPLICA)
        with serving(*joined, "--name", "first") as first:
            urls = [first.wait_ready()]
            monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # as on another machine of the cluster
            with serving(*joined, "--name", "first") as refused:
                assert refused.wait_exit(60) == 1
                assert "a deployment named 'first' runs on this Ray cluster already" in refused.output
            with serving(*joined, "--name", "second") as second:
                urls.append(second.wait_ready())
                cores = [row.cores for serve in (first, second) for row in serve.table().values()]
                assert sorted(cores) == ["0", "1"]
                for url in urls:
                    reply = httpx.post(f"{url}/v1/completions", json=body(5), timeout=60)
                    assert reply.json()["usage"]["completion_tokens"] == 5
