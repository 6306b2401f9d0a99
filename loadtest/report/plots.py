"""The plots of report.html; each is a plotly figure made from the records or from the summary.

Called by `loadtest.report.page`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from loadtest.plan import COLOCATED, DISAGGREGATED, Mode, Slo
from loadtest.report.summary import attainment, latency_series
from loadtest.run.records import RequestRecord

COLORS = {COLOCATED: "#d9730d", DISAGGREGATED: "#1f6feb", "prefill": "#0b8a6b", "decode": "#7a4fd0"}
STAGE_COLORS = {
    "preprocess": "#dfe4ea",
    "queue": "#b8c0cc",
    "prefill": "#0b8a6b",
    "handoff_wait": "#e5b567",
    "wire": "#c2410c",
    "decode_queue": "#8fa3bf",
    "decode": "#7a4fd0",
}
INK, GRID, MUTED = "#1b2330", "#e8ecf1", "#5f6b7a"
SLO_SCALES = tuple(float(scale) for scale in np.geomspace(0.25, 4.0, 65))
TIME_TICKS_MS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 3))
Records = Mapping[Mode, Sequence[RequestRecord]]


def latency_cdf(records: Records, name: str, title: str, limit_ms: float) -> go.Figure:
    """Plot the share of finished requests at or below each latency, with the SLO's limit."""
    figure = go.Figure()
    for mode, mode_records in records.items():
        values_s = latency_series([record for record in mode_records if record.ok])[name]
        values_ms = np.sort(np.asarray(values_s, dtype=np.float64)) * 1e3
        shares = np.arange(1, len(values_ms) + 1) / max(1, len(values_ms))
        figure.add_scatter(
            x=values_ms.tolist(),
            y=shares.tolist(),
            name=mode,
            line={"color": COLORS[mode], "width": 2.5, "shape": "hv"},
            hovertemplate="%{x:.0f} ms: %{y:.0%}<extra>" + mode + "</extra>",
        )
    _mark(figure, limit_ms, f"SLO {limit_ms:g} ms")
    _style(figure, title, "milliseconds", "share of requests")
    figure.update_yaxes(range=[0, 1.03], tickformat=".0%")
    figure.update_xaxes(rangemode="tozero")
    return figure


def gap_tail(records: Records) -> go.Figure | None:
    """Plot the share of gaps between tokens that last longer than a time; None if no answer had two tokens."""
    series = {
        mode: np.sort(latency_series([record for record in found if record.ok])["itl"]) * 1e3
        for mode, found in records.items()
    }
    gaps_ms = np.concatenate(list(series.values()))
    if not len(gaps_ms):
        return None
    figure = go.Figure()
    for mode, sorted_ms in series.items():
        longer = np.arange(len(sorted_ms) - 1, 0, -1) / max(1, len(sorted_ms))
        figure.add_scatter(
            x=sorted_ms[:-1].tolist(),  # a log axis has no 0, so the largest gap has no point of its own
            y=longer.tolist(),
            name=mode,
            line={"color": COLORS[mode], "width": 2.5},
            hovertemplate="%{y:.2%} longer than %{x:.0f} ms<extra>" + mode + "</extra>",
        )
    figure.add_hline(y=0.01, line={"color": MUTED, "dash": "dot"})
    _style(figure, "Gaps between tokens: how many last longer", "milliseconds", "share of gaps")
    # Chunks that arrive together have gaps near 0, which would take most of a log axis.
    ends = np.log10([max(1e-3, np.median(gaps_ms) / 4), np.max(gaps_ms) * 1.1])
    figure.update_xaxes(type="log", range=ends.tolist(), tickvals=TIME_TICKS_MS, tickangle=0)
    figure.update_xaxes(ticktext=[f"{tick:g}" for tick in TIME_TICKS_MS])
    figure.update_yaxes(type="log", tickvals=[1, 0.1, 0.01, 0.001, 0.0001], tickformat=".2~%")
    return figure


def goodput_curve(records: Records, slo: Slo) -> go.Figure:
    """Plot the share of requests within the SLO as both limits are scaled; a failed request is a miss."""
    figure = go.Figure()
    for mode, mode_records in records.items():
        figure.add_scatter(
            x=list(SLO_SCALES),
            y=[attainment(mode_records, slo, scale) for scale in SLO_SCALES],
            name=mode,
            line={"color": COLORS[mode], "width": 2.5},
            hovertemplate="SLO x %{x:.2f}: %{y:.0%}<extra>" + mode + "</extra>",
        )
    _mark(figure, 1, "the SLO", log=True)
    _style(figure, "Goodput as the SLO is scaled", "both limits multiplied by", "requests within the SLO")
    figure.update_xaxes(type="log", tickvals=[0.25, 0.5, 1, 2, 4], ticktext=["0.25", "0.5", "1", "2", "4"])
    figure.update_yaxes(range=[0, 1.03], tickformat=".0%")
    return figure


