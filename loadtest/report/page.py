"""Writes report.html of a comparison, a single file with plotly.js inside, which opens offline, and prints its tables.

The first screen has the verdict, the counts that it rests on, and the highest rates.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from rich.console import Console

from ridgeline.loadtest.plan import MODES, Slo
from ridgeline.loadtest.report import plots
from ridgeline.loadtest.report.pools import ratio
from ridgeline.loadtest.report.tables import (
    POOL_ROWS,
    figure_rows,
    format_figure,
    pool_sentences,
    pools_of,
    print_table,
    served_model,
)
from ridgeline.loadtest.report.wording import loaded_rates, rate_text, shares_at
from ridgeline.loadtest.statistics.attainment_curve import MaxGoodputRate, RoundCount

TEMPLATE_FILE = Path(__file__).parents[1] / "data" / "report.html.template"
WINNER_COLORS = {"alike": "#0b8a6b", "unclear": "#b8c0cc", "unreachable": "#64748b", "not measured": "var(--line)"}
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
RATIO_HEADER = ("", "ratio of highest rates", "interval", "known")
Summary = Mapping[str, Any]


def print_comparison(summary: Summary, console: Console) -> None:
    """Print what each variant did, and the verdict."""
    share = f"{summary['attainment']:.0%} of requests within {Slo(**summary['slo'])}"
    print_table(f"Highest rate with {share}", *rate_rows(summary), console)
    for sentence in (*summary["verdict"]["sentences"], *explanations(summary), *pool_sentences(summary)):
        console.print(sentence, highlight=False, markup=False)
    for difference in summary["unequal"]:
        console.print(f"not equal: {difference}", style="bold red", highlight=False, markup=False)


def explanations(summary: Summary) -> list[str]:
    """Say what was short in each variant under load, and the router's part where it matters."""
    return [
        f"{variant['label']}: {sentence}"
        for variant in summary["variants"].values()
        for sentence in (variant["bottleneck"]["sentence"], _router(variant), variant["engines"], _split(variant))
        if sentence
    ]


def _router(variant: Summary) -> str:
    sentence: str = variant["router"]["sentence"] if variant["router"] else ""
    return sentence


def _split(variant: Summary) -> str:
    """Say what share of a running server's work really went through both pools."""
    share = variant["split_fraction"]
    is_told = share and variant["mode"] not in MODES
    return f"{share:.0%} of its work went through prefill and decode engines." if is_told else ""


