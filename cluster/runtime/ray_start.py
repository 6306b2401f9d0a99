"""Starts Ray on this machine, for this process alone, on loopback only. Called by `cluster.runtime.deployment`."""

from __future__ import annotations

import logging
import os
from typing import Any

import psutil
import ray
from ray._private import ray_constants

from cluster.runtime.actor_handle import DeploymentFailed

STARTS = 2
END_WITHIN_S = 5.0
LOGS = "/tmp/ray/session_latest/logs"
logger = logging.getLogger(__name__)


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
            ray.init(**options)
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
