"""The plots of report.html; each is a plotly figure made from the summary."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

VARIANT_COLORS = ("#d9730d", "#1f6feb", "#2da44e", "#8250df", "#bf3989", "#0a7ea4")
STAGE_COLORS = {
    "preprocess": "#dfe4ea",
    "queue": "#b8c0cc",
    "prefill": "#0b8a6b",
    "handoff_wait": "#e5b567",
    "wire": "#c2410c",
    "decode_queue": "#8fa3bf",
    "decode": "#7a4fd0",
    "elsewhere": "#64748b",
}
INK, GRID, MUTED = "#1b2330", "#e8ecf1", "#5f6b7a"
STEP_TEXT_POSITIONS = {
    "prefill": ("middle right", "top right", "bottom right"),
    "mixed": ("bottom center", "bottom left", "middle left"),
    "decode": ("middle right", "top center", "bottom center"),
}
"""One for each of the texts that a kind of step can have: what binds it is compute, memory or neither."""


def attainment_against_rate(rates: Mapping[str, Any]) -> go.Figure:
    """Plot each variant's curve of attainment with its band, a dot for each round, and the maximum goodput rates."""
    figure = go.Figure()
    for place, (variant, color) in enumerate(zip(rates["variants"].values(), VARIANT_COLORS, strict=False)):
        curve, label, found = variant["curve"], variant["label"], variant["max_goodput_rate"]
        at = [band["rate"] for band in curve]
        figure.add_scatter(
            x=[*at, *reversed(at)],
            y=[*(band["high"] for band in curve), *(band["low"] for band in reversed(curve))],
            mode="lines",
            fill="toself",
            line={"width": 0, "color": color},
            opacity=0.18,
            showlegend=False,
            hoverinfo="skip",
        )
        figure.add_scatter(
            x=at,
            y=[band["share"] for band in curve],
            name=label,
            mode="lines",
            line={"color": color, "width": 2.5},
            hovertemplate="%{x:.3g} requests/s: %{y:.0%}<extra>" + label + "</extra>",
        )
        rounds = [each for each in rates["rounds"] if each["valid"] and each["label"] == label]
        figure.add_scatter(
            x=[each["rate"] for each in rounds],
            y=[each["attainment"] for each in rounds],
            mode="markers",
            marker={"size": 8, "color": color, "opacity": 0.75, "line": {"color": "white", "width": 1}},
            showlegend=False,
            text=[str(each["pair"] + 1) for each in rounds],
            hovertemplate="pair %{text}: %{y:.0%}<extra>" + label + "</extra>",
        )
        if found["rate"] is not None:
            figure.add_scatter(
                x=[found["rate"]],
                y=[rates["attainment"]],
                mode="markers",
                marker={"size": 13, "symbol": "diamond", "color": color, "line": {"color": "white", "width": 1}},
                showlegend=False,
                hovertemplate="%{x:.3g} requests/s<extra>highest rate, " + label + "</extra>",
            )
        if found["low"] is not None or found["high"] is not None:
            figure.add_scatter(
                x=[found["low"] or at[0], found["high"] or at[-1]],
                y=[0.03 + 0.045 * (len(rates["variants"]) - 1 - place)] * 2,
                mode="lines",
                line={"color": color, "width": 5},
                showlegend=False,
                hovertemplate="%{x:.3g} requests/s<extra>end of the interval, " + label + "</extra>",
            )
    figure.add_hline(y=rates["attainment"], line={"color": MUTED, "dash": "dot"})
    style_figure(
        figure,
        "Requests within the SLOs against rate",
        "requests/s",
        "requests within the SLOs",
        note="Dots: rounds. Shaded: the 95 % band of the curve. Diamonds: the highest rates at the share (dotted "
        "line). Bars at the bottom: their intervals; an open end goes to the last rate measured.",
    )
    _rate_axis(figure, rates)
    figure.update_yaxes(range=[0, 1.04], tickformat=".0%")
    figure.update_layout(height=400)
    return figure


