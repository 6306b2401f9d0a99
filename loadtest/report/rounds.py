"""Makes summary.json of a comparison: both variants, every pair, every round. Called at the end of `compare`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, get_args

import msgspec

from ridgeline.loadtest.plan import DISAGGREGATED, ComparePlan
from ridgeline.loadtest.report.pools import (
    DEVICE_FORMULAS,
    POOL_FORMULAS,
    describe_pools,
    disaggregated_fraction,
    latency_parts,
    per_device,
    recomputes,
    stage_seconds,
)
from ridgeline.loadtest.report.summary import FORMULAS, SCHEMA, summarise
from ridgeline.loadtest.report.wording import gap_tails, say
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.machine import Disturbance, describe_machine
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run.server_metrics import MetricsDelta, add_up
from ridgeline.loadtest.slo_maps import grid_of, winner_map
from ridgeline.loadtest.statistics.outcome import Conclusion, Side, conclude
from ridgeline.loadtest.statistics.pairs import PairDifference
from ridgeline.loadtest.variants import Devices

VariantLabel = str
Records = dict[VariantLabel, tuple[RequestRecord, ...]]


class Round(msgspec.Struct, frozen=True):
    """One round of a variant; both rounds of a pair have the same arrivals and lengths."""

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


class Interruption(msgspec.Struct, frozen=True):
    """A time during which a comparison stood still, because it was stopped and resumed."""

    stopped: datetime
    resumed: datetime


def labels_of(*modes: str) -> dict[Side, VariantLabel]:
    """Name the variants by their modes, with their places where a mode comes twice."""
    sides: tuple[Side, ...] = get_args(Side)
    return {
        side: mode if modes.count(mode) == 1 else f"{mode} ({side})" for side, mode in zip(sides, modes, strict=False)
    }


def summarise_comparison(
    conclusion: Conclusion,
    differences: Sequence[PairDifference],
    rounds: Sequence[Round],
    labels: Mapping[Side, VariantLabel],
    plan: ComparePlan,
    load: Load,
    devices: Mapping[Side, Devices | None],
) -> tuple[dict[str, Any], Records]:
    """Return the content of summary.json, and the valid records of each variant in the order of pairs.

    A variant whose devices are not known has no figures per device.
    """
    kept = {side: _kept(rounds, side) for side in labels}
    records = {
        label: tuple(record for result in kept[side] for record in result.records) for side, label in labels.items()
    }
    traces = [result.trace for result in kept["a"]]
    words = say(conclusion, labels, plan.slos, gap_tails(records))
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "outcome": msgspec.to_builtins(conclusion) | msgspec.to_builtins(words) | {"sentence": words.sentence},
        "slo": plan.slos.model_dump(),
        "load": load.as_summary(plan.slos),
        "variants": {
            side: _variant_summary(kept[side], label, plan, mode)
            for (side, label), mode in zip(labels.items(), plan.kinds, strict=True)
        },
        "pairs": [
            {"pair": number, "order": _order(rounds, number), **msgspec.to_builtins(each)}
            for number, each in enumerate(differences)
        ],
        "rounds": [round_summary(each, labels[each.side], plan) for each in rounds],
        "trace": {
            "name": traces[0].name,
            "requests": len(traces[0].rows),
            "span_s": sum(trace.span_s for trace in traces) / len(traces),
            "mean_rate": _mean_rate(kept["a"]),
            "changes": traces[0].notes,
        },
        "plan": plan.model_dump(),
        "machine": describe_machine(),
        "formulas": FORMULAS | POOL_FORMULAS | DEVICE_FORMULAS,
    }
    for side, owned in devices.items():
        if owned is not None:
            summary["variants"][side]["per_device"] = per_device(summary["variants"][side], owned, plan.price_per_hour)
    if (found := _winner_map(kept, labels, conclusion, plan, load)) is not None:
        summary["winner_map"] = found
    return summary, records


def _winner_map(
    kept: dict[Side, list[ReplayResult]],
    labels: Mapping[Side, VariantLabel],
    conclusion: Conclusion,
    plan: ComparePlan,
    load: Load,
) -> dict[str, Any] | None:
    pairs = [{"a": a.records, "b": b.records} for a, b in zip(kept["a"], kept["b"], strict=True)]
    grid = grid_of(pairs, load.unloaded, plan.slos)
    if grid is None:
        return None
    names: dict[str, str] = {str(side): label for side, label in labels.items()}
    judge = partial(conclude, looks=conclusion.looks, most_pairs=plan.pairs, margin=conclusion.margin)
    found: dict[str, Any] = msgspec.to_builtins(winner_map(pairs, names, grid, judge))
    return found


def _kept(rounds: Sequence[Round], side: Side) -> list[ReplayResult]:
    return [each.result for each in rounds if each.side == side and each.is_kept and each.result is not None]


def _order(rounds: Sequence[Round], pair: int) -> list[Side]:
    return [each.side for each in rounds if each.pair == pair and each.is_kept]


def _mean_rate(results: Sequence[ReplayResult]) -> float | None:
    gaps, span_s = sum(len(result.records) - 1 for result in results), sum(result.trace.span_s for result in results)
    return gaps / span_s if span_s else None


def _variant_summary(
    results: Sequence[ReplayResult], label: VariantLabel, plan: ComparePlan, mode: str
) -> dict[str, Any]:
    records = [record for result in results for record in result.records]
    delta = add_up(result.metrics for result in results if result.metrics is not None)
    summary = {"mode": mode, "label": label} | summarise(records, sum(result.window_s for result in results), plan.slos)
    summary |= {
        "pools": describe_pools(delta),
        "stage_seconds": stage_seconds(delta),
        "latency_parts": latency_parts(delta, _seconds(summary["mean_ttft_ms"]), _seconds(summary["mean_e2el_ms"])),
        "recomputes": recomputes(delta),
        "warnings": [warning for result in results for warning in result.warnings],
    }
    if mode == DISAGGREGATED:
        summary["disaggregated_fraction"] = disaggregated_fraction(delta)
    return summary


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def round_summary(each: Round, label: VariantLabel, plan: ComparePlan) -> dict[str, Any]:
    """Return what summary.json says of a round."""
    summary: dict[str, Any] = {
        "round": each.number,
        "variant": each.side,
        "label": label,
        "pair": each.pair,
        "began": each.began.isoformat(timespec="seconds"),
        "valid": each.is_kept,
        "reasons": each.reasons,
        "machine": msgspec.to_builtins(each.others),
    }
    if each.result is None:
        return summary
    figures = summarise(each.result.records, each.result.window_s, plan.slos)
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


def interruptions_summary(found: Sequence[Interruption]) -> list[dict[str, Any]]:
    """Say when a comparison was interrupted, and for how long; `interruptions` in summary.json."""
    return [
        {
            "stopped": each.stopped.isoformat(timespec="seconds"),
            "resumed": each.resumed.isoformat(timespec="seconds"),
            "seconds": (each.resumed - each.stopped).total_seconds(),
        }
        for each in found
    ]
