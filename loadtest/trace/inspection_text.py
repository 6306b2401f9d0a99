"""What a trace is, in words, for the terminal and the page."""

from ridgeline.loadtest.trace.inspection import ArrivalFigures, TraceFigures

LEVELS = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
LENGTH_HEADER = ("", "mean", *LEVELS, "total")
UNITS = ((2 * 86_400, 86_400, "days"), (2 * 3600, 3600, "h"), (120, 60, "min"))
"""From so many seconds on, a time is told in this unit of so many seconds."""


def title(figures: TraceFigures) -> str:
    return f"{figures.name}: {figures.format}, {figures.requests:,} requests"


def length_rows(figures: TraceFigures) -> list[list[str]]:
    return [
        [
            what,
            f"{lengths.mean:,.0f}",
            *(f"{lengths.at(level):,.0f}" for level in LEVELS.values()),
            f"{lengths.total:,}",
        ]
        for what, lengths in figures.lengths.items()
    ]


def facts(figures: TraceFigures) -> list[tuple[str, str]]:
    """Return what a table of lengths does not say, as names and texts."""
    arrivals = figures.arrivals
    rate = "all at once" if arrivals.mean_rate is None else f"mean {arrivals.mean_rate:.3g} requests/s"
    found = [
        ("arrivals", f"over {_span_text(arrivals.duration_s)}, {rate}, peak {arrivals.peak_rate:,} in a second"),
        ("burstiness", _burstiness(arrivals)),
        ("prefix reuse", _reuse(figures)),
    ]
    if figures.sessions:
        turns = figures.requests / figures.sessions
        found.insert(0, ("sessions", f"{figures.sessions:,}, with {turns:.3g} requests each; arrivals are first turns"))
    return found


def _burstiness(arrivals: ArrivalFigures) -> str:
    found = [] if arrivals.cv_of_gaps is None else [f"CV of gaps {arrivals.cv_of_gaps:.2f}"]
    found += [
        f"index of dispersion {value:.2f} in windows of {window_s:g} s"
        for window_s, value in arrivals.dispersion.items()
        if value is not None
    ]
    return f"{', '.join(found)} (Poisson: 1)" if found else "too few arrivals to tell"


def _reuse(figures: TraceFigures) -> str:
    if figures.reuse is None:
        return "unknown, since the trace has neither hash_ids nor sessions"
    return f"{figures.reuse:.1%} of prompt tokens were in an earlier prompt (blocks of {figures.block_tokens} tokens)"


def _span_text(seconds: float) -> str:
    for least, unit_s, unit in UNITS:
        if seconds >= least:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.3g} s"
