"""Writes report.html, a single file with plotly.js inside, which opens offline. Called at the end of `compare`."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from loadtest.plan import DISAGGREGATED, Slo
from loadtest.report import plots
from loadtest.report.tables import MODES, POOL_ROWS, ROWS, figure_text, format_figure, pools_of, row_formulas

TEMPLATE_FILE = Path(__file__).parents[1] / "data" / "report.html.template"
Summary = Mapping[str, Any]


def write_report(path: Path, summary: Summary, records: plots.Records) -> Path:
    """Fill the template with the verdict, the tables and the plots; return the path."""
    verdict = summary["verdict"]
    template = Template(TEMPLATE_FILE.read_text(encoding="utf-8"))
    page = template.substitute(
        headline=html.escape(verdict["headline"]),
        tail=html.escape(verdict["tail"]),
        details=html.escape(verdict["sentence"].removeprefix(f"{verdict['headline']} {verdict['tail']}").strip()),
        winner=verdict["winner"] or "none",
        setting=html.escape(_setting(summary)),
        warnings=_warnings(summary),
        modes_table=_modes_table(summary),
        pools_table=_pools_table(summary),
        plots="\n".join(_plot(figure) for figure in _figures(summary, records) if figure is not None),
        method=_method(summary),
        formulas=_formulas(summary),
        plotly_js=get_plotlyjs(),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _figures(summary: Summary, records: plots.Records) -> list[go.Figure | None]:
    slo = Slo(**summary["slo"])
    return [
        plots.goodput_curve(records, slo),
        plots.roofline(pools_of(summary)),
        plots.latency_cdf(records, "ttft", "Time to first token", slo.ttft_ms),
        plots.latency_cdf(records, "tpot", "Time per output token", slo.tpot_ms),
        plots.gap_tail(records),
        plots.stage_bars(summary["modes"]),
    ]


def _plot(figure: go.Figure) -> str:
    markup: str = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        include_mathjax=False,
        config={"displayModeBar": False, "responsive": True},
    )
    head = f"<h2>{html.escape(figure.layout.meta['title'])}</h2>{_legend(figure)}"
    return f'<div class="card plot">{head}{markup}</div>'


def _legend(figure: go.Figure) -> str:
    """Return the legend as HTML outside the plot, where it can wrap to the width of the page."""
    entries = [
        f'<span><i style="background:{trace.marker.color or trace.line.color}"></i>{html.escape(trace.name)}</span>'
        for trace in figure.data
        if trace.name and trace.showlegend is not False
    ]
    return f'<p class="legend">{"".join(entries)}</p>'


def _setting(summary: Summary) -> str:
    trace, plan, machine, load = (summary[part] for part in ("trace", "plan", "machine", "load"))
    rate = f" at {load['rate']:.3g} requests/s ({load['rate_source']})" if load["rate"] else ""
    return (
        f"Trace '{trace['name']}': {trace['requests']} requests{rate}, {plan['rounds']} rounds in each mode · "
        f"limits: {load['slo_source']} · {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    )


def _warnings(summary: Summary) -> str:
    found = [
        f"{mode}: {warning}"
        for mode, figures in summary["modes"].items()
        for warning in dict.fromkeys(figures["warnings"])
    ]
    return "".join(f'<p class="warning">{html.escape(warning)}</p>' for warning in found)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _modes_table(summary: Summary) -> str:
    modes, formulas = summary["modes"], row_formulas(ROWS, summary["formulas"])
    rows = []
    for label, key, form in ROWS:
        figures = [figure_text(modes[mode], key, form) for mode in MODES]
        rows.append([label, *figures, formulas[label]])
    return _table(["", *MODES, "formula"], rows)


def _pools_table(summary: Summary) -> str:
    pools = pools_of(summary)
    if not pools:
        return "<p>The server published no figures by pool.</p>"
    rows = [
        [label, *(format_figure(figures[key], form) for figures in pools.values()), summary["formulas"][key]]
        for label, key, form in POOL_ROWS
    ]
    return _table(["", *pools, "formula"], rows)


def _method(summary: Summary) -> str:
    modes, plan, trace = summary["modes"], summary["plan"], summary["trace"]
    fraction = modes[DISAGGREGATED]["disaggregated_fraction"]
    order = ", ".join(each["mode"] for each in summary["rounds"])
    lines = [
        f"Rounds ran in the order {order}. Round r of one mode sent the same prompts at the same times as round r of "
        "the other; no two rounds share a prompt's beginning, so prefix caches were cold.",
        "Open-loop: each request left at its time in the trace, whatever the server did. "
        f"{plan['warmup_requests']} warm-up requests before each round are in no figure. Prompts are real English, "
        "exact to the token; each answer has exactly the trace's number of tokens (ignore_eos), greedy.",
        f"{format_figure(fraction, '.1%')} of the disaggregated mode's requests went through both pools.",
        f"Recomputed prompts, by reason: {modes[DISAGGREGATED]['recomputes'] or 'none'}.",
        f"Intervals: {summary['formulas']['ci']}; the ratio's pairs each request with itself in the other mode.",
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in summary["load"]["sentences"]),
        *(f"Trace: {change}." for change in trace["changes"]),
    ]
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _formulas(summary: Summary) -> str:
    return _table(["figure", "formula"], [[name, formula] for name, formula in summary["formulas"].items()])
