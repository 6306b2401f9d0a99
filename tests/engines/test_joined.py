"""`ridgeline serve --address`: a Ray cluster that runs already is joined and left as it was.

It has one node, or an autoscaler that starts raylets of this machine where it would start machines of a cloud.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_TYPE

from tests.engines.serve_process import (
    GONE_WITHIN_S,
    REPOSITORY,
    START_WITHIN_S,
    body,
    descendants,
    name_of,
    serving,
    still_there,
    words_of,
)
from tests.engines.test_processes import ONE_REPLICA
from tests.support.free_port import free_port
from tests.support.symptoms import is_quoted

RAY = Path(sys.executable).parent / "ray"
HEAD_WITHIN_S = 60.0
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 100_000_000


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for Ray, whose sockets' paths must not be longer than 107 characters."""
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def cloud_without_machines(address: str) -> dict[str, Any]:
    """What Ray's autoscaler reads: the node types of deploy/cluster.yaml, none of which runs before it is needed."""
    types = yaml.safe_load((REPOSITORY / "deploy/cluster.yaml").read_text())["available_node_types"]
    types[FAKE_HEAD_NODE_TYPE] = types.pop("head")
    for node_type in types.values():
        node_type["min_workers"] = 0
        node_type["node_config"] = {}
        node_type["resources"]["object_store_memory"] = OBJECT_STORE_BYTES
    return {
        "cluster_name": "fake",
        "provider": {"type": "fake_multinode", "gcs_address": address, "disable_node_updaters": True},
        "available_node_types": types,
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "max_workers": 8,
        "idle_timeout_minutes": 60,
        # What `ray up` fills in; nothing of it is used for raylets of this machine.
        "upscaling_speed": 1.0,
        "auth": {"ssh_user": "nobody"},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{step}_commands": [] for step in ("initialization", "setup", "head_setup", "worker_setup")},
        **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
    }


@contextmanager
def ray_head(folder: Path, *, autoscaled: bool = False) -> Iterator[tuple[str, psutil.Process]]:
    """Run a Ray cluster of one node; yield its address and its process.

    With `autoscaled` that node has the router's place only, and Ray's autoscaler looks every second what is missing.
    """
    port = free_port()
    options = ["--node-ip-address=127.0.0.1", f"--port={port}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    options += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}", "--block"]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    if autoscaled:
        path = folder / "cloud.yaml"
        path.write_text(yaml.safe_dump(cloud_without_machines(f"127.0.0.1:{port}")))
        options += ["--num-cpus=0", '--resources={"ridgeline_router": 1}', f"--autoscaling-config={path}"]
        env |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "0"}
    else:
        options += ["--num-cpus=2"]
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


def node_types(address: str) -> list[str]:
    """The types of the nodes that Ray's autoscaler has started: "uninitialized", as no ssh leads there."""
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    told = subprocess.run(
        [str(RAY), "status", f"--address={address}"], env=env, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    return sorted(re.findall(r"^ [0-9a-f]{56}: (\w+), uninitialized$", told, re.MULTILINE))


@pytest.mark.long
def test_serve_waits_for_the_nodes_that_the_autoscaler_starts_for_it_and_leaves_no_process_of_ours(short_folder: Path):
    pools = ("--set", "pools.prefill.resources={ridgeline_prefill: 1}")
    pools += (
        "--set",
        "pools.decode.resources={ridgeline_decode: 1}",
        "--set",
        "router.resources={ridgeline_router: 1}",
    )
    with ray_head(short_folder, autoscaled=True) as (address, head):
        wait_answers(address, head)
        everywhere = ("--host", "0.0.0.0", "--set", "transfer.host=127.0.0.0/8")
        with serving("--address", address, *everywhere, *pools) as serve:
            serve.wait_said("placing 2 workers and the router", START_WITHIN_S)
            url = serve.wait_ready()
            assert node_types(address) == ["decode", "prefill"], "one machine of each type, and each for a demand"
            assert sorted(row.cores for row in serve.table().values()) == ["0", "1"], "nodes of one machine"
            assert urlsplit(url).hostname != "0.0.0.0", "no client can use that"
            assert f" {LOOPBACK}:" in serve.output, "the workers' data plane is in the network of transfer.host"
            reply = httpx.post(f"{url}/v1/completions", json=body(5), timeout=120)
            assert reply.json()["usage"]["completion_tokens"] == 5
            ours = [
                psutil.Process(pid)
                for worker in serve.table().values()
                for pid in (worker.actor_pid, *worker.engine_pids)
            ]
            serve.process.send_signal(signal.SIGINT)
            assert serve.wait_exit() == 0, serve.output
        assert still_there(ours, GONE_WITHIN_S) == []
        assert head.is_running()


def test_two_deployments_on_one_ray_have_cores_and_a_name_of_their_own(
    short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: dict[str, str]
):
    with ray_head(short_folder) as (address, head):
        wait_answers(address, head)
        joined = ("--address", address, *ONE_REPLICA, *words_of(small_model))
        with serving(*joined, "--name", "first") as first:
            urls = [first.wait_ready()]
            monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # as on another machine of the cluster
            briefly = ("--set", "ray.placement_timeout_s=12")
            with serving(*joined, "--name", "first") as refused, serving(*joined, "--name", "second") as second:
                assert refused.wait_exit() == 1
                assert "a deployment named 'first' runs on this Ray cluster already" in refused.output
                assert is_quoted(refused.output)
                second.wait_said("loading the engine", START_WITHIN_S)  # so it has its core, the last one
                with serving(*joined, "--name", "third", *briefly) as third:
                    urls.append(second.wait_ready())
                    cores = [row.cores for serve in (first, second) for row in serve.table().values()]
                    assert sorted(cores) == ["0", "1"]
                    assert third.wait_exit() == 1
                    waits = [line for line in third.lines if "waiting for Ray to place worker-0" in line]
                    assert waits
                    assert is_quoted(third.output), third.output
                for url in urls:
                    reply = httpx.post(f"{url}/v1/completions", json=body(5), timeout=120)
                    assert reply.json()["usage"]["completion_tokens"] == 5
