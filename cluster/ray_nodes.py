"""Which machines Ray has, what is too large for each, and what Ray's autoscaler says of those that do not come.

Why: a worker without a place waits for half an hour, while the reason is elsewhere: a resource that nobody has, a
machine that Ray does not know, or a refusal of the cloud, which only the autoscaler on the head has heard.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, takewhile
from pathlib import Path
from typing import Final

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.autoscaler._private.commands import debug_status
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
from ray.exceptions import RayError
from ray.experimental.internal_kv import internal_kv_get_gcs_client

ANSWER_S: Final = 5.0
LONGEST_LINE: Final = 300
"""Of what a cloud says when it refuses a machine."""
LATEST_REASONS: Final = 3
LOG_TAIL_BYTES: Final = 262144
RECENT_S: Final = 60.0
"""A failure is told for so long after it; the autoscaler tries again every few seconds."""
NO_TYPE: Final = "No available node types can fulfill resource request"
"""As the first version of the autoscaler says it, in its log alone; it says so again every half a minute."""
REASON: Final = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),.* -- (?::event_summary:Error: )?"
    rf"((?:Failed to launch \d+ nodes of type|Ray installation failed on instance) \S+: .+|{NO_TYPE} \{{.+?\}}.*)$",
    re.MULTILINE,
)
"""What the autoscaler writes into its log alone: why a machine could not be had, or set up (its second version)."""
Resources = Mapping[str, float]
_SETTINGS: Final = {"CPU": "cores_per_worker", "GPU": "gpus_per_worker"}


@dataclass(frozen=True)
class AutoscalerReport:
    """What Ray's autoscaler says, whichever version of it runs."""

    launches: bool = False
    """Whether it can launch machines; otherwise it only watches those that somebody else starts."""
    pending: Sequence[str] = ()
    failures: Sequence[str] = ()

    def __str__(self) -> str:
        """Return what is worth to be told to somebody who waits for machines; empty if there is nothing."""
        parts = {"has under way": self.pending, "failed": self.failures}
        return "; ".join(f"Ray's autoscaler {how}: {', '.join(lines)}" for how, lines in parts.items() if lines)


def ask_autoscaler() -> AutoscalerReport:
    """Return what `ray status -v` shows of machines; nothing if it cannot be had."""
    try:
        gcs = internal_kv_get_gcs_client()
        status = gcs.internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode(), timeout=ANSWER_S)
        told = debug_status(status, b"", verbose=True, address=ray.get_runtime_context().gcs_address)
        state = GetClusterStatusReply.FromString(gcs.get_cluster_status(timeout_s=ANSWER_S)).autoscaling_state
    except RayError:
        return AutoscalerReport()
    bundles = [*state.infeasible_resource_requests]
    bundles += [bundle for gang in state.infeasible_gang_resource_requests for bundle in gang.requests]
    no_type = (f"{NO_TYPE} {dict(each.resources_bundle)}" for each in bundles if not _of_a_group(each.resources_bundle))
    # Without a file of node types each machine counts as a type of its own, with this name.
    launches = "\nActive:\n" in told and not any(" node_" in line for line in _lines(told, "Active"))
    failures: Iterable[str] = (
        re.sub(r" \(latest_attempt: [\d:]+\)( -$)?", "", line) for line in _lines(told, "Recent failures")
    )
    if launches:
        reasons = latest_reasons(logs_folder() / "monitor.log", datetime.now().astimezone())
        failures = chain(no_type, failures, reasons)
    return AutoscalerReport(launches, _lines(told, "Pending"), tuple(dict.fromkeys(failures)))


def _of_a_group(resources: Iterable[str]) -> bool:
    """Return whether these are what Ray calls a placement group's own ones."""
    return any("_group_" in name for name in resources)


def _lines(report: str, title: str) -> list[str]:
    after = report.partition(f"\n{title}:\n")[2].splitlines()
    below = takewhile(lambda line: line.startswith(" "), after)
    return [line.strip()[:LONGEST_LINE] for line in below if not line.startswith(" (no ")]


def latest_reasons(monitor_log: Path, now: datetime) -> list[str]:
    """Return why machines lately did not come, the latest first, as the autoscaler's log has it on the head alone."""
    try:
        with monitor_log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace")
    except OSError:
        return []
    recent = (
        reason[:LONGEST_LINE]
        for at, reason in reversed(REASON.findall(tail))
        if (now - datetime.fromisoformat(at).astimezone()).total_seconds() < RECENT_S
    )
    return [*dict.fromkeys(recent)][:LATEST_REASONS]


def logs_folder() -> Path:
    """Return where the Ray that runs has its logs on this machine."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


def fits(takes: Resources, machine: Resources) -> bool:
    """Return whether one worker that takes this has a place on a machine that has so much."""
    return all(machine.get(name, 0) >= number for name, number in takes.items())


def why_no_place(takes: Resources, section: str, machines: Sequence[Resources]) -> str:
    """Return why no machine has a place for one worker of this section even while nobody else is there, and the fix.

    Empty if one has.
    """
    if any(fits(takes, machine) for machine in machines):
        return ""
    for name, number in takes.items():
        most = max((machine.get(name, 0) for machine in machines), default=0)
        if most == 0:
            how = "" if name in _SETTINGS else f" (`ray start --resources='{{\"{name}\": {number:g}}}'`)"
            return f"no machine has {name}: start Ray on one that has{how}"
        if most < number:
            return (
                f"one worker takes {number:g} {name} of one machine, and the largest has {most:g}: lower "
                f"{section}.{_SETTINGS.get(name, 'resources')}, or start Ray on a larger machine"
            )
    return f"no machine has all that one worker takes: lower it in {section}, or start Ray on a larger machine"


def what_there_is(waiting: Iterable[tuple[str, Resources]]) -> str:
    """Say which machines Ray has, what of them is free, and why those that wait, by section, have no place there."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = {
        name: number
        for name, number in sorted(ray.available_resources().items())
        if not name.startswith("node:") and not name.endswith("memory") and not _of_a_group([name])
    }
    has = ", ".join(f"{number:g} {name}" for name, number in free.items()) or "nothing"
    number = f"{len(machines)} machine{'' if len(machines) == 1 else 's'}"
    says = ask_autoscaler()
    reasons = [] if says.launches else [why_no_place(takes, section, machines) for section, takes in waiting]
    parts = [f"the cluster has {number}, with {has} free", *reasons, str(says)]
    return "; ".join(dict.fromkeys(filter(None, parts)))
