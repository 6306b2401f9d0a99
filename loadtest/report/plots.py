"""The plots of report.html; each is a plotly figure made from the records or from the summary."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report.summary import attainment, latency_series
from ridgeline.loadtest.report.wording import NAMES
from ridgeline.loadtest.run.records import RequestRecord

VARIANT_COLORS = ("#d9730d", "#1f6feb", "#2da44e", "#8250df")
STAGE_COLORS = {
    "preprocess": "#dfe4ea",
    "queue": "#b8c0cc",
    "prefill": "#0b8a6b",
    "handoff_wait": "#e5b567",
    "wire": "#c2410c",
    "decode_queue": "#8fa3bf",
    "decode": "#7a4fd0",
    "elsewhere": "#1b2330",
}
INK, GRID, MUTED = "#1b2330", "#e8ecf1", "#5f6b7a"
INTERVAL_COLOR = "#c2410c"
SHORT_NAMES = {"ttft": "TTFT", "ttst": "1st to 2nd", "tpot": "TPOT", "largest_gap": "largest gap"}
STEP_TEXT_POSITIONS = {
    "prefill": ("middle right", "top right", "bottom right"),
    "mixed": ("bottom center", "bottom left", "middle left"),
    "decode": ("middle right", "top center", "bottom center"),
}
"""One for each of the texts that a kind of step can have: what binds it is compute, memory or neither."""
RATIO_TICKS = (0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10)
SLO_SCALES = tuple(float(scale) for scale in np.geomspace(0.25, 4.0, 65))
TIME_TICKS_MS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 3))
Records = Mapping[str, Sequence[RequestRecord]]
"""Those of each variant, by its label."""


def pair_dots(summary: Mapping[str, Any]) -> go.Figure:
    """Plot the difference of attainment of every pair, their mean with its interval, and the margin."""
    found, figure = summary["outcome"], go.Figure()
    shares = [each["attainment"] for each in summary["pairs"]]
    estimate = found["attainment"]
    for end in (-found["margin"], found["margin"]):
        figure.add_vline(x=100 * end, line={"color": MUTED, "dash": "dot"})
    figure.add_vline(x=0, line={"color": MUTED, "width": 1})
    if estimate is not None:
        _interval(figure, estimate, "mean and interval", 0.0, 100.0)
    figure.add_scatter(
        x=[100 * share for share in shares],
        y=[number + 1 for number in range(len(shares))],
        mode="markers",
        marker={"size": 11, "color": INK, "opacity": 0.75},
        name="one pair of rounds",
        hovertemplate="pair %{y}: %{x:+.1f} points<extra></extra>",
    )
    b, a = (summary["variants"][side]["label"] for side in ("b", "a"))
    style_figure(figure, "Attainment, pair by pair", f"{b} minus {a}, points", "pair")
    figure.update_yaxes(tickvals=list(range(len(shares) + 1)), ticktext=["all", *map(str, range(1, len(shares) + 1))])
    widest = max([100 * found["margin"], *(abs(100 * share) for share in shares)])
    if estimate is not None:
        widest = max(widest, abs(100 * estimate["low"]), abs(100 * estimate["high"]))
    figure.update_yaxes(range=[len(shares) + 0.6, -0.6])
    figure.update_xaxes(range=[-1.1 * widest, 1.1 * widest])
    return figure


def latency_dots(summary: Mapping[str, Any]) -> go.Figure | None:
    """Plot the ratio of each latency in every pair, with the mean and its interval; None if no request finished."""
    names = [name for name in NAMES if any(name in each["latencies"] for each in summary["pairs"])]
    if not names:
        return None
    figure = go.Figure()
    figure.add_vline(x=1, line={"color": MUTED, "width": 1})
    for place, name in enumerate(names):
        ratios = [np.exp(each["latencies"][name]) for each in summary["pairs"] if name in each["latencies"]]
        if name in summary["outcome"]["secondary"]:
            estimate = summary["outcome"]["secondary"][name]["estimate"]
            _interval(figure, {end: float(np.exp(estimate[end])) for end in ("mean", "low", "high")}, "", place + 0.25)
        figure.add_scatter(
            x=ratios,
            y=[place] * len(ratios),
            mode="markers",
            marker={"size": 10, "color": INK, "opacity": 0.6},
            name="one pair of rounds",
            showlegend=place == 0,
            hovertemplate="x %{x:.2f}<extra>" + NAMES[name] + "</extra>",
        )
    b, a = (summary["variants"][side]["label"] for side in ("b", "a"))
    style_figure(figure, "Latencies, pair by pair (secondary)", f"{b} / {a}", "")
    figure.update_yaxes(
        tickvals=list(range(len(names))), ticktext=[SHORT_NAMES[name] for name in names], range=[len(names) - 0.4, -0.6]
    )
    figure.update_xaxes(type="log", tickangle=0, tickvals=RATIO_TICKS, ticktext=[f"{tick:g}" for tick in RATIO_TICKS])
    return figure


def _interval(figure: go.Figure, estimate: Mapping[str, float], name: str, y: float, scale: float = 1.0) -> None:
    low, mean, high = (scale * estimate[end] for end in ("low", "mean", "high"))
    figure.add_scatter(
        x=[low, mean, high],
        y=[y] * 3,
        mode="lines+markers",
        line={"color": INTERVAL_COLOR, "width": 4},
        marker={"size": [1, 13, 1], "symbol": "diamond", "color": INTERVAL_COLOR},
        name=name or "mean and interval",
        showlegend=bool(name) or y < 1,
        hovertemplate="%{x:.3g}<extra></extra>",
    )


def _round_dots(figure: go.Figure, summary: Mapping[str, Any], x: str | float, y: Callable[[Any], float]) -> None:
    """Add a dot for each valid round, at the round's figure `x` (or at a fixed x) and at the height `y` gives."""
    for variant, color in zip(summary["variants"].values(), VARIANT_COLORS, strict=False):
        rounds = [each for each in summary["rounds"] if each["valid"] and each["label"] == variant["label"]]
        shown = [each for each in rounds if not isinstance(x, str) or each.get(x) is not None]
        figure.add_scatter(
            x=[each[x] if isinstance(x, str) else x for each in shown],
            y=[y(each) for each in shown],
            mode="markers",
            marker={"size": 9, "color": color, "opacity": 0.75, "line": {"color": "white", "width": 1}},
            showlegend=False,
            text=[str(each["pair"] + 1) for each in shown],
            hovertemplate="pair %{text}: %{x:.3g}, %{y:.2~%}<extra>" + variant["label"] + "</extra>",
        )


