"""Joins a Ray cluster, or starts Ray on this machine: for this process alone, and on loopback only."""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from ray._private import ray_constants, services
from ray.exceptions import RayError
from ray.job_config import JobConfig

from ridgeline.cluster.config.models import OBJECT_STORE_BYTES, RidgelineConfig
from ridgeline.cluster.folders import ray_folder, remove_ended_sessions, session_kept
from ridgeline.cluster.runtime.actors import engine_environment
from ridgeline.cluster.runtime.environment import apart_from_the_shell
from ridgeline.cluster.runtime.handles.actor import LOOPBACK, DeploymentFailed
from ridgeline.cluster.runtime.ray_workarounds.fewer_processes import fewer_processes
from ridgeline.cluster.runtime.ray_workarounds.ray_messages import ray_messages_in_a_file
from ridgeline.cluster.runtime.service_process.launch import PRELOADED, preloaded_parent
from ridgeline.cluster.runtime.services import IMPORTED
from ridgeline.roofline.process_cores import usable_cores

STARTS = 2
END_WITHIN_S = 5.0
CONNECT_WITHIN_S = 5.0
TOKEN_FIX: Final = (
    "set RAY_AUTH_MODE=token and copy ~/.ray/auth_token of the head to this machine, or set RAY_AUTH_MODE=disabled on "
    "every machine"
)
JOIN_FIXES: Final = {
    "Invalid address format": "write --address as HOST:PORT of Ray's head, as in 10.0.0.1:6379, or as auto",
    "Version mismatch": "all machines need the same Ray and Python: run `make setup` of one Ridgeline on each",
    "Failed to connect": f"something listens there and does not take this process in; if it is Ray's head, {TOKEN_FIX}",
    "oken": TOKEN_FIX,
}
"""What to do if Ray cannot be joined, by what it says."""
logger = logging.getLogger(__name__)
SYSTEM_CONFIG: Final[dict[str, Any]] = {
    # Ray runs workers at niceness 15, where any other process of the machine delays a token or a frame.
    "worker_niceness": 0,
    # What Ray measures and records for its dashboard, which we do not start.
    "enable_metrics_collection": False,
    "emit_main_service_metrics": False,
    "event_stats": False,
    "enable_timeline": False,
    "task_events_report_interval_ms": 0,
    "ray_events_report_interval_ms": 0,
    # Python processes that wait for tasks. Our actors have an environment of their own, so none of them is ever used.
    "prestart_worker_first_driver": False,
    "num_workers_soft_limit": 0,
    # Looks at an object store that holds next to nothing, at disks that it never spills to, and at queues of tasks.
    "object_manager_timer_freq_ms": 10_000,
    "local_fs_monitor_interval_ms": 10_000,
    "raylet_check_gc_period_milliseconds": 10_000,
    "free_objects_period_milliseconds": 10_000,
    "report_worker_backlog_interval_ms": 10_000,
    "gcs_pull_resource_loads_period_milliseconds": 10_000,
    "core_worker_internal_heartbeat_ms": 10_000,
    "io_context_monitor_probe_interval_ms": 10_000,
    "kill_idle_workers_interval_ms": 1_000,
    "raylet_report_resources_period_milliseconds": 1_000,
    "memory_monitor_refresh_ms": 1_000,
}
"""What a Ray that is started here does otherwise.

How Ray finds dead processes and nodes is left alone.
"""


@asynccontextmanager
async def ray_runtime(config: RidgelineConfig) -> AsyncIterator[Path]:
    """Start Ray for this process, or join it at ray.address; yields the file with Ray's own messages."""
    with ray_messages_in_a_file() as messages, _preloaded(config, messages), _ray(config):
        yield messages


@contextmanager
def _preloaded(config: RidgelineConfig, messages: Path) -> Iterator[None]:
    """Import once what all services need, while Ray starts, whose processes inherit the variable that names the parent.

    Not on a joined cluster, whose processes are not ours to start, nor with GPUs, on which it has not been run; nor if
    whoever started this process has a parent for it.
    """
    if config.ray.address is not None or config.uses_gpus() or PRELOADED in os.environ:
        yield
        return
    with ExitStack() as stack:
        with apart_from_the_shell():
            compiles = not config.model.is_eager(on_cpu=True)
            environment = engine_environment(1, config.supervision.start_timeout_s, on_cpu=True, compiles=compiles)
            os.environ[PRELOADED] = stack.enter_context(preloaded_parent(IMPORTED, environment, messages))
        stack.callback(os.environ.pop, PRELOADED)
        yield


