"""The table of series in docs/reference/metrics.md: as documented, and as the router's collectors define it.

`python -m tests.support.series_table` writes it again.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ridgeline.contracts.workers import MIN_FITTED_STEPS, StepModel, WorkerStatus
from ridgeline.router.fleet.pairing import KvPair
from ridgeline.router.flow.fair_queue import Waiting
from ridgeline.router.front.text_turns import TextTurns
from ridgeline.router.observe.collectors import _WORKER_COUNTERS, _WORKER_GAUGES, BuildInfo, WorkerCollector
from ridgeline.router.observe.loop_lag import LoopLag
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.placement.pool_queue import QueueCollector, QueueNow
from ridgeline.router.settings import PoolHardware

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
METRICS_TABLE = re.compile(r"(?<=<!-- metrics -->\n).*(?=<!-- /metrics -->)", re.DOTALL)
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
STEP_MODEL = StepModel(
    base_s=1.0,
    per_prefill_token_s=1.0,
    per_sequence_s=1.0,
    per_context_token_s=1.0,
    per_attended_token_s=1.0,
    steps=MIN_FITTED_STEPS,
)
PAIRS = [KvPair("worker-0", "worker-1", "shm", "")]


def documented() -> dict[str, tuple[str, str, set[str]]]:
    """Return name -> (type, meaning, labels) from the document."""
    table = METRICS_TABLE.search(METRICS_PAGE.read_text())
    assert table is not None
    return {
        name: (kind, text, set(filter(None, labels.split(", ")))) for name, kind, labels, text in ROW.findall(table[0])
    }


def metric_rows() -> list[tuple[str, str, str, str]]:
    """Return (name as scraped, type, labels, meaning) of every series of the router's collectors, with sample data.

    `tests/components/router/front/test_http.py` compares them with what a router publishes.
    """
    rows = []
    for series in vars(RequestMetrics(CollectorRegistry())).values():
        if isinstance(series, Counter | Gauge | Histogram):
            suffix = "_total" if isinstance(series, Counter) else ""
            labels = ", ".join(series._labelnames)
            rows.append((series._name + suffix, series._type, labels, series._documentation))
    status = WorkerStatus(worker_id="worker-0", counters=worker_counters(), step_model=STEP_MODEL)
    workers = [
        SimpleNamespace(
            pool="prefill",
            worker_id="worker-0",
            status=status,
            counted={"prefill": status.counters},
            favours="prefill",
            max_num_seqs=16,
            client=SimpleNamespace(connected=True),
            healthy=True,
            drains=drains,
        )
        for drains in (False, True)
    ]
    hardware = {"prefill": PoolHardware("any", 1.0, 1.0, "any")}
    queue = QueueNow(Waiting(1, 9), 0, starts_at_once=False, tokens_per_s=9.0)
    restarts = {("prefill", "worker-0", "stalled"): 1, ("prefill", "has-left", "stalled"): 1}
    collector = WorkerCollector(
        lambda: workers,
        lambda: hardware,
        lambda: "disaggregated",
        lambda: PAIRS,
        lambda: restarts,
        wanted=lambda: {"prefill": 2},
    )
    for family in (
        *collector.collect(),
        *QueueCollector(lambda: {"prefill": queue}).collect(),
        *BuildInfo("any", "any").collect(),
        *LoopLag().collect(),
        *TextTurns().collect(),
    ):
        sample = family.samples[0]
        rows.append((sample.name, family.type, ", ".join(sample.labels), family.documentation))
    return rows


def worker_counters() -> dict[str, float]:
    """Return one value of each figure that a worker may report."""
    counters = {".".join([prefix, *labels]): 1.0 for prefix, (_, _, labels) in _WORKER_COUNTERS.items()}
    return counters | dict.fromkeys(_WORKER_GAUGES, 1.0)


def metrics_table() -> str:
    lines = [f"| `{name}` | {kind} | {labels} | {text} |\n" for name, kind, labels, text in metric_rows()]
    return "".join(["| series | type | labels | meaning |\n", "|---|---|---|---|\n", *lines])


if __name__ == "__main__":
    METRICS_PAGE.write_text(METRICS_TABLE.sub(lambda _: metrics_table(), METRICS_PAGE.read_text()))
