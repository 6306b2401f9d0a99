"""`ridgeline serve --address`: a Ray cluster that runs already is joined and left as it was.

It has one node, or an autoscaler that starts raylets of this machine where it would start machines of a cloud.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.engines.serve_process import (
    GONE_WITHIN_S,
    RIDGELINE,
    START_WITHIN_S,
    body,
    serving,
    still_there,
    words_of,
)
from tests.engines.test_processes import ONE_REPLICA
from tests.support.free_port import free_port
from tests.support.joined_ray import OPEN, RAY, autoscaled, ray_head
from tests.support.symptoms import is_quoted

LOOPBACK = "127.0.0.1"


def node_types(address: str) -> list[str]:
    """The types of the nodes that Ray's autoscaler has started: "uninitialized", as no ssh leads there."""
    env = {**os.environ, **OPEN}
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
        "--set",
        "router.processes=2",
    )
    port = free_port()
    options, environment = autoscaled(short_folder, port)
    with ray_head(short_folder, port, *options, environment=environment) as head:
        address = f"127.0.0.1:{port}"
        everywhere = ("--host", "0.0.0.0", "--set", "transfer.host=127.0.0.0/8")
        with serving("--address", address, *everywhere, *pools) as serve:
            serve.wait_said("placing 2 workers and 2 routers", START_WITHIN_S)
            url = serve.wait_ready()
            assert node_types(address) == ["decode", "prefill"], "one machine of each type, and each for a demand"
            assert sorted(row.cores for row in serve.table().values()) == ["0", "1"], "nodes of one machine"
            assert urlsplit(url).hostname != "0.0.0.0", "no client can use that"
            assert f" {LOOPBACK}:" in serve.output, "the workers' data plane is in the network of transfer.host"
            operators = f"http://{LOOPBACK}:{urlsplit(url).port}"
            for mode in (None, "colocated", "adaptive"):  # though each worker is bound to machines of its own type
                if mode:
                    subprocess.run([str(RIDGELINE), "mode", mode, "--url", operators], timeout=120, check=True)
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


@pytest.mark.long
def test_two_deployments_on_one_ray_have_cores_and_a_name_of_their_own(
    short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: dict[str, str]
):
    port = free_port()
    with ray_head(short_folder, port, "--num-cpus=2"):
        joined = ("--address", f"127.0.0.1:{port}", *ONE_REPLICA, *words_of(small_model))
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
