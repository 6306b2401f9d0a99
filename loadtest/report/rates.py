"""Makes summary.json of a comparison over rates: which rate each variant holds. Called at the end of `find_rate`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ridgeline.loadtest.plan import ComparePlan, Slo
from ridgeline.loadtest.report.pools import describe_pools, stage_seconds
from ridgeline.loadtest.report.rounds import Round, VariantLabel
from ridgeline.loadtest.report.summary import FORMULAS, SCHEMA, summarise
from ridgeline.loadtest.report.wording import Pauses, say_rates
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.machine import describe_machine
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run.server_metrics import add_up
from ridgeline.loadtest.slo_maps import grid_of, rate_map
from ridgeline.loadtest.statistics.attainment_curve import AttainmentCurve, MaxGoodputRate, RoundCount, curves_of
from ridgeline.loadtest.statistics.outcome import Side
from ridgeline.loadtest.statistics.rate_verdict import judge_rates
from ridgeline.loadtest.variants import Devices

RATE_FORMULAS = {
    "max_goodput_rate": "rate at which the share of requests within every SLO falls to the target: the median of the "
    "posterior of a mixed logistic curve of the logarithm of the rate (Agresti 2013, chapter 13), summed on a grid",
    "interval of max_goodput_rate": "the central 95 % of that posterior; an end that no measured rate bounds is open",
    "ratio": "the maximum goodput rate of one variant / another's: median and central 95 % of both posteriors",
    "evidence": "strong: one rate is the higher with a probability of 0.975 or more; some: 0.9 or more; no difference "
    "that matters: the ratio's interval lies within x 1/1.1 and x 1.1",
    "output_tokens_per_s": "maximum goodput rate x mean output tokens of a request",
    "rate_per_device": "maximum goodput rate / devices",
    "cost_per_million_output_tokens": "price of a device's hour x devices / 3600 / (rate x mean output tokens of a "
    "request) x 1,000,000; of all requests, met SLOs or not",
}
POINT_FIGURES = (
    "attainment",
    "request_goodput",
    "output_throughput",
    "median_ttft_ms",
    "p90_ttft_ms",
    "median_tpot_ms",
    "p90_tpot_ms",
    "max_itl_ms",
)
"""What is told of each rate."""
CURVE_POINTS = 49
Summary = Mapping[str, Any]


def summarise_rates(
    found: Mapping[str, Sequence[RoundCount]],
    rates: Sequence[float],
    rounds: Sequence[Round],
    labels: Mapping[Side, VariantLabel],
    plan: ComparePlan,
    load: Load,
    devices: Mapping[Side, Devices | None],
    took_s: float,
) -> dict[str, Any]:
    """Return the content of summary.json; `rates` has that of each pair, `found` the valid rounds of each variant."""
    curves = curves_of({side: found[side] for side in labels}, plan.attainment)
    verdict = judge_rates(curves) if len(curves) > 1 else None
    traces = [each.result.trace for each in rounds if each.result is not None]
    output_tokens = [row.output_tokens for trace in traces for row in trace.rows]
    mean_output_tokens = sum(output_tokens) / len(output_tokens)
    held = {side: curves[side].max_goodput_rate() for side in labels}
    variants = {}
    for side, label in labels.items():
        of_side = [each for each in rounds if each.side == side]
        variants[side] = {
            "label": label,
            **_rate_figures(held[side], devices[side], mean_output_tokens, plan.price_per_hour),
            "curve": _curve(curves[side], curves.values()),
            "points": _points(of_side, rates, plan.slos),
            **_pools(of_side),
        }
    names: dict[str, str] = {str(side): label for side, label in labels.items()}
    of_names: dict[str, MaxGoodputRate] = {str(side): one for side, one in held.items()}
    return {
        "schema": SCHEMA,
        "rates": {
            "attainment": plan.attainment,
            "sentences": say_rates(names, of_names, verdict, took_s, _pauses(rounds, rates, held)),
            "verdict": None if verdict is None else msgspec.to_builtins(verdict) | {"evidence": verdict.evidence},
            "variants": variants,
            "map": _map(rates, rounds, labels, plan, load, devices),
            "rounds": [_round(each, rates[each.pair], labels[each.side], plan.slos) for each in rounds],
            "took_s": took_s,
        },
        "slo": plan.slos.model_dump(),
        "load": load.as_summary(plan.slos),
        "trace": {"name": traces[0].name, "requests": len(traces[0].rows), "changes": traces[0].notes},
        "plan": plan.model_dump(),
        "machine": describe_machine(),
        "formulas": RATE_FORMULAS | FORMULAS,
    }


def _rate_figures(
    found: MaxGoodputRate, devices: Devices | None, mean_output_tokens: float, price_per_hour: float | None
) -> dict[str, Any]:
    """Return the maximum goodput rate of a variant, the tokens a second there, and both per device."""
    return {
        "max_goodput_rate": msgspec.to_builtins(found),
        "output_tokens_per_s": None if found.rate is None else found.rate * mean_output_tokens,
        "per_device": _per_device(found, devices, mean_output_tokens, price_per_hour),
    }


def _curve(curve: AttainmentCurve, all_curves: Collection[AttainmentCurve]) -> list[dict[str, Any]]:
    """Return the attainment with its band over all rates that were measured."""
    lowest, highest = min(one.lowest_rate for one in all_curves), max(one.highest_rate for one in all_curves)
    rates = np.geomspace(lowest, highest, CURVE_POINTS) if highest > lowest else [lowest]
    return [msgspec.to_builtins(curve.band(float(rate))) for rate in rates]


def _points(of_side: Sequence[Round], rates: Sequence[float], slo: Slo) -> list[dict[str, Any]]:
    """Return the figures at each rate, of all valid rounds there together."""
    by_rate: dict[float, list[ReplayResult]] = {}
    for each in of_side:
        if each.is_kept and each.result is not None:
            by_rate.setdefault(rates[each.pair], []).append(each.result)
    points = []
    for rate, results in sorted(by_rate.items()):
        records = [record for result in results for record in result.records]
        figures = summarise(records, sum(result.window_s for result in results), slo)
        points.append({"rate": rate, "rounds": len(results), **{name: figures[name] for name in POINT_FIGURES}})
    return points


def _pools(of_side: Sequence[Round]) -> dict[str, Any]:
    """Return what the pools did in all valid rounds of a variant; nothing for a server that counts nothing."""
    counted = [each.result.metrics for each in of_side if each.is_kept and each.result and each.result.metrics]
    delta = add_up(counted) if counted else None
    return {
        "pools": {} if delta is None else describe_pools(delta),
        "stage_seconds": {} if delta is None else stage_seconds(delta),
    }


def _pauses(rounds: Sequence[Round], rates: Sequence[float], held: Mapping[Side, MaxGoodputRate]) -> Pauses | None:
    """Return the longest pauses at the measured rates that all variants hold; None if there is no such rate."""
    if len(held) < 2 or any(one.outcome == "below" for one in held.values()):
        return None
    limit = min((one.rate for one in held.values() if one.rate is not None), default=max(rates))
    below = [rate for rate in rates if rate <= limit]
    if not below:
        return None
    found = dict.fromkeys(held, 0.0)
    for each in rounds:
        if each.is_kept and each.result is not None and rates[each.pair] <= limit:
            gaps_s = [gap_s for one in each.result.records if one.ok and (gap_s := one.largest_gap_s) is not None]
            found[each.side] = max([found[each.side], *gaps_s])
    if not all(found.values()):
        return None  # answers of one token have no pauses
    return Pauses(max(below), {str(side): longest_s for side, longest_s in found.items()})


def _map(
    rates: Sequence[float],
    rounds: Sequence[Round],
    labels: Mapping[Side, VariantLabel],
    plan: ComparePlan,
    load: Load,
    devices: Mapping[Side, Devices | None],
) -> dict[str, Any] | None:
    """Return the rate map, per device where the devices of all variants are known; None without SLOs to show."""
    kept = [(each, each.result) for each in rounds if each.is_kept and each.result is not None]
    by_pair = [{str(each.side): result.records} for each, result in kept]
    grid = grid_of(by_pair, load.unloaded, plan.slos)
    if grid is None:
        return None
    owned = {side: one for side in labels if (one := devices.get(side)) is not None}
    units = {one.unit for one in owned.values()}
    is_per_device = len(owned) == len(labels) and len(units) == 1
    unit = f"requests/s per {units.pop()}" if is_per_device else "requests/s"
    at_rates: dict[str, list[tuple[float, Sequence[RequestRecord]]]] = {side: [] for side in labels}
    for each, result in kept:
        share = owned[each.side].count if is_per_device else 1
        at_rates[each.side].append((rates[each.pair] / share, result.records))
    names: dict[str, str] = {str(side): label for side, label in labels.items()}
    found: dict[str, Any] = msgspec.to_builtins(rate_map(at_rates, names, grid, plan.attainment, plan.deadline_s, unit))
    return found


def _round(each: Round, rate: float, label: VariantLabel, limits: Slo) -> dict[str, Any]:
    records = each.result.records if each.result else ()
    met = sum(record.meets(*limits.in_seconds()) for record in records)
    return {
        "round": each.number,
        "pair": each.pair,
        "rate": rate,
        "variant": each.side,
        "label": label,
        "began": each.began.isoformat(),
        "met": met,
        "total": len(records),
        "failed": sum(not record.ok for record in records),
        "attainment": met / len(records) if records else None,
        "valid": each.is_kept,
        "reasons": each.reasons,
    }


def _per_device(
    found: MaxGoodputRate, devices: Devices | None, mean_output_tokens: float, price_per_hour: float | None
) -> dict[str, Any] | None:
    if devices is None:
        return None
    cost = None
    if price_per_hour is not None and found.rate is not None:
        cost = price_per_hour * devices.count / 3600 / (found.rate * mean_output_tokens) * 1e6
    ends = {"rate_per_device": found.rate, "low_per_device": found.low, "high_per_device": found.high}
    return {
        "unit": devices.unit,
        "devices": devices.count,
        **{name: None if rate is None else rate / devices.count for name, rate in ends.items()},
        "cost_per_million_output_tokens": cost,
    }