def latency_cdf(summary: Mapping[str, Any], records: Records, name: str, title: str, limit_ms: float) -> go.Figure:
    """Plot the share of all requests at or below each latency, with the SLO; a failed one never arrives."""
    figure = go.Figure()
    for (label, variant_records), color in zip(records.items(), VARIANT_COLORS, strict=False):
        values_s = latency_series([record for record in variant_records if record.ok])[name]
        values_ms = np.sort(np.asarray(values_s, dtype=np.float64)) * 1e3
        shares = np.arange(1, len(values_ms) + 1) / max(1, len(variant_records))
        figure.add_scatter(
            x=values_ms.tolist(),
            y=shares.tolist(),
            name=label,
            mode="lines",
            line={"color": color, "width": 2.5, "shape": "hv"},
            hovertemplate="%{x:.0f} ms: %{y:.0%}<extra>" + label + "</extra>",
        )
    _round_dots(
        figure,
        summary,
        f"p50_{name}_ms",
        lambda each: 0.5 * each["completed"] / max(1, each["completed"] + each["failed"]),
    )
    _mark(figure, limit_ms, f"SLO {limit_ms:g} ms")
    style_figure(figure, title, "milliseconds", "share of all requests", note="Dots: the median of each round.")
    figure.update_yaxes(range=[0, 1.03], tickformat=".0%")
    figure.update_xaxes(rangemode="tozero")
    return figure


