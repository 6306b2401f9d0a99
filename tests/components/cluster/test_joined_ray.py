"""A Ray cluster that cannot be joined, or whose machines are unfit: `doctor` and `serve` name each fault with a fix."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ridgeline.roofline.process_cores import usable_cores
from tests.engines.serve_process import RIDGELINE, serving
from tests.support.free_port import free_port
from tests.support.joined_ray import OPEN, ROUTER_ONLY, autoscaled, ray_head, ray_node, without_ridgeline
from tests.support.symptoms import is_quoted

WITHIN_S = 120.0
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 40}
OLDER_RAY = "import ray; ray.__version__ = '2.59.0'; from ray.scripts.scripts import main; main()"


def doctor(port: int, *settings: str, shell: Mapping[str, str] = OPEN) -> tuple[int, str]:
    """The exit status of `ridgeline doctor` on the cluster at this port, and its output in one line."""
    command = [str(RIDGELINE), "doctor", "--address", f"127.0.0.1:{port}"]
    command += [word for setting in settings for word in ("--set", setting)]
    environment = {**os.environ, "COLUMNS": "250", **shell}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    return ended.returncode, " ".join((ended.stdout + ended.stderr).split())


def unfit(port: int, *settings: str) -> str:
    """What it says of machines that cannot run these settings."""
    status, told = doctor(port, *settings)
    assert status == 1, told
    return told


def doctor_says(words: str, status: int, port: int, *settings: str) -> None:
    """Ask until it says so: a node joins, or is missed, or the autoscaler reports, some seconds after its start."""
    give_up_s = time.monotonic() + WITHIN_S
    while status != (answer := doctor(port, *settings))[0] or words not in answer[1]:
        assert time.monotonic() < give_up_s, answer


def test_machines_that_have_not_joined_or_lack_ridgeline_are_named_until_all_are_fit(short_folder: Path):
    port = free_port()
    with ray_head(short_folder, port, *ROUTER_ONLY):
        status, told = doctor(port)
        assert status == 1
        assert "pools.prefill 0 of 1 have a place" in told
        assert "Only the head has joined" in told
        status, told = doctor(port, "pools.prefill.resources={ridgeline_prefill: 1}", "router.resources={elsewhere: 1}")
        assert "no machine has elsewhere: start Ray on one that has (`ray start --resources=" in told
        with ray_node(port, "--num-cpus=2", environment=without_ridgeline(short_folder)):
            doctor_says("No module named 'ridgeline'", 1, port)
            with serving("--address", f"127.0.0.1:{port}", shell=OPEN) as refused:
                assert refused.wait_exit(WITHIN_S) == 1
            assert "No module named 'ridgeline'" in refused.output
            assert is_quoted(refused.output), refused.output
        cores = len(usable_cores())
        with ray_node(port, f"--num-cpus={2 * cores}"):
            doctor_says("can run 1 prefill and 1 decode", 0, port)
            together = (f"pools.prefill.workers={cores}", f"pools.decode.workers={cores}")
            told = unfit(port, *together)
            assert f"unfit for {cores} prefill and {cores} decode {2 * cores} cores are needed and {cores} us" in told
            assert "no address for transfer.host 'eth9'; it has lo: 127" in unfit(port, "transfer.host=eth9")
            told = unfit(port, f"pools.decode.cores_per_worker={3 * cores}")
            assert f"takes {3 * cores} CPU of one machine, and the largest has {2 * cores}: lower pools.dec" in told


def test_all_routers_of_a_deployment_have_the_one_place_that_the_head_has_for_them(short_folder: Path):
    port = free_port()
    settings = ("router.resources={ridgeline_router: 1}", "router.processes=3", "ray.placement_timeout_s=30")
    words = [word for setting in settings for word in ("--set", setting)]
    with (
        ray_head(short_folder, port, *ROUTER_ONLY),
        serving("--address", f"127.0.0.1:{port}", *words, shell=OPEN) as one,
    ):
        assert one.wait_exit(WITHIN_S) == 1
    waits = [told for told in " ".join(one.output.split()).split("waiting for Ray to place ")[1:] if "machine" in told]
    assert waits[-1].startswith(
        "worker-0 (prefill) (1 CPU), worker-1 (decode) (1 CPU); the cluster has 1 machine, with "
        "nothing free; no machine has CPU"
    ), one.output


def test_a_cluster_that_asks_for_a_token_is_joined_with_it_and_else_the_fix_is_named(
    short_folder: Path, tmp_path: Path
):
    port = free_port()
    with ray_head(short_folder, port, "--num-cpus=2", environment=TOKEN):
        homeless = {"HOME": str(tmp_path), "XDG_CACHE_HOME": os.path.expanduser("~/.cache")}
        told = []
        for shell in (OPEN, {"RAY_AUTH_MODE": "token"}):  # the first takes 20 s, which Ray tries for
            status, answer = doctor(port, shell={**homeless, **shell})
            assert status == 1, answer
            assert "copy ~/.ray/auth_token of the head" in answer, answer
            told.append(answer)
        assert is_quoted(told[0])
        assert is_quoted(told[1])
        assert doctor(port, shell=TOKEN)[0] == 0


def test_a_cluster_of_another_ray_is_named_with_both_versions(short_folder: Path):
    port = free_port()
    with ray_head(short_folder, port, "--num-cpus=2", program=(sys.executable, "-c", OLDER_RAY)):
        status, told = doctor(port)
        assert status == 1
        assert "Ray: 2.59.0" in told
        assert "make setup" in told
        assert is_quoted(told)


@pytest.mark.long  # tests/hosts has it by Ray's own AWS provider
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_who_waits_for_machines_is_told_why_the_cloud_has_none(short_folder: Path, v2: bool):
    port = free_port()
    options, environment = autoscaled(short_folder, port, v2=v2, full=True)
    places = ("pools.prefill.resources={ridgeline_prefill: 1}", "pools.decode.resources={ridgeline_decode: 1}")
    nowhere = "router.resources={nowhere: 1}"
    settings = [word for one in (*places, nowhere, "ray.placement_timeout_s=25") for word in ("--set", one)]
    with ray_head(short_folder, port, *options, environment=environment):
        doctor_says("Ray's autoscaler launches machines", 0, port, *places)
        with serving("--address", f"127.0.0.1:{port}", *settings, shell=OPEN) as one:
            assert one.wait_exit(WITHIN_S) == 1
        waits, _, end = " ".join(one.output.split()).partition("error: ")
        assert "waiting for Ray to place worker-0 (prefill)" in waits
        no_type = "No available node types can fulfill resource request {'nowhere': 1.0}"
        for reason in ("there is no p5.48xlarge in us-west-2a", no_type):
            assert all(reason in told for told in (waits, end)), one.output
        assert is_quoted(one.output), one.output
        assert "there is no p5.48xlarge" in doctor(port, *places)[1]
