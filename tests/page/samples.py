"""States of a deployment, as the router sends them: four kept in files, and what is made of these."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.page_server import State

FOLDER = Path(__file__).parent / "states"
MARKUP = """<i class="injected">&'"</i>"""


def kept(name: str) -> State:
    state: State = json.loads((FOLDER / f"{name}.json").read_text())
    return state


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same objects and lists, with each text, number and flag changed."""
    if isinstance(value, dict):
        return {key: changed(each, change) for key, each in value.items()}
    return [changed(each, change) for each in value] if isinstance(value, list) else change(value)


def large() -> State:
    """64 workers, of which one is lost, and no trails, which would cover each other."""
    state = kept("healthy")
    number = 0
    for pool, workers in zip(state["pools"], (24, 40), strict=True):
        model = pool["workers"][0]
        for steps in model["steps"]:
            steps["trail"] = []
        pool["workers"] = [{**copy.deepcopy(model), "id": f"worker-{number + i}"} for i in range(workers)]
        pool |= {"workers_ready": workers, "workers_wanted": workers}
        number += workers
    state["pools"][1]["workers"][3] |= {"state": "lost", "steps": [], "why": "no answer"}
    state["verdict"] |= {"kind": "worker_lost", "severity": "fault", "resource": "bandwidth", "worker": "worker-27"}
    state["resources"][4]["state"] = "fault"
    return state


def adaptive() -> State:
    """One pool that moves KV in two ways, without SLOs, peaks of the link and a step-time model; many routers."""
    state = kept("colocated")
    state["deployment"] |= {"mode": "adaptive", "mode_is_for": "compare: pair 2"}
    state["pools"][0] |= {"pool": "adaptive", "slo_point": None}
    state["promise"]["slo"] = {"ttft_s": None, "tpot_s": None, "goal_ratio": 0.9}
    state["promise"] |= dict.fromkeys(("attainment_ratio", "ttft_attainment_ratio", "tpot_attainment_ratio"))
    link = kept("healthy")["links"][0] | {"fastest_bytes_per_s": None}
    state["links"] = [link, {**link, "transport": "grpc", "use_ratio": None}]
    for request in state["requests"]:
        request |= {"ttft_ok": None, "tpot_ok": None, "decision": None}
    state["requests"][0] |= {"outcome": "cancelled", "stages": state["requests"][0]["stages"][:2], "tpot_s": None}
    text = "scale adaptive=5: running; worker-4 starts"
    state["operations"] = [{"running": True, "text": text}]
    state["requests_of"] = "router-0, one of 2"
    return state


def unknown() -> State:
    """Every figure and text is unknown, and nothing but the shape is there."""
    return changed(kept("healthy"), lambda leaf: None)


def nothing() -> State:
    """Not even the shape."""
    return dict.fromkeys(kept("healthy"))


def injected() -> State:
    """Every text is somebody's markup: names of models, ids that clients choose, reasons."""
    state = adaptive()
    state["pools"] += kept("worker_lost")["pools"]
    return changed(state, lambda leaf: MARKUP if isinstance(leaf, str) else leaf)


STATES: dict[str, Callable[[], State]] = {
    **{path.stem: (lambda name=path.stem: kept(name)) for path in sorted(FOLDER.glob("*.json"))},
    **{make.__name__: make for make in (large, adaptive, unknown, nothing, injected)},
}