def against_rate(
    rates: Mapping[str, Any], name: str, title: str, unit: str, limit: float | None = None
) -> go.Figure | None:
    """Plot a figure of each variant against the rate, with its SLO; None if no rate has it."""
    figure = go.Figure()
    for variant, color in zip(rates["variants"].values(), VARIANT_COLORS, strict=False):
        points = [point for point in variant["points"] if point[name] is not None]
        figure.add_scatter(
            x=[point["rate"] for point in points],
            y=[point[name] for point in points],
            name=variant["label"],
            mode="lines+markers",
            line={"color": color, "width": 2.5},
            hovertemplate="%{x:.3g} requests/s: %{y:.3g} " + unit + "<extra>" + variant["label"] + "</extra>",
        )
    if not any(len(trace.x) for trace in figure.data):
        return None
    if limit is not None:
        line = {"color": MUTED, "dash": "dot"}
        figure.add_hline(y=limit, line=line, annotation_text="SLO", annotation_position="top left")
    style_figure(figure, title, "requests/s", unit)
    _rate_axis(figure, rates)
    figure.update_yaxes(rangemode="tozero")
    return figure


def _rate_axis(figure: go.Figure, rates: Mapping[str, Any]) -> None:
    """Show the measured rates as ticks, but none so near to another that their texts would meet."""
    ticks: list[float] = []
    for rate in sorted({each["rate"] for each in rates["rounds"]}):
        if not ticks or rate > 1.12 * ticks[-1]:
            ticks.append(rate)
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:.3g}" for tick in ticks])


def stage_bars(variants: Mapping[str, Mapping[str, Any]]) -> go.Figure | None:
    """Plot bars that add up to the mean TTFT and to the mean time after it; None if the server counted no stages."""
    bars = {
        f"{variant['label']}<br>{part}": stages
        for variant in variants.values()
        for part, stages in variant["latency_parts"].items()
    }
    if not bars:
        return None
    figure = go.Figure()
    for stage, color in STAGE_COLORS.items():
        seconds = [stages.get(stage, 0.0) for stages in bars.values()]
        if any(seconds):
            figure.add_bar(
                y=list(bars),
                x=[second * 1e3 for second in seconds],
                name=stage.replace("_", " "),
                orientation="h",
                marker_color=color,
                width=0.55,
                hovertemplate="%{y}, " + stage.replace("_", " ") + ": %{x:.1f} ms<extra></extra>",
            )
    style_figure(figure, "Where a request's time goes (mean)", "milliseconds", "")
    figure.update_layout(barmode="relative", margin={"l": 130})
    figure.update_yaxes(autorange="reversed")
    return figure