@contextmanager
def _ray(config: RidgelineConfig) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Under `uv run`, Ray starts its workers by `uv run` as well, in a copy of the working folder. Read at import.
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    common: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "WARNING",
        "namespace": "ridgeline",
        # Ray adds the working folder to its workers' search path, unless its own client is said to have started it.
        "job_config": JobConfig(_client_job=True),
    }
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        try:
            if config.ray.address is None:
                stack.enter_context(_start_here(config, common))
            else:
                _join(config.ray.address, common)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            where = "on this machine" if config.ray.address is None else config.ray.address or "''"
            told = " ".join(str(error).split())
            fix = next((f": {fix}" for sign, fix in JOIN_FIXES.items() if sign in told), "")
            raise DeploymentFailed(f"Ray did not start or answer ({where}): {told.removesuffix('.')}{fix}") from error
        yield


def _start_here(config: RidgelineConfig, common: dict[str, Any]) -> AbstractContextManager[None]:
    """Start Ray; returns what keeps the folder of its session, which the next start removes otherwise."""
    pools = config.all_pools().values()
    tables = [config.router.resources, *(pool.resources for pool in pools)]
    folder = ray_folder()
    if folder.problem:
        raise DeploymentFailed(folder.problem)
    remove_ended_sessions(sessions := Path(folder.path, "ray"))
    with apart_from_the_shell():
        start_ray(
            address="local",  # never one that runs already, as `ray start --head` leaves it
            _temp_dir=str(sessions),
            num_cpus=max(len(usable_cores()), sum(pool.workers * pool.cores_per_worker for pool in pools)),
            _node_ip_address=LOOPBACK,
            resources={name: 1000.0 for table in tables for name in table},
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            **common,
        )
    return session_kept(sessions / ray.get_runtime_context().get_session_name())


def _join(address: str, common: dict[str, Any]) -> None:
    """Join a cluster. Raises ConnectionError at once if nobody listens, for which Ray itself waits a minute."""
    said = os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE, "") if address == "auto" else ""
    replaced = f"; auto means RAY_ADDRESS here, which is {said}: unset it if that is wrong" if said else ""
    if "://" in (said or address):
        raise ValueError(
            f"{said or address} is an address of Ray's client or of its jobs; --address is host:port of Ray's head "
            f"itself, port 6379 if nobody has chosen another{replaced}"
        )
    if address != "auto" and not re.fullmatch(r".+:\d+", address):
        raise ValueError("Invalid address format")
    try:
        host, colon, port = (services.canonicalize_bootstrap_address(address) or "").rpartition(":")
    except ConnectionError as error:  # auto, and neither RAY_ADDRESS nor a process of Ray's says where
        raise ConnectionError(
            "no Ray runs on this machine: run this on the cluster's head, write --address as HOST:PORT of the head, or "
            "start Ray here by `ray start`"
        ) from error
    if colon and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_WITHIN_S).close()
        except OSError as error:
            raise ConnectionError(
                f"nothing answers at {host}:{port} ({error.strerror or error}): --address is that of Ray's head, which "
                f"`ray start --head` prints, or auto on a machine of the cluster while Ray runs there{replaced}"
            ) from error
    ray.init(address=address, **common)


def start_ray(**options: Any) -> None:
    """Call `ray.init`, and call it once more if one of Ray's processes did not come up.

    Ray waits 30 s for each and then raises a bare Exception (the raylet) or RuntimeError (the GCS), without ending what
    else it has started. That happened once in some hundred starts, and the raylet had not written a word.

    Raises DeploymentFailed if it does not come up again.
    """
    _keep_on_loopback()
    failures: list[str] = []
    while len(failures) < STARTS:
        with warnings.catch_warnings():  # of processes that are ended by pid, whose objects go with Ray's exception
            warnings.filterwarnings("ignore", "subprocess .* is still running", ResourceWarning)
            earlier = set(psutil.Process().children())
            try:
                with fewer_processes():
                    ray.init(_system_config=dict(SYSTEM_CONFIG), **options)
                return
            except Exception as error:
                if type(error) not in (Exception, RuntimeError):
                    raise
                failures.append(str(error))
            left = set(psutil.Process().children()) - earlier
            for process in left:
                process.kill()
            psutil.wait_procs(list(left), timeout=END_WITHIN_S)
            gc.collect()
        logger.warning("Ray did not come up: %s", failures[-1])
    raise DeploymentFailed(
        f"Ray did not come up on this machine, {STARTS} times: {failures[0]} Its logs are in {ray_folder().logs}: see "
        "them, and whether memory or disk is full"
    )


def _keep_on_loopback() -> None:
    """Make a Ray that is started here listen on loopback only.

    Whoever reaches Ray's ports can run code, and Ray opens them on all interfaces unless its address is loopback, which
    it replaces by an outward one. It does not where it may not form a cluster; its switch for that is read at import.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
