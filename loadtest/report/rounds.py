"""The rounds of a comparison, and what summary.json says of each."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, get_args

import msgspec

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report.pools import describe_pools, stage_seconds
from ridgeline.loadtest.report.summary import summarise
from ridgeline.loadtest.run.machine import Disturbance
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run.server_metrics import MetricsDelta

Side = Literal["a", "b", "c", "d", "e", "f"]
"""A variant, by its place."""
VariantLabel = str


class Round(msgspec.Struct, frozen=True):
    """One round of a variant; the rounds of a pair have the same arrivals and lengths."""

    side: Side
    pair: int
    began: datetime
    result: ReplayResult | None
    """None if its figures were lost with a worker."""
    others: Disturbance | None
    reasons: tuple[str, ...]
    """Why it is discarded, or disturbed if it was kept."""
    is_kept: bool
    number: int = 0
    """Of all rounds of the run, in the order in which they began; records name it."""
    took_s: float = 0.0


class Interruption(msgspec.Struct, frozen=True, tag="resumed"):
    """A time during which a comparison stood still, because it was stopped and resumed."""

    stopped: datetime
    resumed: datetime


def labels_of(*names: str) -> dict[Side, VariantLabel]:
    """Name the variants for people, with their places where a name comes twice."""
    sides: tuple[Side, ...] = get_args(Side)
    return {
        side: name if names.count(name) == 1 else f"{name} ({side})" for side, name in zip(sides, names, strict=False)
    }


def undisturbed_pairs(rounds: Sequence[Round]) -> set[int]:
    """Return the pairs in which every kept round is one that no other work disturbed."""
    kept: dict[int, list[Round]] = {}
    for each in rounds:
        if each.is_kept:
            kept.setdefault(each.pair, []).append(each)
    return {number for number, pair in kept.items() if not any(each.reasons for each in pair)}


def round_summary(each: Round, rate: float, label: VariantLabel, slo: Slo) -> dict[str, Any]:
    """Return what summary.json says of a round, which was to have this mean rate in requests/s."""
    records = each.result.counted_records if each.result else ()
    met = sum(record.meets(*slo.in_seconds()) for record in records)
    summary: dict[str, Any] = {
        "round": each.number,
        "pair": each.pair,
        "rate": rate,
        "variant": each.side,
        "label": label,
        "began": each.began.isoformat(timespec="seconds"),
        "met": met,
        "total": len(records),
        "valid": each.is_kept,
        "reasons": each.reasons,
        "machine": msgspec.to_builtins(each.others),
    }
    if each.result is None:
        return summary
    figures = summarise(records, each.result.window_s, slo)
    summary |= figures | {"warnings": each.result.warnings, "client": msgspec.to_builtins(each.result.client)}
    if each.result.metrics is not None:
        summary |= {
            "pools": describe_pools(each.result.metrics),
            "stage_seconds": stage_seconds(each.result.metrics),
            "transports": _transports(each.result.metrics),
        }
    return summary


def _transports(found: MetricsDelta) -> list[str]:
    """Return what carries KV between the workers, by the names of the transports."""
    pairs = (dict(labels) for (name, labels), value in found.gauges.items() if name == "ridgeline_kv_pair" and value)
    return sorted({pair["transport"] for pair in pairs})


def interruptions_summary(found: Sequence[Interruption]) -> list[Mapping[str, Any]]:
    """Say when a comparison was interrupted, and for how long; `interruptions` in summary.json."""
    return [
        {
            "stopped": each.stopped.isoformat(timespec="seconds"),
            "resumed": each.resumed.isoformat(timespec="seconds"),
            "seconds": (each.resumed - each.stopped).total_seconds(),
        }
        for each in found
    ]
