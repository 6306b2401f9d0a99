"""Shows a comparison over rates: a table on the terminal, and report.html, whose first screen has the answer."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from rich.console import Console

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report import plots
from ridgeline.loadtest.report.page import TEMPLATE_FILE, html_table, limits_table, plot_card
from ridgeline.loadtest.report.tables import format_figure, print_table, served_model
from ridgeline.loadtest.report.wording import interval_text

Summary = Mapping[str, Any]


def print_rates(summary: Summary, console: Console) -> None:
    """Print the rate that each variant holds, and the sentences that no table says."""
    rates = summary["rates"]
    header, rows = rate_rows(summary)
    share = f"{rates['attainment']:.0%} of requests within {Slo(**summary['slo'])}"
    print_table(f"Highest rate with {share}", header, rows, console)
    for sentence in rates["sentences"]:
        console.print(sentence, highlight=False, markup=False)


def rate_rows(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return a header, and a row for each variant: its highest rate, and latencies at the measured rate below it."""
    header = ["", "requests/s", "95 % interval", "output tokens/s", "TTFT p50", "TPOT p50", "longest pause"]
    variants = summary["rates"]["variants"].values()
    is_per_device = all(variant["per_device"] for variant in variants)
    if is_per_device:
        header.append(f"requests/s per {next(iter(variants))['per_device']['unit']}")
    rows = []
    for variant in variants:
        found, point = variant["max_goodput_rate"], _held_point(variant)
        row = [
            variant["label"],
            _rate_text(found, variant["points"]),
            interval_text(found["low"], found["high"]),
            format_figure(variant["output_tokens_per_s"], ".0f"),
            *(_ms(point[name]) for name in ("median_ttft_ms", "median_tpot_ms", "max_itl_ms")),
        ]
        rows.append([*row, format_figure(variant["per_device"]["rate_per_device"], ".3g")] if is_per_device else row)
    costs = [(variant["per_device"] or {}).get("cost_per_million_output_tokens") for variant in variants]
    if any(cost is not None for cost in costs):
        header.append("cost of 1M output tokens")
        rows = [[*row, format_figure(cost, ".3g")] for row, cost in zip(rows, costs, strict=True)]
    return header, rows


def _held_point(variant: Summary) -> Summary:
    """Return the figures at the highest measured rate that the variant holds; without one, at its lowest."""
    points: Sequence[Summary] = variant["points"]
    limit = variant["max_goodput_rate"]["rate"] or (
        points[-1]["rate"] if variant["max_goodput_rate"]["outcome"] == "above" else 0.0
    )
    return max(
        (point for point in points if point["rate"] <= limit), key=lambda point: point["rate"], default=points[0]
    )


def _rate_text(found: Summary, points: Sequence[Summary]) -> str:
    if found["outcome"] == "below":
        return f"< {points[0]['rate']:.3g}"
    return f"> {points[-1]['rate']:.3g}" if found["outcome"] == "above" else f"{found['rate']:.3g}"


def _ms(value_ms: float | None) -> str:
    if value_ms is None:
        return "-"
    return f"{value_ms / 1e3:.2f} s" if value_ms >= 1e3 else f"{value_ms:.0f} ms"


def point_rows(summary: Summary) -> list[list[str]]:
    """Return a row for each variant at each rate."""
    return [
        [
            f"{point['rate']:.3g}",
            variant["label"],
            str(point["rounds"]),
            format_figure(point["attainment"], ".0%"),
            format_figure(point["request_goodput"], ".3g"),
            format_figure(point["output_throughput"], ".0f"),
            *(_ms(point[f"{rank}_{name}_ms"]) for name in ("ttft", "tpot") for rank in ("median", "p90")),
            _ms(point["max_itl_ms"]),
        ]
        for point, variant in sorted(
            ((point, variant) for variant in summary["rates"]["variants"].values() for point in variant["points"]),
            key=lambda found: float(found[0]["rate"]),
        )
    ]


POINT_HEADER = (
    "requests/s",
    "variant",
    "rounds",
    "within the SLOs",
    "goodput, requests/s",
    "output tokens/s",
    "TTFT p50",
    "TTFT p90",
    "TPOT p50",
    "TPOT p90",
    "longest gap",
)
ROUND_HEADER = ("pair", "requests/s", "variant", "within the SLOs", "share", "discarded or disturbed")


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