def stage_bars(modes: Mapping[Mode, Mapping[str, Any]]) -> go.Figure | None:
    """Plot where a request's time goes, in the order of its stages; None if the server counted none."""
    names = [mode for mode in modes if modes[mode]["stage_seconds"]]
    if not names:
        return None
    figure = go.Figure()
    for stage, color in STAGE_COLORS.items():
        seconds = [modes[mode]["stage_seconds"].get(stage, 0.0) for mode in names]
        if any(seconds):
            figure.add_bar(
                y=names,
                x=[second * 1e3 for second in seconds],
                name=stage.replace("_", " "),
                orientation="h",
                marker_color=color,
                width=0.55,
                hovertemplate="%{y}, " + stage.replace("_", " ") + ": %{x:.1f} ms<extra></extra>",
            )
    _style(figure, "Where a request's time goes (mean)", "milliseconds", "")
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed")
    return figure


def roofline(pools: Mapping[str, Mapping[str, Any]]) -> go.Figure | None:
    """Plot each pool under the roofline of one of its workers; None if the server published no peaks."""
    drawn = {name: pool for name, pool in pools.items() if pool["arithmetic_intensity"] and pool["ridge"]}
    if not drawn:
        return None
    figure = go.Figure()
    intensities = [value for pool in drawn.values() for value in (pool["arithmetic_intensity"], pool["ridge"])]
    span = np.geomspace(min(intensities) / 4, max(intensities) * 4, 120)
    for name, pool in drawn.items():
        color = COLORS.get(name, INK)
        peak_flops, peak_bytes = pool["peak_flops"], pool["peak_bytes_per_second"]
        figure.add_scatter(
            x=span.tolist(),
            y=np.minimum(peak_flops, span * peak_bytes).tolist(),
            line={"color": color, "width": 1.5},
            showlegend=False,
            legendgroup=name,
            hoverinfo="skip",
        )
        figure.add_vline(x=pool["ridge"], line={"color": color, "dash": "dot", "width": 1})
        figure.add_scatter(
            x=[pool["arithmetic_intensity"]],
            y=[pool["flops"] / pool["busy_seconds"]],
            mode="markers",
            marker={"size": 15, "color": color, "line": {"color": "white", "width": 2}},
            name=f"{name} {pool['arithmetic_intensity']:.1f}",
            legendgroup=name,
            hovertemplate="%{x:.1f} FLOP/byte, %{y:.3s}FLOP/s while busy<extra>" + name + "</extra>",
        )
    ridges = sorted(pool["ridge"] for pool in drawn.values())
    ends = list(dict.fromkeys(f"{ridge:.0f}" for ridge in (ridges[0], ridges[-1])))
    _name_line(figure, ridges[-1], f"ridge {' to '.join(ends)}", log=True, y=0.6)
    _style(figure, "Each pool under the roof of one worker", "arithmetic intensity, FLOP/byte", "FLOP/s while busy")
    figure.update_xaxes(type="log", tickvals=[10.0**power for power in range(-2, 6)], exponentformat="none")
    figure.update_xaxes(range=np.log10(span[[0, -1]]).tolist())
    figure.update_yaxes(type="log", dtick=1, exponentformat="SI")
    return figure


def _mark(figure: go.Figure, x: float, text: str, *, log: bool = False) -> None:
    """Draw a dotted vertical line with its name at the top."""
    figure.add_vline(x=x, line={"color": MUTED, "dash": "dot"})
    _name_line(figure, x, text, log=log)


def _name_line(figure: go.Figure, x: float, text: str, *, log: bool, y: float = 1) -> None:
    """Label a line; on a log axis plotly wants the logarithm for an annotation, but the plain value for a line."""
    figure.add_annotation(
        x=float(np.log10(x)) if log else x,
        y=y,
        yref="paper",
        text=text,
        showarrow=False,
        xanchor="left",
        xshift=4,
    )


def _style(figure: go.Figure, title: str, x_title: str, y_title: str) -> None:
    """Style the figure; `page` shows title and legend, because a legend of several lines would cover the plot."""
    figure.update_layout(
        meta={"title": title},
        showlegend=False,
        font={"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "color": INK, "size": 13},
        plot_bgcolor="white",
        paper_bgcolor="white",
        height=330,
        margin={"l": 70, "r": 24, "t": 16, "b": 56},
        hoverlabel={"font": {"size": 13}},
    )
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": MUTED, "ticks": "outside", "tickcolor": GRID}
    figure.update_xaxes(title=x_title, **axis)
    figure.update_yaxes(title=y_title, **axis)
