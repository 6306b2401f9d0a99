"""Reports which rate each variant holds: summary.json, page and tables of a search."""

import html
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from plotly.offline import get_plotlyjs
from rich.console import Console

from ridgeline.loadtest.plan import ComparePlan, Slo
from ridgeline.loadtest.rate_search import MaxGoodputRate, Ratio, bands, max_goodput_rate, ratio_of
from ridgeline.loadtest.rate_search import Round as Counted
from ridgeline.loadtest.report import plots
from ridgeline.loadtest.report.page import TEMPLATE_FILE, html_table, limits_table, plot_card
from ridgeline.loadtest.report.rounds import Round, VariantLabel
from ridgeline.loadtest.report.summary import SCHEMA
from ridgeline.loadtest.report.tables import format_figure, print_table
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.machine import describe_machine
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.slo_maps import grid_of, rate_map
from ridgeline.loadtest.statistics.outcome import Side
from ridgeline.loadtest.variants import Devices

RATE_FORMULAS = {
    "max_goodput_rate": "rate at which the share of requests within every SLO falls to the target, on the line through "
    "the shares at the two measured rates around it (logarithm of the rate); shares that rise with the rate are pooled",
    "interval of max_goodput_rate": "from the highest measured rate that exceeds the share to the lowest that misses "
    "it, each by the score test at 5 %, with the scatter between rounds of one rate; open where no measured rate does",
    "ratio": "the maximum goodput rate of one variant / another's; its interval joins both (Zou and Donner 2008)",
    "rate_per_device": "maximum goodput rate / devices",
    "cost_per_million_output_tokens": "price of a device's hour x devices / 3600 / (rate x mean output tokens of a "
    "request) x 1,000,000; of all requests, met SLOs or not",
}
Summary = Mapping[str, Any]


def summarise_rates(
    found: Mapping[str, Sequence[Counted]],
    rates: Sequence[float],
    rounds: Sequence[Round],
    labels: Mapping[Side, VariantLabel],
    plan: ComparePlan,
    load: Load,
    devices: Mapping[Side, Devices | None],
) -> dict[str, Any]:
    """Return the content of summary.json; `rates` has that of each pair, `found` the valid rounds of each variant."""
    max_goodput_rates = {side: max_goodput_rate(found[side], plan.attainment) for side in labels}
    ratios = {
        (one, other): ratio_of(max_goodput_rates[one], max_goodput_rates[other])
        for one, other in combinations(labels, 2)
    }
    traces = [each.result.trace for each in rounds if each.result is not None]
    output_tokens = [row.output_tokens for trace in traces for row in trace.rows]
    mean_output_tokens = sum(output_tokens) / len(output_tokens)
    return {
        "schema": SCHEMA,
        "rates": {
            "attainment": plan.attainment,
            "sentences": [
                *(_max_rate_sentence(labels[side], max_goodput_rates[side], plan) for side in labels),
                *(_ratio_sentence(f"{labels[b]} / {labels[a]}", found) for (a, b), found in ratios.items()),
            ],
            "variants": {
                side: {
                    "label": label,
                    "max_goodput_rate": msgspec.to_builtins(max_goodput_rates[side]),
                    "bands": [msgspec.to_builtins(band) | {"share": band.share} for band in bands(found[side])],
                    "per_device": _per_device(
                        max_goodput_rates[side], devices[side], mean_output_tokens, plan.price_per_hour
                    ),
                }
                for side, label in labels.items()
            },
            "ratios": {f"{b} / {a}": msgspec.to_builtins(found) for (a, b), found in ratios.items()},
            "map": _map(rates, rounds, labels, plan, load, devices),
            "rounds": [_round(each, rates[each.pair], labels[each.side], plan.slos) for each in rounds],
        },
        "slo": plan.slos.model_dump(),
        "load": load.as_summary(plan.slos),
        "trace": {"name": traces[0].name, "requests": len(traces[0].rows), "changes": traces[0].notes},
        "plan": plan.model_dump(),
        "machine": describe_machine(),
        "formulas": RATE_FORMULAS,
    }


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


