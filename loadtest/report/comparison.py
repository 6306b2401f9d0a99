"""Makes summary.json of a comparison: the verdict, each variant, every round. Called at the end of `compare`."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from ridgeline.loadtest.plan import DISAGGREGATED, ComparePlan, Slo
from ridgeline.loadtest.report.pools import (
    POOL_FORMULAS,
    describe_pools,
    disaggregated_fraction,
    engines_sentence,
    fleet_state,
    latency_parts,
    recomputes,
    router_share,
    split_fraction,
    stage_seconds,
)
from ridgeline.loadtest.report.rounds import Round, Side, VariantLabel, round_summary, undisturbed_pairs
from ridgeline.loadtest.report.summary import FORMULAS, SCHEMA, summarise
from ridgeline.loadtest.report.wording import Findings, Pauses, loaded_rates, say
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.machine import describe_machine
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run.server_facts import unknown
from ridgeline.loadtest.run.server_metrics import MetricsDelta, add_up
from ridgeline.loadtest.slo_map import grid_of, rate_map
from ridgeline.loadtest.statistics.attainment_curve import AttainmentCurve, MaxGoodputRate, RoundCount, curves_of
from ridgeline.loadtest.statistics.verdict import LEAST_PAIRS, RateVerdict, judge
from ridgeline.loadtest.variants import Devices, Variant
from ridgeline.roofline.bottleneck import bottleneck

COMPARISON_FORMULAS = {
    "max_goodput_rate": "rate at which the share of requests within every SLO falls to the target: the median of the "
    "posterior of a mixed logistic curve of the logarithm of the rate (Agresti 2013, chapter 13), summed on a grid",
    "interval of max_goodput_rate": "the central 95 % of that posterior; an end that no measured rate bounds is open",
    "ratio": "the maximum goodput rate of one variant / another's, with the interval of both posteriors: 95 % for two "
    "variants, 1 - 0.05 / (variants - 1) for more",
    "strong evidence": "the interval of the ratio lies above 1, in two pairs of rounds or more that no other work "
    "disturbed, and more of the same requests met the SLOs; no difference that matters: the interval lies within x "
    "1/1.1 and x 1.1",
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
NO_LIMIT_S = float("inf")


class _Measured(msgspec.Struct, frozen=True):
    """The rounds of a comparison that count, and what they were run for."""

    rounds: Sequence[Round]
    rates: Sequence[float]
    """Of each pair, in requests/s."""
    labels: Mapping[Side, VariantLabel]
    slo: Slo
    attainment: float

    def kept(self, side: Side | None = None) -> list[tuple[Round, ReplayResult]]:
        """Return the valid rounds with their results, in the order of pairs."""
        found = [(each, each.result) for each in self.rounds if each.is_kept and each.result is not None]
        return sorted((one for one in found if side in (None, one[0].side)), key=lambda one: one[0].pair)

    def judged(self, side: Side | None = None) -> list[tuple[Round, ReplayResult]]:
        """Return those that the verdict rests on: undisturbed pairs alone, or all if too few are for a verdict."""
        undisturbed = undisturbed_pairs(self.rounds)
        return [one for one in self.kept(side) if len(undisturbed) < LEAST_PAIRS or one[0].pair in undisturbed]

    def counts(self, limits_s: tuple[float, float, float]) -> dict[VariantLabel, list[RoundCount]]:
        """Count the requests within limits on TTFT, TPOT and the largest gap in each judged round of each variant."""

        def count(each: Round, result: ReplayResult) -> RoundCount:
            records = result.counted_records
            return RoundCount(self.rates[each.pair], sum(one.meets(*limits_s) for one in records), len(records))

        return {label: [count(*one) for one in self.judged(side)] for side, label in self.labels.items()}

    def under_load(self, side: Side) -> list[ReplayResult]:
        """Return the results at the highest rate that was measured, where what is short shows most."""
        found = self.kept(side)
        highest = max(self.rates[each.pair] for each, _ in found)
        return [result for each, result in found if self.rates[each.pair] == highest]

    def verdict(self, limits_s: tuple[float, float, float]) -> tuple[dict[VariantLabel, AttainmentCurve], RateVerdict]:
        """Return the curves of all variants and the verdict on them."""
        counts = self.counts(limits_s)
        curves = curves_of(counts, self.attainment)
        return curves, judge(curves, counts, len(undisturbed_pairs(self.rounds)))


def summarise_comparison(
    rates: Sequence[float],
    rounds: Sequence[Round],
    labels: Mapping[Side, VariantLabel],
    plan: ComparePlan,
    load: Load,
    variants: Mapping[Side, Variant],
    took_s: float,
) -> dict[str, Any]:
    """Return the content of summary.json; `rates` has that of each pair."""
    devices = {side: variant.devices for side, variant in variants.items()}
    facts = {labels[side]: variant.facts for side, variant in variants.items()}
    measured = _Measured(rounds, rates, labels, plan.slos, plan.attainment)
    curves, verdict = measured.verdict(plan.slos.in_seconds())
    held = {label: curves[label].max_goodput_rate() for label in labels.values()}
    traces = [result.trace for _, result in measured.kept()]
    output_tokens = [row.output_tokens for trace in traces for row in trace.rows]
    mean_output_tokens = sum(output_tokens) / len(output_tokens)
    found = Findings(
        rounds=measured.counts(plan.slos.in_seconds()),
        verdict=verdict,
        held=held,
        attainment=plan.attainment,
        slo=plan.slos,
        took_s=took_s,
        by_slo=_by_slo(measured),
        pauses=_pauses(measured, held),
        pairs=len(rates),
        failed={label: _failed(measured.judged(side)) for side, label in labels.items()},
    )
    return {
        "schema": SCHEMA,
        "verdict": msgspec.to_builtins(verdict) | {"sentences": say(found)},
        "attainment": plan.attainment,
        "took_s": took_s,
        "variants": {
            side: {
                "label": label,
                "mode": mode,
                **_rate_figures(held[label], devices[side], mean_output_tokens, plan.price_per_hour),
                "curve": _curve(curves[label], curves.values()),
                "points": _points(measured, side),
                **_served(measured, side, mode, facts[label].max_num_seqs),
            }
            for (side, label), mode in zip(labels.items(), plan.kinds, strict=True)
        },
        "facts": {label: msgspec.to_builtins(each) for label, each in facts.items()},
        "unknown": unknown(facts),
        "map": _map(measured, plan, load),
        "rounds": [round_summary(each, rates[each.pair], labels[each.side], plan.slos) for each in rounds],
        "slo": plan.slos.model_dump(),
        "load": load.as_summary(plan.slos),
        "trace": {"name": traces[0].name, "requests": len(traces[0].rows), "changes": traces[0].notes},
        "plan": plan.model_dump(),
        "machine": describe_machine(),
        "formulas": COMPARISON_FORMULAS | FORMULAS | POOL_FORMULAS,
    }


def _failed(judged: Sequence[tuple[Round, ReplayResult]]) -> tuple[int, int]:
    """Return how many requests failed, other than by taking too long, and of how many."""
    records = [record for _, result in judged for record in result.counted_records]
    return sum(not record.ok and not record.was_given_up for record in records), len(records)


def _by_slo(measured: _Measured) -> dict[str, RateVerdict]:
    """Return the verdict on TTFT alone, and on the speed of streams alone."""
    ttft_s, tpot_s, gap_s = measured.slo.in_seconds()
    streams = "TPOT" if measured.slo.gap_ms is None else "TPOT and gaps"
    alone = {"TTFT": (ttft_s, NO_LIMIT_S, NO_LIMIT_S), streams: (NO_LIMIT_S, tpot_s, gap_s)}
    return {name: measured.verdict(limits_s)[1] for name, limits_s in alone.items()}


def _rate_figures(
    found: MaxGoodputRate, devices: Devices | None, mean_output_tokens: float, price_per_hour: float | None
) -> dict[str, Any]:
    """Return the maximum goodput rate of a variant, the tokens a second there, and both per device."""
    rate = None if found.low is None or found.high is None else found.rate  # half an interval has no middle
    per_device = None
    if devices is not None:
        cost = None
        if price_per_hour is not None and rate is not None:
            cost = price_per_hour * devices.count / 3600 / (rate * mean_output_tokens) * 1e6
        ends = {"rate_per_device": rate, "low_per_device": found.low, "high_per_device": found.high}
        per_device = {
            "unit": devices.unit,
            "devices": devices.count,
            **{name: None if end is None else end / devices.count for name, end in ends.items()},
            "cost_per_million_output_tokens": cost,
        }
    return {
        "max_goodput_rate": msgspec.to_builtins(found),
        "output_tokens_per_s": None if rate is None else rate * mean_output_tokens,
        "per_device": per_device,
    }


def _curve(curve: AttainmentCurve, all_curves: Collection[AttainmentCurve]) -> list[dict[str, Any]]:
    """Return the attainment with its band over all rates that were measured."""
    lowest, highest = min(one.lowest_rate for one in all_curves), max(one.highest_rate for one in all_curves)
    rates = np.geomspace(lowest, highest, CURVE_POINTS) if highest > lowest else [lowest]
    return [msgspec.to_builtins(curve.band(float(rate))) for rate in rates]


def _points(measured: _Measured, side: Side) -> list[dict[str, Any]]:
    """Return the figures at each rate, of all valid rounds there together."""
    by_rate: dict[float, list[ReplayResult]] = {}
    for each, result in measured.kept(side):
        by_rate.setdefault(measured.rates[each.pair], []).append(result)
    points = []
    for rate, results in sorted(by_rate.items()):
        records = [record for result in results for record in result.counted_records]
        figures = summarise(records, sum(result.window_s for result in results), measured.slo)
        points.append({"rate": rate, "rounds": len(results), **{name: figures[name] for name in POINT_FIGURES}})
    return points


def _served(measured: _Measured, side: Side, mode: str, max_num_seqs: str) -> dict[str, Any]:
    """Return what the server of a variant said of itself over all its valid rounds; little if it counts nothing."""
    results = [result for _, result in measured.kept(side)]
    under_load = measured.under_load(side)
    records = list(chain.from_iterable(result.counted_records for result in results))
    figures = summarise(records, sum(result.window_s for result in results), measured.slo)
    counted = [result.metrics for result in results if result.metrics is not None]
    delta = add_up(counted)
    served: dict[str, Any] = {
        "pools": describe_pools(delta),
        "stage_seconds": stage_seconds(delta),
        "latency_parts": latency_parts(delta, _seconds(figures["mean_ttft_ms"]), _seconds(figures["mean_e2el_ms"])),
        "recomputes": recomputes(delta),
        "bottleneck": _bottleneck(under_load, measured.slo, max_num_seqs),
        "router": _router(under_load),
        "split_fraction": split_fraction(_by_url(results)),
        "engines": engines_sentence(_by_url(results)),
        "warnings": list(dict.fromkeys(warning for result in results for warning in result.warnings)),
    }
    if mode == DISAGGREGATED:
        served["disaggregated_fraction"] = disaggregated_fraction(delta)
    return served


def _by_url(results: Sequence[ReplayResult]) -> dict[str, MetricsDelta]:
    """Add up what each server counted in several rounds."""
    urls = dict.fromkeys(url for result in results for url in result.deltas)
    return {url: add_up(result.deltas[url] for result in results if url in result.deltas) for url in urls}


def _bottleneck(results: Sequence[ReplayResult], slo: Slo, max_num_seqs: str) -> dict[str, Any]:
    """Name what was short, by the rule of `ridgeline.roofline.bottleneck`; engines that differ have no one number."""
    ttft_s, tpot_s, gap_s = slo.in_seconds()
    records = [record for result in results for record in result.counted_records]
    in_time = sum(record.meets(ttft_s, NO_LIMIT_S, NO_LIMIT_S) for record in records) / len(records)
    steady = sum(record.meets(NO_LIMIT_S, tpot_s, gap_s) for record in records) / len(records)
    places = int(max_num_seqs) if max_num_seqs.isdecimal() else None
    found: dict[str, Any] = msgspec.to_builtins(bottleneck(fleet_state(_by_url(results), in_time, steady, places)))
    return found


def _router(results: Sequence[ReplayResult]) -> dict[str, Any] | None:
    """Return the router's share of the latencies; None for a server that is not Ridgeline's."""
    counted = [result.metrics for result in results if result.metrics is not None]
    if not counted:
        return None
    figures = summarise([one for result in results for one in result.counted_records], 1.0, Slo())
    found = router_share(add_up(counted), _seconds(figures["mean_ttft_ms"]), _seconds(figures["mean_e2el_ms"]))
    return dict(msgspec.to_builtins(found)) | {"sentence": found.sentence}


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _pauses(measured: _Measured, held: Mapping[VariantLabel, MaxGoodputRate]) -> Pauses | None:
    """Return the longest pauses at the measured rates that all variants hold; None if there is no such rate."""
    loaded = loaded_rates(measured.counts(measured.slo.in_seconds()), measured.attainment)
    below = [rate for rate in measured.rates if rate < min(loaded, default=math.inf)]
    if not below:
        return None
    found = dict.fromkeys(held, 0.0)
    for each, result in measured.kept():
        if measured.rates[each.pair] in below:
            gaps_s = [gap_s for one in result.counted_records if one.ok and (gap_s := one.largest_gap_s) is not None]
            label = measured.labels[each.side]
            found[label] = max([found[label], *gaps_s])
    # Answers of one token have no pauses.
    return Pauses(max(below), found) if all(found.values()) else None


def _map(measured: _Measured, plan: ComparePlan, load: Load) -> dict[str, Any] | None:
    """Return the map over SLOs, in requests/s as the verdict is; None without SLOs to show."""
    kept = measured.kept()
    grid = grid_of([record for _, result in kept for record in result.counted_records], load.unloaded, plan.slos)
    if grid is None:
        return None
    at_rates: dict[str, list[tuple[float, Sequence[RequestRecord]]]] = {side: [] for side in measured.labels}
    for each, result in measured.judged():
        at_rates[each.side].append((measured.rates[each.pair], result.counted_records))
    labels: dict[str, str] = {str(side): label for side, label in measured.labels.items()}
    undisturbed = len(undisturbed_pairs(measured.rounds))
    found = rate_map(at_rates, labels, grid, plan.attainment, plan.deadline_s, undisturbed)
    return dict(msgspec.to_builtins(found))
