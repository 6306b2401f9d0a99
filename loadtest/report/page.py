"""Writes report.html, a single file with plotly.js inside, which opens offline. Called at the end of `compare`."""

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report import plots
from ridgeline.loadtest.report.pools import ratio
from ridgeline.loadtest.report.tables import (
    DASH,
    DEVICE_ROWS,
    POOL_ROWS,
    ROUND_HEADER,
    TUNING_HEADER,
    TUNING_TITLE,
    FigureTable,
    device_columns,
    figure_table,
    format_figure,
    pool_sentences,
    pools_of,
    round_rows,
    served_model,
    tuning_rows,
    variant_table,
)
from ridgeline.loadtest.run.quantities import counted

TEMPLATE_FILE = Path(__file__).parents[1] / "data" / "report.html.template"
WINNER_COLORS = {"equivalent": "#0b8a6b", "unclear": "#b8c0cc", "unreachable": "#1b2330", "not measured": "#ffffff"}
Summary = Mapping[str, Any]


def write_report(path: Path, summary: Summary, records: plots.Records) -> Path:
    """Fill the template with the outcome, the tables and the plots; return the path."""
    outcome = summary["outcome"]
    template = Template(TEMPLATE_FILE.read_text(encoding="utf-8"))
    page = template.substitute(
        title=html.escape(" against ".join(variant["label"] for variant in summary["variants"].values())),
        headline=html.escape(outcome["headline"]),
        tail=html.escape(outcome["tail"]),
        details=html.escape(outcome["details"]),
        better=outcome["better"] or "none",
        setting=html.escape(_setting(summary)),
        warnings=_warnings(summary),
        variants_table=_html_figures(variant_table(summary)),
        rounds_table=html_table(ROUND_HEADER, round_rows(summary)),
        intervals=html.escape(f"In parentheses: {summary['formulas']['ci']}. {DASH}."),
        pools_table=_pools_table(summary),
        devices=_devices(summary),
        winner_map=_winner_map(summary),
        tuning=_tuning(summary),
        plots="\n".join(plot_card(figure) for figure in _figures(summary, records) if figure is not None),
        method=_method(summary),
        formulas=_formulas(summary),
        plotly_js=get_plotlyjs(),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _figures(summary: Summary, records: plots.Records) -> list[go.Figure | None]:
    slo = Slo(**summary["slo"])
    return [
        plots.pair_dots(summary),
        plots.latency_dots(summary),
        plots.attainment_curve(summary, records, slo),
        plots.roofline(summary["variants"]),
        plots.latency_cdf(summary, records, "ttft", "Time to first token", slo.ttft_ms),
        plots.latency_cdf(summary, records, "tpot", "Time per output token", slo.tpot_ms),
        plots.gap_tail(summary, records, slo.gap_ms),
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
    trace, plan, machine, load = (summary[part] for part in ("trace", "plan", "machine", "load"))
    rate = f" at {load['rate']:.3g} requests/s ({load['rate_source']})" if load["rate"] else ""
    pairs = len(summary["pairs"])
    model = f"Model {name} · trace" if (name := served_model(summary)) else "Trace"
    return (
        f"{model} '{trace['name']}': {pairs} of at most {plan['pairs']} pairs of rounds, {trace['requests']} requests "
        f"each{rate} · "
        f"SLOs: {load['slo_source']} · {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    )


def _warnings(summary: Summary) -> str:
    found = [
        f"{variant['label']}: {warning}"
        for variant in summary["variants"].values()
        for warning in dict.fromkeys(variant["warnings"])
    ]
    disturbed = sum(each["valid"] and bool(each["reasons"]) for each in summary["rounds"])
    if disturbed:
        found.append(f"rounds kept although they were disturbed, since their repeats were disturbed too: {disturbed}")
    return "".join(f'<p class="warning">{html.escape(warning)}</p>' for warning in found)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_figures(figures: FigureTable) -> str:
    rows = [[label, *cells, formula] for label, cells, formula in figures.rows]
    return html_table(["", *figures.columns, "formula"], rows)


def _pools_table(summary: Summary) -> str:
    pools = pools_of(summary)
    if not pools:
        return "<p>The server published no figures by pool.</p>"
    found = figure_table(pools, POOL_ROWS, summary["formulas"])
    bound = ("bound by", tuple(figures["bound"] or "-" for figures in pools.values()), summary["formulas"]["bound"])
    return _html_figures(found._replace(rows=(*found.rows, bound))) + _steps_table(pools)


def _steps_table(pools: Mapping[str, Summary]) -> str:
    steps = ("kind of step", "busy, s", "mean step, ms", "on its roof, ms")
    header = ("pool", *steps, "FLOP/byte", "MFU", "MBU", "bound by")
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
    return html_table(header, rows) if rows else ""


def _devices(summary: Summary) -> str:
    columns = device_columns(summary)
    if not columns:
        return ""
    table = _html_figures(figure_table(columns, DEVICE_ROWS, summary["formulas"]))
    return f'<section class="card figures"><h2>Per device</h2>{table}</section>'


def _tuning(summary: Summary) -> str:
    rows = tuning_rows(summary)
    if not rows:
        return ""
    rounds = counted(summary["tuning"]["rounds_per_candidate"], "round")
    note = (
        f"Each candidate had {rounds} before the pairs, with requests that "
        "no pair has. These rounds chose, and are in no other figure. "
    ) + ". ".join(f"{each[0].upper()}{each[1:]}" for each in summary["tuning"]["sentences"])
    return (
        f'<section class="card"><h2>{TUNING_TITLE}</h2>{html_table(TUNING_HEADER, rows)}'
        f'<p class="muted">{html.escape(note)}.</p></section>'
    )


def _winner_map(summary: Summary) -> str:
    """Return the map as a table, coloured by winner, with the shares of all variants; empty if there is none."""
    found = summary.get("winner_map")
    if found is None:
        return ""
    labels = {side: variant["label"] for side, variant in summary["variants"].items()}
    return limits_table(
        "Which variant meets which SLOs",
        "In each cell: the share of requests within the SLOs",
        found,
        labels,
        lambda cell: [f"{cell['attainment'][side]:.0%}" for side in labels],
    )


def limits_table(
    title: str, what: str, found: Summary, labels: Mapping[str, str], figures: Callable[[Summary], Sequence[str]]
) -> str:
    """Return a map over SLOs as a table, coloured by winner; `figures` gives a cell's figure of each variant."""
    colors = dict(zip(labels, plots.VARIANT_COLORS, strict=False)) | WINNER_COLORS
    tpots_ms, cells = found["grid"]["tpot_ms"], iter(found["cells"])
    head = "".join(f"<th>TPOT &le; {tpot_ms:g} ms</th>" for tpot_ms in tpots_ms)
    body = "".join(
        f"<tr><td>TTFT &le; {ttft_ms:g} ms</td>"
        + "".join(_winner_cell(next(cells), labels, colors, figures) for _ in tpots_ms)
        + "</tr>"
        for ttft_ms in found["grid"]["ttft_ms"]
    )
    note = f"{found['sentence']} {what}, {' / '.join(labels.values())}. SLOs: {found['grid']['source']}."
    return (
        f'<section class="card map"><h2>{title}</h2><table><thead><tr><th></th>{head}</tr>'
        f'</thead><tbody>{body}</tbody></table><p class="muted">{html.escape(note)}</p></section>'
    )


def _winner_cell(
    cell: Summary,
    labels: Mapping[str, str],
    colors: Mapping[str, str],
    figures: Callable[[Summary], Sequence[str]],
) -> str:
    winner = cell["winner"]
    shown = html.escape(" / ".join(figures(cell)))
    text = html.escape(labels.get(winner, winner))
    return (
        f'<td style="border-left:6px solid {colors[winner]}"><b>{text}</b><br><span class="muted">{shown}</span></td>'
    )


def _method(summary: Summary) -> str:
    variants, plan, trace, found = summary["variants"], summary["plan"], summary["trace"], summary["outcome"]
    recomputed = {variant["label"]: variant["recomputes"] or "none" for variant in variants.values()}
    discarded = sum(not each["valid"] for each in summary["rounds"])
    looks = ", ".join(map(str, found["looks"]))
    lines = [
        "Rounds are the units: the two rounds of a pair have the same arrivals and lengths, in an order drawn at "
        "random; no two rounds share a prompt's beginning, so prefix caches were cold. "
        f"Rounds that were discarded and repeated: {discarded}.",
        "Attainment decides, by the t interval over pairs, never narrower than Newcombe's score interval of the paired "
        f"shares, and by the exact sign-flip test. The result was looked at after {looks} of at most {plan['pairs']} "
        f"pairs; this look's intervals have {1 - found['level']:.1%}, so that all looks together err in at most 5 % of "
        "comparisons. Latencies are secondary: the mean log ratio of the requests that finished in both variants, with "
        "Holm's correction.",
        "Open-loop: each request left at its time in the trace, whatever the server did. "
        f"Each server was warmed up until every worker had made a step. Prompts are real English, {_exactness(plan)}; "
        "each answer has exactly the trace's number of tokens (ignore_eos), greedy.",
        *pool_sentences(summary),
        f"Recomputed prompts, by reason: {'; '.join(f'{label} {reasons}' for label, reasons in recomputed.items())}.",
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in summary["load"]["sentences"]),
        *(f"Trace: {change}." for change in trace["changes"]),
    ]
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _exactness(plan: Summary) -> str:
    as_text = ("text_prompts", "baseline_text_prompts")
    is_text = any(map(plan.get, as_text)) or "chat" in (plan.get("endpoint"), plan.get("baseline_endpoint"))
    return "some or all sent as text, a few tokens shorter" if is_text else "exact to the token"


def _formulas(summary: Summary) -> str:
    return html_table(["figure", "formula"], [[name, formula] for name, formula in summary["formulas"].items()])