def gap_tail(summary: Mapping[str, Any], records: Records, limit_ms: float | None) -> go.Figure | None:
    """Plot the share of gaps between tokens that last longer than a time; None if no answer had two tokens.

    The SLO on the largest gap is marked if there is one.
    """
    series = {
        label: np.sort(latency_series([record for record in found if record.ok])["itl"]) * 1e3
        for label, found in records.items()
    }
    gaps_ms = np.concatenate(list(series.values()))
    if not len(gaps_ms):
        return None
    figure = go.Figure()
    for (label, sorted_ms), color in zip(series.items(), VARIANT_COLORS, strict=False):
        longer = np.arange(len(sorted_ms) - 1, 0, -1) / max(1, len(sorted_ms))
        figure.add_scatter(
            x=sorted_ms[:-1].tolist(),  # a log axis has no 0, so the largest gap has no point of its own
            y=longer.tolist(),
            name=label,
            line={"color": color, "width": 2.5},
            hovertemplate="%{y:.2%} longer than %{x:.0f} ms<extra>" + label + "</extra>",
        )
    figure.add_hline(y=0.01, line={"color": MUTED, "dash": "dot"})
    _round_dots(figure, summary, "p99_itl_ms", lambda _: 0.01)
    style_figure(
        figure,
        "Gaps between tokens: how many last longer",
        "milliseconds",
        "share of gaps",
        note="Dots: the 99th percentile of each round.",
    )
    # Chunks that arrive together have gaps near 0, which would take most of a log axis.
    most_ms = max(float(np.max(gaps_ms)), limit_ms or 0.0)
    ends = np.log10([max(1e-3, np.median(gaps_ms) / 4), most_ms * 1.1])
    if limit_ms is not None:
        _mark(figure, limit_ms, f"SLO {limit_ms:g} ms", log=True)
    figure.update_xaxes(type="log", range=ends.tolist(), tickvals=TIME_TICKS_MS, tickangle=0)
    figure.update_xaxes(ticktext=[f"{tick:g}" for tick in TIME_TICKS_MS])
    figure.update_yaxes(type="log", tickvals=[1, 0.1, 0.01, 0.001, 0.0001], tickformat=".2~%")
    return figure


def attainment_curve(summary: Mapping[str, Any], records: Records, slo: Slo) -> go.Figure:
    """Plot the share of requests within the SLO as all SLOs are scaled; a failed request is a miss."""
    figure = go.Figure()
    for (label, variant_records), color in zip(records.items(), VARIANT_COLORS, strict=False):
        figure.add_scatter(
            x=list(SLO_SCALES),
            y=[attainment(variant_records, slo, scale) for scale in SLO_SCALES],
            name=label,
            line={"color": color, "width": 2.5},
            hovertemplate="SLO x %{x:.2f}: %{y:.0%}<extra>" + label + "</extra>",
        )
    _mark(figure, 1, "the SLO", log=True)
    _round_dots(figure, summary, 1.0, lambda each: each["attainment"])
    style_figure(
        figure,
        "Attainment as the SLO is scaled",
        "all SLOs multiplied by",
        "requests within the SLO",
        note="Dots: the attainment of each round.",
    )
    figure.update_xaxes(type="log", tickvals=[0.25, 0.5, 1, 2, 4], ticktext=["0.25", "0.5", "1", "2", "4"])
    figure.update_yaxes(range=[0, 1.03], tickformat=".0%")
    return figure


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
        figure.add_hline(y=limit, line={"color": MUTED, "dash": "dot"}, annotation_text="SLO")
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
    span = np.geomspace(min(around) / 12, max(around) * 12, 120)
    most_busy_s = max(kind["busy_seconds"] for kind in kinds)
    for peak_flops, peak_bytes in dict.fromkeys((p["peak_flops"], p["peak_bytes_per_second"]) for *_, p in pools):
        roof = np.minimum(peak_flops, span * peak_bytes)
        line = {"color": MUTED, "width": 1.5}
        figure.add_scatter(x=span.tolist(), y=roof.tolist(), line=line, showlegend=False, hoverinfo="skip")
        _mark(figure, peak_flops / peak_bytes, f"ridge {peak_flops / peak_bytes:.1f}", log=True)
    sources = dict.fromkeys(source for *_, pool in pools if (source := pool.get("peaks_source")))
    named: set[str] = set()
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
            name=label,
            showlegend=label not in named,
            customdata=[[kind["busy_seconds"], kind["mfu"], kind["mbu"]] for kind in found],
            hovertemplate="%{x:.1f} FLOP/byte, %{y:.3s}FLOP/s in %{customdata[0]:.1f} s of steps, MFU "
            "%{customdata[1]:.0%}, MBU %{customdata[2]:.0%}<extra>" + owner + "</extra>",
        )
        named.add(label)
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
        "arithmetic intensity, FLOP/byte",
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