def _rate_map(summary: Summary) -> str:
    """Return the map of rates as a table; empty for a run that has none."""
    found = summary["rates"].get("map")
    if found is None:
        return ""
    labels = {side: variant["label"] for side, variant in summary["rates"]["variants"].items()}

    def figures(cell: Summary) -> list[str]:
        return [
            _cell_text(cell["max_goodput_rates"][side], found["measured"][side]) for side in cell["max_goodput_rates"]
        ]

    return limits_table(
        "Which variant holds the maximum goodput rate within which SLOs",
        f"In each cell: the maximum goodput rate at an attainment of {summary['rates']['attainment']:.0%}, "
        f"{found['unit']}",
        found,
        labels,
        figures,
    )


def _cell_text(found: Summary, measured: Sequence[float]) -> str:
    if found["outcome"] == "below":
        return f"< {measured[0]:.3g}"
    return f"{found['rate']:.3g}" if found["outcome"] == "found" else f"> {measured[1]:.3g}"


def write_rate_report(path: Path, summary: Summary) -> Path:
    """Write the page; return the path."""
    rates = summary["rates"]
    headline, *sentences = rates["sentences"]
    body = Template(TEMPLATE_FILE.with_name("rates.html.template").read_text(encoding="utf-8")).substitute(
        headline=html.escape(headline),
        sentences="".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences),
        setting=html.escape(_setting(summary)),
        warnings=_warnings(summary),
        rates=html_table(*rate_rows(summary)),
        attainment=plot_card(plots.attainment_against_rate(rates)),
        figures="\n".join(plot_card(figure) for figure in _figures(summary) if figure is not None),
        rate_map=_rate_map(summary),
        points=html_table(POINT_HEADER, point_rows(summary)),
        rounds=html_table(ROUND_HEADER, round_rows(summary)),
        method="".join(f"<li>{html.escape(line)}</li>" for line in _method(summary)),
        formulas=html_table(["figure", "formula"], [[name, text] for name, text in summary["formulas"].items()]),
    )
    labels = [variant["label"] for variant in rates["variants"].values()]
    head, _ = TEMPLATE_FILE.read_text(encoding="utf-8").split("<main>")
    page = Template(head).substitute(title=html.escape(" against ".join(labels)), plotly_js=get_plotlyjs())
    path.write_text(page + body, encoding="utf-8")
    return path


def _figures(summary: Summary) -> list[go.Figure | None]:
    rates, slo = summary["rates"], Slo(**summary["slo"])
    return [
        plots.against_rate(rates, "request_goodput", "Goodput", "requests/s within the SLOs"),
        plots.against_rate(rates, "median_ttft_ms", "Time to first token, median", "ms", slo.ttft_ms),
        plots.against_rate(rates, "median_tpot_ms", "Time per output token, median", "ms", slo.tpot_ms),
        plots.roofline(rates["variants"]),
    ]


def _setting(summary: Summary) -> str:
    machine, trace, rates = summary["machine"], summary["trace"], summary["rates"]
    model = f"model {name} · " if (name := served_model(summary)) else ""
    return (
        f"{rates['attainment']:.0%} of requests within {Slo(**summary['slo'])} · {model}trace '{trace['name']}' · "
        f"{sum(each['valid'] for each in rates['rounds'])} rounds in {rates['took_s'] / 60:.1f} minutes · "
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    )


def _warnings(summary: Summary) -> str:
    disturbed = sum(each["valid"] and bool(each["reasons"]) for each in summary["rates"]["rounds"])
    warning = f"rounds kept although they were disturbed, since their repeats were disturbed too: {disturbed}"
    return f'<p class="warning">{html.escape(warning)}</p>' if disturbed else ""


def _method(summary: Summary) -> list[str]:
    discarded = sum(not each["valid"] for each in summary["rates"]["rounds"])
    return [
        "The rounds of a pair have the same arrivals and lengths, in an order drawn at random; no two rounds share a "
        "prompt, and all take about as long, as far as the trace has requests. "
        f"Rounds that were discarded and repeated: {discarded}.",
        "Rates grow or fall by a factor of 1.5 until each variant holds the share at one and misses it at another; "
        "later pairs go to where the widest interval is. The widths of the intervals end a run, never which variant is "
        "ahead.",
        "The maximum is that of rounds of this length: a queue that grows slowly is only seen by longer ones. "
        f"A request was given up after {summary['plan']['deadline_s']:.3g} s.",
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in summary["load"]["sentences"]),
        *(f"Trace: {change}." for change in summary["trace"]["changes"]),
    ]
