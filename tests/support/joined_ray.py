"""A Ray cluster of processes of this machine, for what joins one: a head, nodes, a cloud that has no machine left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.autoscaler.node_launch_exception import NodeLaunchException

from tests.engines.serve_process import GONE_WITHIN_S, REPOSITORY, descendants, still_there

RAY = Path(sys.executable).parent / "ray"
UP_WITHIN_S = 60.0
OBJECT_STORE_BYTES = 100_000_000
ROUTER_ONLY = ("--num-cpus=0", '--resources={"ridgeline_router": 1}')
"""A head that has the router's place and none for engines."""
OPEN = {"RAY_AUTH_MODE": "disabled"}


class FullCloud(FakeMultiNodeProvider):
    """A cloud that has no machine left, as AWS says it."""

    def create_node_with_resources_and_labels(self, *_: Any) -> None:
        raise NodeLaunchException("InsufficientInstanceCapacity", "there is no p5.48xlarge in us-west-2a", None)


def cloud_without_machines(address: str, provider: Mapping[str, Any]) -> dict[str, Any]:
    """What Ray's autoscaler reads: the node types of deploy/cluster.yaml, none of which runs before it is needed."""
    types = yaml.safe_load((REPOSITORY / "deploy/cluster.yaml").read_text())["available_node_types"]
    types[FAKE_HEAD_NODE_TYPE] = types.pop("head")
    for node_type in types.values():
        node_type["min_workers"] = 0
        node_type["node_config"] = {}
        node_type["resources"]["object_store_memory"] = OBJECT_STORE_BYTES
    return {
        "cluster_name": "fake",
        "provider": {"gcs_address": address, "disable_node_updaters": True, **provider},
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


def autoscaled(
    folder: Path, port: int, *, v2: bool = False, full: bool = False
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Options and variables of a head whose autoscaler looks every second what is missing; its cloud may be `full`."""
    module = f"{FullCloud.__module__}.{FullCloud.__name__}"
    provider = {"type": "external", "module": module} if full else {"type": "fake_multinode"}
    path = folder / "cloud.yaml"
    path.write_text(yaml.safe_dump(cloud_without_machines(f"127.0.0.1:{port}", provider)))
    environment = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": f"{v2:d}"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    if v2:
        environment |= {"RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE}
    return (*ROUTER_ONLY, f"--autoscaling-config={path}"), environment


@contextmanager
def _ray_start(
    *options: str, environment: Mapping[str, str] = {}, program: tuple[str, ...] = (str(RAY),)
) -> Iterator[psutil.Process]:
    fixed = ["--node-ip-address=127.0.0.1", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
    command = [*program, "start", *fixed, "--block", *options]
    with tempfile.TemporaryFile() as told:
        env = {**os.environ, **OPEN, **environment}
        process = subprocess.Popen(command, env=env, stdout=told, stderr=subprocess.STDOUT)
        started = psutil.Process(process.pid)
        try:
            give_up_s = time.monotonic() + UP_WITHIN_S
            while b"Ray runtime started" not in (said := os.pread(told.fileno(), 1 << 20, 0)):
                assert process.poll() is None, said.decode()
                assert time.monotonic() < give_up_s, said.decode()
                time.sleep(0.2)
            yield started
        finally:
            family = [started, *descendants(process.pid)]
            for member in family:
                with suppress(psutil.NoSuchProcess):  # Ray's processes end one another
                    member.kill()
            process.wait(10)
            assert still_there(family, GONE_WITHIN_S) == []


@contextmanager
def ray_head(folder: Path, port: int, *options: str, **how: Any) -> Iterator[psutil.Process]:
    """Run a Ray cluster of one node at this port; yield its process, once it can be joined."""
    fixed = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
    with _ray_start(*fixed, *options, **how) as head:
        yield head


@contextmanager
def ray_node(port: int, *options: str, **how: Any) -> Iterator[psutil.Process]:
    """Run another node of the cluster at this port."""
    with _ray_start(f"--address=127.0.0.1:{port}", *options, **how) as node:
        yield node


def without_ridgeline(folder: Path) -> dict[str, str]:
    """Variables of a Python that finds no Ridgeline, as on a machine whose set-up did not run."""
    hidden = (
        "import sys",
        "class Hidden:",
        "    def find_spec(self, name, path=None, target=None):",
        "        if name.partition('.')[0] == 'ridgeline':",
        "            raise ModuleNotFoundError(\"No module named 'ridgeline'\", name=name)",
        "sys.meta_path.insert(0, Hidden())",
    )
    (folder / "sitecustomize.py").write_text("\n".join(hidden))
    return {"PYTHONPATH": str(folder)}