def roofline(variants: Mapping[str, Mapping[str, Any]]) -> go.Figure | None:
    """Plot each kind of step of each pool under the roof of one worker; None if the server published no peaks.

    A dot's area is busy time. The mean of several kinds of step lies under no roof of its own, so a bar marks the
    FLOP/s that the mixture would have if every kind ran on its roof.
    """
    pools = [
        (variant["label"], color, name, pool)
        for variant, color in zip(variants.values(), VARIANT_COLORS, strict=False)
        for name, pool in variant["pools"].items()
        if pool["ridge"] and pool["step_kinds"]
    ]
    if not pools:
        return None
    figure = go.Figure()
    kinds = [kind for *_, pool in pools for kind in pool["step_kinds"].values()]
    around = [kind["arithmetic_intensity"] for kind in kinds] + [pool["ridge"] for *_, pool in pools]
    span = np.geomspace(min(around) / 12, max(around) * 30, 120)  # texts stand right of their dots
    most_busy_s = max(kind["busy_seconds"] for kind in kinds)
    for peak_flops, peak_bytes in dict.fromkeys((p["peak_flops"], p["peak_bytes_per_second"]) for *_, p in pools):
        roof = np.minimum(peak_flops, span * peak_bytes)
        line = {"color": MUTED, "width": 1.5}
        figure.add_scatter(x=span.tolist(), y=roof.tolist(), line=line, showlegend=False, hoverinfo="skip")
        ridge = peak_flops / peak_bytes
        figure.add_vline(x=ridge, line={"color": MUTED, "dash": "dot"})
        named = {"text": f"ridge {ridge:.1f}", "showarrow": False, "xanchor": "left", "xshift": 4}
        figure.add_annotation(x=float(np.log10(ridge)), y=0, yref="paper", **named)  # the logarithm, other than a line
    sources = dict.fromkeys(source for *_, pool in pools if (source := pool.get("peaks_source")))
    in_legend: set[str] = set()
    texts = _step_texts([pool["step_kinds"] for *_, pool in pools])
    for (label, color, name, pool), shown in zip(pools, texts, strict=True):
        owner = label if label.startswith(name) else f"{label}, {name} pool"
        found = list(pool["step_kinds"].values())
        figure.add_scatter(
            x=[kind["arithmetic_intensity"] for kind in found],
            y=[kind["flops"] / kind["busy_seconds"] for kind in found],
            mode="markers+text",
            marker={
                "size": [max(5.0, 36 * (kind["busy_seconds"] / most_busy_s) ** 0.5) for kind in found],
                "color": color,
                "opacity": 0.7,
            },
            text=[text for text, _ in shown],
            textposition=[position for _, position in shown],
            textfont={"color": MUTED},
            cliponaxis=False,
            name=label,
            showlegend=label not in in_legend,
            customdata=[[kind["busy_seconds"], kind["mfu"], kind["mbu"]] for kind in found],
            hovertemplate="%{x:.1f} FLOP/byte, %{y:.3s}FLOP/s in %{customdata[0]:.1f} s of steps, MFU "
            "%{customdata[1]:.0%}, MBU %{customdata[2]:.0%}<extra>" + owner + "</extra>",
        )
        in_legend.add(label)
        if len(found) > 1:
            figure.add_scatter(
                x=[pool["arithmetic_intensity"]],
                y=[pool["flops"] / pool["roof_seconds"]],
                mode="markers",
                marker={"symbol": "line-ew", "size": 22, "color": color, "line": {"color": color, "width": 3}},
                showlegend=False,
                name=f"roof of the mixture, {owner}",
                hovertemplate="%{x:.1f} FLOP/byte, %{y:.3s}FLOP/s<extra>roof of the mixture, " + owner + "</extra>",
            )
    style_figure(
        figure,
        "Kinds of step under the roof of one worker",
        "intensity, FLOP/byte",
        "FLOP/s in steps",
        note="Area: busy time. Text: kind of step and what binds it (a peak used to 50 % or more, or neither). "
        "Bar: the roof of a pool's mixture of steps." + "".join(f" Peaks: {source}." for source in sources),
    )
    figure.update_xaxes(type="log", tickvals=[10.0**power for power in range(-2, 6)], exponentformat="none")
    figure.update_xaxes(range=np.log10(span[[0, -1]]).tolist())
    figure.update_yaxes(type="log", dtick=1, exponentformat="SI")
    return figure


def _step_texts(pools: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[list[tuple[str, str]]]:
    """Return text and position for each kind of step of each pool; the same text only once, at the largest dot.

    Kinds have positions of their own, since the dots of variants lie close to each other.
    """
    largest = {
        f"{step}: {kind['bound']}": (index, step)
        for index, step, kind in sorted(
            ((index, step, kind) for index, kinds in enumerate(pools) for step, kind in kinds.items()),
            key=lambda each: each[2]["busy_seconds"],
        )
    }
    free = {step: list(positions) for step, positions in STEP_TEXT_POSITIONS.items()}
    at = {place: (text, free[place[1]].pop(0)) for text, place in largest.items()}
    return [[at.get((index, step), ("", "top center")) for step in kinds] for index, kinds in enumerate(pools)]


def style_figure(figure: go.Figure, title: str, x_title: str, y_title: str, note: str = "") -> None:
    """Style the figure; `page` shows title and legend, because a legend of several lines would cover the plot."""
    figure.update_layout(
        meta={"title": title, "note": note},
        showlegend=False,
        font={"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "color": INK, "size": 13},
        plot_bgcolor="rgba(0,0,0,0)",
        paper_bgcolor="rgba(0,0,0,0)",
        height=330,
        margin={"l": 70, "r": 24, "t": 16, "b": 56},
        hoverlabel={"font": {"size": 13}},
    )
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": MUTED, "ticks": "outside", "tickcolor": GRID}
    figure.update_xaxes(title=x_title, **axis)
    figure.update_yaxes(title=y_title, **axis)
