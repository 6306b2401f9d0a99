"""`ridgeline trace inspect`: what a trace is, in words."""

from __future__ import annotations

from rich.console import Console

from ridgeline.loadtest.report.tables import print_table
from ridgeline.loadtest.trace.inspection import ArrivalFigures, SessionFigures, TraceFigures, inspect_trace

MOST_NOTES = 10
LEVELS = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
LENGTH_HEADER = ("", "mean", *LEVELS, "total")
DELAY_LEVELS = {"p50": 0.5, "p90": 0.9, "max": 1.0}
UNITS = ((2 * 86_400, 86_400, "days"), (2 * 3600, 3600, "h"), (120, 60, "min"))
"""From so many seconds on, a time is told in this unit of so many seconds."""


def inspect_file(name: str, tokenizer: str | None, limit: int | None, console: Console) -> None:
    """Print what a trace is, in at most 25 lines. Raises LoadTestError."""
    figures = inspect_trace(name, tokenizer, limit)
    title = f"{figures.name}: {figures.format}, {figures.requests:,} requests"
    console.print(title, style="bold", highlight=False, markup=False)
    print_table("", LENGTH_HEADER, length_rows(figures), console)
    for what, text in facts(figures):
        console.print(f"{what}: {text}", highlight=False, markup=False)
    for note in figures.notes[:MOST_NOTES]:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)


def length_rows(figures: TraceFigures) -> list[list[str]]:
    return [
        [
            what,
            f"{lengths.mean:,.0f}",
            *(f"{lengths.at(level):,.0f}" for level in LEVELS.values()),
            f"{lengths.total:,.0f}",
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
    return found if figures.sessions is None else _session_facts(figures.sessions) + found


def _session_facts(sessions: SessionFigures) -> list[tuple[str, str]]:
    requests, delays_s = sessions.requests, sessions.delays_s
    each = f"with {requests.mean:.3g} requests each, {requests.at(1):.0f} at most"
    found = [("sessions", f"{len(requests.values):,}, {each}; arrivals are first turns")]
    if sessions.forks or sessions.joins:
        branches = f"after {sessions.forks:,} answers up to {sessions.widest} requests begin at once"
        found.append(("branches", f"{branches}; {sessions.joins:,} requests wait for several answers"))
    if len(delays_s.values):
        levels = ", ".join(f"{name} {_span_text(delays_s.at(level))}" for name, level in DELAY_LEVELS.items())
        found.append(("delays", f"{levels} from the answers that a later turn waits for to the turn"))
        grown = f"from {sessions.first_tokens:,.0f} to {sessions.largest_tokens:,.0f} tokens"
        found.append(("contexts", f"{grown}, medians of the first and the largest prompts of sessions"))
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