def _max_rate_sentence(label: VariantLabel, found: MaxGoodputRate, plan: ComparePlan) -> str:
    head = f"{label}: {plan.attainment:.0%} of requests within the SLOs"
    if found.outcome == "above":
        return f"{head} at every rate measured; {_ends(found.low, found.high)}."
    if found.outcome == "below":
        return f"{head} at no rate measured; {_ends(found.low, found.high)}."
    return f"{head} up to about {found.rate:.3g} requests/s; {_ends(found.low, found.high)}."


def _ends(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "too few rounds for an interval"
    if high is None:
        return f"at least {low:.3g}, no upper end was shown"
    if low is None:
        return f"below {high:.3g}, no lower end was shown"
    return f"95 % interval {low:.3g} to {high:.3g}"


def _ratio_sentence(names: str, found: Ratio) -> str:
    if found.low is None and found.high is None:
        return f"{names}: the rounds give no interval of the ratio, so no difference was shown."
    about = "" if found.ratio is None else f"x {found.ratio:.2f}; "
    ends = _ends(found.low, found.high).replace("95 % interval", "95 % interval x").replace(" to ", " to x ")
    said = (
        "which excludes x 1"
        if found.is_above_one or found.is_below_one
        else "which includes x 1, so no difference was shown"
    )
    return f"{names}: {about}{ends}, {said}."


def round_rows(summary: Summary) -> list[list[str]]:
    """Return a row for each round, discarded ones too, in the order in which they ran."""
    return [
        [
            str(each["pair"] + 1),
            f"{each['rate']:.3g}",
            each["label"],
            f"{each['met']} of {each['total']}",
            format_figure(each["attainment"], ".0%"),
            ("" if each["valid"] else "discarded: ") + "; ".join(each["reasons"]),
        ]
        for each in summary["rates"]["rounds"]
    ]


def max_rate_rows(summary: Summary) -> list[list[str]]:
    """Return a row for each figure of the maximum rates, with a column for each variant."""
    variants = list(summary["rates"]["variants"].values())
    rows = [
        [
            "maximum goodput rate, requests/s",
            *(_with_ends(variant["max_goodput_rate"], "rate", "low", "high") for variant in variants),
        ],
    ]
    if all(variant["per_device"] for variant in variants):
        owned = [variant["per_device"] for variant in variants]
        rows.append(["devices", *(f"{one['devices']} {one['unit']}" for one in owned)])
        ends = ("rate_per_device", "low_per_device", "high_per_device")
        rows.append(["maximum goodput rate per device", *(_with_ends(one, *ends) for one in owned)])
        costs = [one["cost_per_million_output_tokens"] for one in owned]
        if any(cost is not None for cost in costs):
            rows.append(["cost of a million output tokens there", *(format_figure(cost, ".3g") for cost in costs)])
    return rows


def _with_ends(found: Summary, rate: str, low: str, high: str) -> str:
    return f"{format_figure(found[rate], '.3g')} ({_short_ends(found[low], found[high])})"


def _short_ends(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "no interval"
    if high is None:
        return f"at least {low:.3g}"
    return f"below {high:.3g}" if low is None else f"{low:.3g} to {high:.3g}"


def _rate_map(summary: Summary) -> str:
    """Return the map of rates as a table; empty for a run that has none."""
    found = summary["rates"].get("map")
    if found is None:
        return ""
    labels = {side: variant["label"] for side, variant in summary["rates"]["variants"].items()}

    def figures(cell: Summary) -> list[str]:
        return [
            _max_rate_text(cell["max_goodput_rates"][side], found["measured"][side])
            for side in cell["max_goodput_rates"]
        ]

    return limits_table(
        "Which variant holds the maximum goodput rate within which SLOs",
        f"In each cell: the maximum goodput rate at an attainment of {summary['rates']['attainment']:.0%}, "
        f"{found['unit']}",
        found,
        labels,
        figures,
    )


def _max_rate_text(found: Summary, measured: Sequence[float]) -> str:
    if found["outcome"] == "below":
        return f"< {measured[0]:.3g}"
    return f"{found['rate']:.3g}" if found["outcome"] == "found" else f"> {measured[1]:.3g}"


def print_rates(summary: Summary, console: Console) -> None:
    """Print what was found on the terminal."""
    variants = summary["rates"]["variants"].values()
    labels = [variant["label"] for variant in variants]
    by_rate = [{band["rate"]: band for band in variant["bands"]} for variant in variants]
    shares = [
        [f"{rate:.3g}", *(_share_cell(of_variant.get(rate)) for of_variant in by_rate)]
        for rate in sorted({rate for of_variant in by_rate for rate in of_variant})
    ]
    print_table("Within the SLOs", ["requests/s", *labels], shares, console)
    print_table("", ["", *labels], max_rate_rows(summary), console)
    if (found := summary["rates"].get("map")) is not None:
        console.print(found["sentence"], highlight=False, markup=False)
    for sentence in summary["rates"]["sentences"]:
        console.print(sentence, style="bold", highlight=False, markup=False)


def _share_cell(band: Summary | None) -> str:
    if band is None:
        return "-"
    rounds = f"{band['rounds']} round{'' if band['rounds'] == 1 else 's'}"
    return f"{band['share']:.0%} ({band['low']:.0%} to {band['high']:.0%}, {rounds})"


def write_rate_report(path: Path, summary: Summary) -> Path:
    """Write the page of a search; return the path."""
    rates, machine = summary["rates"], summary["machine"]
    labels = [variant["label"] for variant in rates["variants"].values()]
    max_goodput_rates, ratios = rates["sentences"][: len(labels)], rates["sentences"][len(labels) :]
    discarded = sum(not each["valid"] for each in rates["rounds"])
    disturbed = sum(each["valid"] and bool(each["reasons"]) for each in rates["rounds"])
    warning = f"{disturbed} rounds were kept although they were disturbed, since their repeats were disturbed too"
    method = [
        f"The rounds of a pair have the same {summary['trace']['requests']} requests at the same rate, in an order "
        f"drawn at random; each pair has requests of its own. Rounds "
        f"that were discarded and repeated: {discarded}.",
        "Rates are doubled or halved until each variant holds the share at one and misses it at another, then "
        "bisected, with three pairs at a rate; then pairs go where an interval is open.",
        "The maximum is that of rounds of this length: a queue that grows slowly is only seen by longer ones. "
        f"A request was given up after {summary['plan']['deadline_s']:.3g} s.",
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in summary["load"]["sentences"]),
        *(f"Trace: {change}." for change in summary["trace"]["changes"]),
    ]
    body = Template(TEMPLATE_FILE.with_name("rates.html.template").read_text(encoding="utf-8")).substitute(
        headline=html.escape(" ".join(max_goodput_rates)),
        ratio=html.escape(" ".join(ratios)),
        setting=html.escape(
            f"SLOs: {Slo(**summary['slo'])} · trace '{summary['trace']['name']}' · {machine['processor']}, "
            f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
        ),
        warnings=f'<p class="warning">{html.escape(warning)}</p>' if disturbed else "",
        max_goodput_rates=html_table(["", *labels], max_rate_rows(summary)),
        rate_map=_rate_map(summary),
        plot=plot_card(plots.attainment_against_rate(rates)),
        rounds=html_table(
            ["pair", "requests/s", "variant", "within the SLOs", "share", "discarded or disturbed"], round_rows(summary)
        ),
        method="".join(f"<li>{html.escape(line)}</li>" for line in method),
        formulas=html_table(["figure", "formula"], [[name, text] for name, text in summary["formulas"].items()]),
    )
    whole = TEMPLATE_FILE.read_text(encoding="utf-8")
    head, _ = whole.split("<main>")
    page = Template(head).substitute(title=html.escape(" against ".join(labels)), plotly_js=get_plotlyjs())
    path.write_text(page + body, encoding="utf-8")
    return path
