"""Starts Ray without processes that serve nobody here.

`ray.init` has options for none of them. What it looks up by name at that moment is given another value meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import ray._private.node
import ray._private.parameter
import ray._private.utils

_NOT_WANTED = ImportError("this Ray is started without its dashboard")


@contextmanager
def fewer_processes() -> Iterator[None]:
    """Have `ray.init` start no dashboard, autoscaler or log monitor, and an agent without the dashboard's parts.

    The agent, without which Ray ends a node, then runs as it does where Ray is installed without its extras.
    """
    parameters = partial(ray._private.parameter.RayParams, no_monitor=True, include_log_monitor=False)
    with (
        patch.object(ray._private.parameter, "RayParams", parameters),
        patch.object(ray._private.node.Node, "start_api_server", lambda *_, **__: None),
        patch.object(ray._private.utils, "get_dashboard_dependency_error", lambda: _NOT_WANTED),
    ):
        yield
