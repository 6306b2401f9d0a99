"""Starts Ray on this machine, for this process alone, on loopback only. Called by `cluster.runtime.deployment`."""

from __future__ import annotations

import logging
import os
from typing import Any, Final

import psutil
import ray
from ray._private import ray_constants

from cluster.runtime.handles.actor import DeploymentFailed
from cluster.runtime.ray_workarounds.fewer_processes import fewer_processes

STARTS = 2
END_WITHIN_S = 5.0
LOGS = "/tmp/ray/session_latest/logs"
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
"""What a Ray that is started here does otherwise; docs/configuration.md has a line for each.

How Ray finds dead processes and nodes is left alone.
"""


def start_ray(**options: Any) -> None:
    """Call `ray.init`, and call it once more if the raylet, Ray's process on each machine, did not come up.

    Ray waits 30 s for it and then raises a bare Exception, without ending what else it has started. That happened once
    in some hundred starts, on a machine with nothing else to do, and the raylet had not written a word.

    Raises DeploymentFailed if it does not come up again.
    """
    _keep_on_loopback()
    for start in range(1, STARTS + 1):
        earlier = set(psutil.Process().children())
        try:
            with fewer_processes():
                ray.init(_system_config=dict(SYSTEM_CONFIG), **options)
            return
        except Exception as error:
            if type(error) is not Exception:
                raise
            _end(set(psutil.Process().children()) - earlier)
            if start == STARTS:
                raise DeploymentFailed(
                    f"Ray did not come up on this machine, {STARTS} times: {error} Its logs are in {LOGS}: see "
                    "them, and whether memory or disk is full"
                ) from error
            logger.warning("Ray did not come up: %s Starting it once more", error)


def _keep_on_loopback() -> None:
    """Make a Ray that is started here listen on loopback only.

    Whoever reaches Ray's ports can run code, and Ray opens them on all interfaces unless its address is loopback, which
    it replaces by an outward one. It does not where it may not form a cluster; its switch for that is read at import.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _end(processes: set[psutil.Process]) -> None:
    for process in processes:
        process.kill()
    psutil.wait_procs(list(processes), timeout=END_WITHIN_S)
