"""Which nodes Ray's autoscaler is launching, and why it could not launch or set up others.

Ray 2.60 publishes that a launch failed, but no reason. The reason is in the log of its monitor, on the head's machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError

ANSWER_WITHIN_S = 5
RECENT_S = 60.0
"""A failure is told for so long after it; Ray tries again every few seconds."""
TAIL_BYTES = 256 * 1024
FAILED = re.compile(
    r"^(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+\s.*? -- "
    r"(?:Failed to launch \d+ nodes of type (?P<type>\S+): (?:Node Launch Exception )?(?P<why>.+)"
    r"|Ray installation failed on instance (?P<instance>[^\s:]+): .*)$",
    re.MULTILINE,
)


def logs_folder() -> Path:
    """Return where the Ray that runs has its logs on this machine."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


def node_launches() -> list[str]:
    """Return a sentence for each launch that is under way or has just failed.

    There is none if the cluster has no autoscaler, or one older than version 2.
    """
    try:
        status = get_cluster_status(ray.get_runtime_context().gcs_address, ANSWER_WITHIN_S)
    except RayError:
        return []
    asked = Counter(name for one in status.pending_launches for name in [one.ray_node_type_name] * one.count)
    set_up = Counter(one.ray_node_type_name for one in status.pending_nodes)
    under_way = [
        f"Ray {does} {', '.join(f'{number} {name}' for name, number in sorted(nodes.items()))}"
        for does, nodes in (("asks for", asked), ("sets up", set_up))
        if nodes
    ]
    return under_way + recent_failures(logs_folder(), datetime.now().astimezone(), set(set_up))


def recent_failures(logs: Path, now: datetime, came: Collection[str] = ()) -> list[str]:
    """Return the last failure of each node type and each node, if it is recent and the head is this machine.

    Launches of types that `came` have succeeded since.
    """
    try:
        with (logs / "monitor.log").open("rb") as opened:
            opened.seek(max(0, opened.seek(0, 2) - TAIL_BYTES))
            log = opened.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    last: dict[str, str] = {}
    for found in FAILED.finditer(log):
        if (now - datetime.fromisoformat(found["at"]).astimezone()).total_seconds() > RECENT_S:
            continue
        if found["type"] in came:
            continue
        if found["type"]:
            why = found["why"].rstrip(". ")
            last[found["type"]] = f"the launch of {found['type']} failed and is tried again: {why}"
        else:
            last[found["instance"]] = (
                f"the set-up of {found['instance']} failed and is tried again: {logs}/monitor.out says how"
            )
    return list(last.values())
