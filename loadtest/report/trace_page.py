"""Writes the page of `ridgeline trace inspect`, a single file that opens offline."""

import html
from pathlib import Path
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from ridgeline.loadtest.report.page import TEMPLATE_FILE, html_table, plot_card
from ridgeline.loadtest.report.plots import VARIANT_COLORS, style_figure
from ridgeline.loadtest.trace.inspection import POINTS, ArrivalFigures, TraceFigures
from ridgeline.loadtest.trace.inspection_text import LENGTH_HEADER, facts, length_rows, title

FORMULAS = {
    "peak": "most arrivals in one second, counted from the first arrival",
    "CV of gaps": "standard deviation of the gaps between arrivals / their mean; 1 for a Poisson process",
    "index of dispersion": "variance of the arrivals in a window / their mean; 1 for a Poisson process, above 1 bursts",
    "prefix reuse": "tokens at the beginnings of prompts that are the beginning of an earlier prompt / all prompt "
    "tokens: what a cache that forgets nothing would reuse",
}


def write_trace_page(path: Path, figures: TraceFigures) -> Path:
    """Write the figures with plots as one file, which opens offline; return the path."""
    head, _ = TEMPLATE_FILE.read_text(encoding="utf-8").split("<main>")
    body = Template(TEMPLATE_FILE.with_name("trace.html.template").read_text(encoding="utf-8")).substitute(
        headline=html.escape(title(figures)),
        notes="".join(f'<p class="warning">{html.escape(note)}</p>' for note in figures.notes),
        lengths=html_table(LENGTH_HEADER, length_rows(figures)),
        facts=html_table(("", ""), facts(figures)),
        plots="\n".join(map(plot_card, (_length_plot(figures), _rate_plot(figures.arrivals)))),
        formulas=html_table(("figure", "formula"), list(FORMULAS.items())),
    )
    page = Template(head).substitute(title=html.escape(figures.name), plotly_js=get_plotlyjs())
    path.write_text(page + body, encoding="utf-8")
    return path


def _length_plot(figures: TraceFigures) -> go.Figure:
    figure = go.Figure()
    for (what, lengths), color in zip(figures.lengths.items(), VARIANT_COLORS, strict=False):
        figure.add_scatter(
            x=list(lengths.quantiles),
            y=[point / POINTS for point in range(POINTS + 1)],
            name=what,
            mode="lines",
            line={"color": color, "width": 2.5},
            hovertemplate="%{x:,.0f} tokens: %{y:.0%}<extra>" + what + "</extra>",
        )
    style_figure(figure, "Lengths", "tokens", "share of requests at or below")
    figure.update_xaxes(type="log")
    figure.update_yaxes(range=[0, 1.03], tickformat=".0%")
    return figure


def _rate_plot(arrivals: ArrivalFigures) -> go.Figure:
    figure = go.Figure()
    figure.add_scatter(
        x=[at_s for at_s, _ in arrivals.rates],
        y=[rate for _, rate in arrivals.rates],
        name="arrivals",
        mode="lines",
        line={"color": VARIANT_COLORS[1], "width": 2, "shape": "hv"},
        hovertemplate="%{x:,.0f} s: %{y:.3g} requests/s<extra></extra>",
    )
    style_figure(
        figure,
        "Arrivals",
        "seconds since the first",
        "requests/s",
        note=f"Each step is the mean of 1/{POINTS} of the trace.",
    )
    figure.update_yaxes(rangemode="tozero")
    return figure