def rate_rows(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return a header, and a row for each variant: its highest rate, and latencies at a rate that it held."""
    variants = summary["variants"].values()
    header = ["", "highest rate, requests/s", "share under load", "output tokens/s"]
    header += ["latencies at, requests/s", "TTFT p50", "TPOT p50", "longest pause"]
    is_per_device = all(variant["per_device"] for variant in variants)
    if is_per_device:
        header.append(f"requests/s per {next(iter(variants))['per_device']['unit']}")
    loaded = _shares_under_load(summary)
    rows = []
    for variant in variants:
        point = _held_point(variant, summary["attainment"])
        row = [
            variant["label"],
            rate_text(MaxGoodputRate(**variant["max_goodput_rate"])),
            format_figure(loaded.get(variant["label"]), ".0%"),
            format_figure(variant["output_tokens_per_s"], ".0f"),
            format_figure(point and point["rate"], ".3g"),
            *(_ms(point and point[name]) for name in ("median_ttft_ms", "median_tpot_ms", "max_itl_ms")),
        ]
        rows.append([*row, format_figure(variant["per_device"]["rate_per_device"], ".3g")] if is_per_device else row)
    costs = [(variant["per_device"] or {}).get("cost_per_million_output_tokens") for variant in variants]
    if any(cost is not None for cost in costs):
        header.append("cost of 1M output tokens")
        rows = [[*row, format_figure(cost, ".3g")] for row, cost in zip(rows, costs, strict=True)]
    return header, rows


def _shares_under_load(summary: Summary) -> dict[str, float]:
    """Return what the sentences count: the shares at the rates at which a variant missed the attainment."""
    counts = {
        variant["label"]: [
            RoundCount(each["rate"], each["met"], each["total"])
            for each in summary["rounds"]
            if each["valid"] and each["label"] == variant["label"]
        ]
        for variant in summary["variants"].values()
    }
    return shares_at(counts, loaded_rates(counts, summary["attainment"]))


def _held_point(variant: Summary, attainment: float) -> Any:
    """Return the figures at the highest measured rate at which the variant reached the attainment; None without one."""
    held = [point for point in variant["points"] if point["attainment"] >= attainment]
    return max(held, key=lambda point: float(point["rate"]), default=None)


def _ms(value_ms: float | None) -> str:
    if value_ms is None:
        return "-"
    return f"{value_ms / 1e3:.2f} s" if value_ms >= 1e3 else f"{value_ms:.0f} ms"


def ratio_rows(summary: Summary) -> list[list[str]]:
    """Return a row for each two variants: the ratio of their highest rates, and what is known of them."""
    verdict = summary["verdict"]
    known = {tuple(two): f"{two[0]} serves more" for two in verdict["serves_more"]}
    known |= {tuple(two): "alike" for two in verdict["alike"]}
    return [
        [
            f"{each['one']} / {each['other']}",
            f"{each['ratio']:.2f}",
            f"{each['low']:.2f} to {each['high']:.2f}",
            known.get((each["one"], each["other"]), "not told apart"),
        ]
        for each in verdict["ratios"]
    ]


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
            ((point, variant) for variant in summary["variants"].values() for point in variant["points"]),
            key=lambda found: float(found[0]["rate"]),
        )
    ]


def round_rows(summary: Summary) -> list[list[str]]:
    """Return a row for each round, discarded ones too, in the order in which they ran."""
    return [
        [
            str(each["pair"] + 1),
            f"{each['rate']:.3g}",
            each["label"],
            f"{each['met']} of {each['total']}",
            format_figure(each.get("attainment"), ".0%"),
            ("" if each["valid"] else "discarded: ") + "; ".join(each["reasons"]),
        ]
        for each in summary["rounds"]
    ]


def write_report(path: Path, summary: Summary) -> Path:
    """Write the page; return the path."""
    headline, *sentences = summary["verdict"]["sentences"]
    page = Template(TEMPLATE_FILE.read_text(encoding="utf-8")).substitute(
        title=html.escape(" against ".join(variant["label"] for variant in summary["variants"].values())),
        headline=html.escape(headline),
        sentences="".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences),
        setting=html.escape(_setting(summary)),
        warnings=_warnings(summary),
        rates=html_table(*rate_rows(summary)),
        explanations="".join(f"<li>{html.escape(line)}</li>" for line in explanations(summary)),
        equality=_equality(summary),
        ratios=html_table(RATIO_HEADER, ratio_rows(summary)),
        attainment=plot_card(plots.attainment_against_rate(summary)),
        figures="\n".join(plot_card(figure) for figure in _figures(summary) if figure is not None),
        pools=_pools_table(summary),
        slo_map=_slo_map(summary),
        points=html_table(POINT_HEADER, point_rows(summary)),
        rounds=html_table(ROUND_HEADER, round_rows(summary)),
        method="".join(f"<li>{html.escape(line)}</li>" for line in _method(summary)),
        formulas=html_table(["figure", "formula"], [[name, text] for name, text in summary["formulas"].items()]),
        plotly_js=get_plotlyjs(),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _figures(summary: Summary) -> list[go.Figure | None]:
    slo = Slo(**summary["slo"])
    return [
        plots.against_rate(summary, "request_goodput", "Goodput", "requests/s within the SLOs"),
        plots.against_rate(summary, "median_ttft_ms", "Time to first token, median", "ms", slo.ttft_ms),
        plots.against_rate(summary, "median_tpot_ms", "Time per output token, median", "ms", slo.tpot_ms),
        plots.roofline(summary["variants"]),
        plots.stage_bars(summary["variants"]),
    ]


def plot_card(figure: go.Figure) -> str:
    """Return a plot with its title, legend and note above it."""
    markup: str = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        include_mathjax=False,
        config={"displayModeBar": False, "responsive": True},
    )
    head = f"<h2>{html.escape(figure.layout.meta['title'])}</h2>{_legend(figure)}{_note(figure)}"
    return f'<div class="card plot">{head}{markup}</div>'


def _legend(figure: go.Figure) -> str:
    """Return the legend as HTML outside the plot, where it can wrap to the width of the page."""
    entries = [
        f'<span><i style="background:{trace.marker.color or trace.line.color}"></i>{html.escape(trace.name)}</span>'
        for trace in figure.data
        if trace.name and trace.showlegend is not False
    ]
    return f'<p class="legend">{"".join(entries)}</p>'


def _note(figure: go.Figure) -> str:
    note = figure.layout.meta["note"]
    return f'<p class="legend muted">{html.escape(note)}</p>' if note else ""


def _setting(summary: Summary) -> str:
    machine, trace = summary["machine"], summary["trace"]
    model = f"model {name} · " if (name := served_model(summary)) else ""
    return (
        f"{summary['attainment']:.0%} of requests within {Slo(**summary['slo'])} · {model}trace '{trace['name']}' · "
        f"{sum(each['valid'] for each in summary['rounds'])} rounds in {summary['took_s'] / 60:.1f} minutes · "
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    )


def _warnings(summary: Summary) -> str:
    found = [f"not equal: {each}" for each in summary["unequal"]]
    found += [f"{variant['label']}: {text}" for variant in summary["variants"].values() for text in variant["warnings"]]
    disturbed = sum(each["valid"] and bool(each["reasons"]) for each in summary["rounds"])
    if disturbed:
        found.append(f"rounds kept although they were disturbed, since their repeats were disturbed too: {disturbed}")
    return "".join(f'<p class="warning">{html.escape(warning)}</p>' for warning in found)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _equality(summary: Summary) -> str:
    """Return the settings of all variants, with those that differ in red."""
    facts = summary["facts"]
    rows = [[name, *(each[name] for each in facts.values())] for name in next(iter(facts.values()))]
    red = "".join(f'<p class="unequal">Not equal: {html.escape(each)}.</p>' for each in summary["unequal"])
    return red + html_table(["", *facts], rows)


def _pools_table(summary: Summary) -> str:
    pools = pools_of(summary)
    if not pools:
        return "<p>No server published figures by pool.</p>"
    found = figure_rows(list(pools.values()), POOL_ROWS, summary["formulas"])
    found.append(["bound by", *(each["bound"] or "-" for each in pools.values()), summary["formulas"]["bound"]])
    steps = ("kind of step", "busy, s", "mean step, ms", "on its roof, ms")
    rows = [
        [
            name,
            kind,
            f"{found['busy_seconds']:.1f}",
            format_figure(ratio(1e3 * found["busy_seconds"], found["steps"]), ".1f"),
            format_figure(ratio(found["roof_seconds"] and 1e3 * found["roof_seconds"], found["steps"]), ".1f"),
            f"{found['arithmetic_intensity']:.1f}",
            format_figure(found["mfu"], ".1%"),
            format_figure(found["mbu"], ".1%"),
            found["bound"] or "-",
        ]
        for name, pool in pools.items()
        for kind, found in pool["step_kinds"].items()
    ]
    of_steps = html_table(("pool", *steps, "FLOP/byte", "MFU", "MBU", "bound by"), rows) if rows else ""
    return html_table(["", *pools, "formula"], found) + of_steps


def _slo_map(summary: Summary) -> str:
    """Return the map over SLOs as a table, coloured by winner; empty for a run that has none."""
    found = summary["map"]
    if found is None:
        return ""
    labels = {side: variant["label"] for side, variant in summary["variants"].items()}
    colors = dict(zip(labels, plots.VARIANT_COLORS, strict=False)) | WINNER_COLORS
    tpots_ms, cells = found["grid"]["tpot_ms"], iter(found["cells"])
    head = "".join(f"<th>TPOT &le; {tpot_ms:g} ms</th>" for tpot_ms in tpots_ms)

    def cell(each: Summary) -> str:
        figures = (rate_text(MaxGoodputRate(**one)) for one in each["max_goodput_rates"].values())
        winner: str = each["winner"]
        text = html.escape(labels.get(winner, winner))
        shown = html.escape(" / ".join(figures))
        color = colors[winner]
        return f'<td style="border-left:6px solid {color}"><b>{text}</b><br><span class="muted">{shown}</span></td>'

    body = "".join(
        f"<tr><td>TTFT &le; {ttft_ms:g} ms</td>{''.join(cell(next(cells)) for _ in tpots_ms)}</tr>"
        for ttft_ms in found["grid"]["ttft_ms"]
    )
    note = (
        f"{found['sentence']} In each cell: the highest rate at an attainment of {summary['attainment']:.0%}, "
        f"{found['unit']}, {' / '.join(labels.values())}. SLOs: {found['grid']['source']}."
    )
    return (
        f'<div class="map"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
        f'<p class="muted">{html.escape(note)}</p></div>'
    )


def _method(summary: Summary) -> list[str]:
    variants, plan = summary["variants"], summary["plan"]
    discarded = sum(not each["valid"] for each in summary["rounds"])
    recomputed = {one["label"]: one["recomputes"] for one in variants.values() if one["recomputes"]}
    is_text = plan["text_prompts"] or plan["endpoint"] == "chat"
    prompts = "sent as text, a few tokens shorter" if is_text else "exact to the token"
    lines = [
        "The rounds of a pair have the same arrivals and lengths, in an order drawn at random; no two rounds share a "
        f"prompt's beginning. Rounds that were discarded and repeated: {discarded}.",
        "Open-loop: each request left at its time in the trace, whatever the server did. Prompts are real English, "
        f"{prompts}; each answer has exactly the trace's number of tokens (ignore_eos), greedy. A request was given up "
        f"after {plan['deadline_s']:.3g} s.",
        "Without --rate, rates grow or fall by a factor of 1.5 until each variant reaches the attainment at one and "
        "misses it at another; later pairs go to where the widest interval is. The widths of the intervals end a run, "
        "never which variant is ahead.",
        "A queue that grows slowly is only seen by longer rounds: highest rates are those of rounds of this length.",
        *(f"Recomputed prompts of {label}, by reason: {reasons}." for label, reasons in recomputed.items()),
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in summary["load"]["sentences"]),
        *(f"Trace: {change}." for change in summary["trace"]["changes"]),
    ]
    return [line.replace("..", ".") for line in lines]
