"""Describes a trace before anything is sent: lengths, arrivals, burstiness, and what a prefix cache could reuse."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from ridgeline.loadtest.trace.poisson import GENERATED, poisson_rows
from ridgeline.loadtest.trace.readers import path_of
from ridgeline.loadtest.trace.reading.known_formats import read_file
from ridgeline.loadtest.trace.reading.request_table import RequestTable

LENGTHS = {"prompt tokens": "input_tokens", "output tokens": "output_tokens"}
POINTS = 200
"""Of the curves on a page."""
LEAST_WINDOWS = 10
"""Of which an index of dispersion says something."""
SECOND_S, MINUTE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class LengthFigures:
    """The lengths of all prompts, or of all outputs."""

    mean: float
    total: int
    quantiles: tuple[float, ...]
    """At POINTS + 1 levels, evenly spaced from the least to the largest."""

    def at(self, level: float) -> float:
        """Return the quantile at a level between 0 and 1."""
        return self.quantiles[round(level * POINTS)]


@dataclass(frozen=True, slots=True)
class ArrivalFigures:
    """When requests arrive; sessions count by their first turns."""

    duration_s: float
    mean_rate: float | None
    """Requests per second; None if all arrive at once."""
    peak_rate: int
    """Most requests in one second."""
    cv_of_gaps: float | None
    """Standard deviation of the gaps over their mean; 1 for a Poisson process."""
    dispersion: Mapping[float, float | None]
    """Variance of the arrivals in a window over their mean, by the window's seconds; 1 for a Poisson process."""
    rates: tuple[tuple[float, float], ...]
    """Seconds since the first arrival, and requests per second from there on."""


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """What a trace is."""

    name: str
    format: str
    requests: int
    sessions: int
    lengths: Mapping[str, LengthFigures]
    arrivals: ArrivalFigures
    reuse: float | None
    """Share of prompt tokens that earlier prompts began with; None if the trace does not say."""
    block_tokens: int
    notes: tuple[str, ...]


def inspect_trace(name: str, tokenizer: str | None = None, limit: int | None = None) -> TraceFigures:
    """Read a trace, or its first requests, and describe it. Raises LoadTestError."""
    table = _table_of(name, tokenizer, limit)
    rows = table.rows if limit is None else table.rows.head(limit)
    return TraceFigures(
        name=name,
        format=table.format,
        requests=rows.height,
        sessions=rows["session"].drop_nulls().n_unique() if "session" in rows.columns else 0,
        lengths={title: _lengths(rows[column]) for title, column in LENGTHS.items()},
        arrivals=_arrivals(_starts_s(rows)),
        reuse=_reuse(rows, table.block_tokens),
        block_tokens=table.block_tokens,
        notes=(*table.drop_notes, *table.notes),
    )


def _table_of(name: str, tokenizer: str | None, limit: int | None) -> RequestTable:
    if not name.startswith(GENERATED):
        return read_file(path_of(name), tokenizer, limit)
    columns = [(row.arrival_s, row.input_tokens, row.output_tokens) for row in poisson_rows(name)]
    schema = ["arrival_s", *LENGTHS.values()]
    return RequestTable("generated", pl.DataFrame(columns, schema=schema, orient="row"))


def _lengths(tokens: pl.Series) -> LengthFigures:
    ordered, total = tokens.sort(), int(tokens.sum())
    levels = (math.ceil(point * (len(ordered) - 1) / POINTS) for point in range(POINTS + 1))
    return LengthFigures(total / len(ordered), total, tuple(ordered[level] for level in levels))


def _starts_s(rows: pl.DataFrame) -> pl.Series:
    """Return the arrivals that the trace fixes: those of requests, and of the first turns of sessions."""
    if "session" not in rows.columns:
        return rows["arrival_s"]
    return rows.filter(pl.col("session").is_null() | pl.col("session").is_first_distinct())["arrival_s"]


def _arrivals(starts_s: pl.Series) -> ArrivalFigures:
    duration_s = float(starts_s[-1] - starts_s[0])
    gaps_s = starts_s.diff().drop_nulls()
    window_s = duration_s / POINTS
    return ArrivalFigures(
        duration_s=duration_s,
        mean_rate=(len(starts_s) - 1) / duration_s if duration_s else None,
        peak_rate=max(_counts(starts_s, SECOND_S).values()),
        cv_of_gaps=_variation(gaps_s),
        dispersion={each_s: _dispersion(starts_s, each_s) for each_s in (SECOND_S, MINUTE_S)},
        rates=tuple((at * window_s, count / window_s) for at, count in _all_counts(starts_s, window_s)),
    )


def _variation(gaps_s: pl.Series) -> float | None:
    """Return the coefficient of variation; None for fewer than two gaps, or if all are 0."""
    if len(gaps_s) < 2 or not gaps_s.sum():
        return None
    return float(gaps_s.std() / gaps_s.mean())  # type: ignore[operator, arg-type]  # numbers, as polars does not say


def _counts(starts_s: pl.Series, window_s: float) -> dict[int, int]:
    """Return the arrivals in each window that has some."""
    windows = (starts_s / window_s).floor().cast(pl.Int64).alias("window")
    return dict(windows.value_counts().iter_rows())


def _all_counts(starts_s: pl.Series, window_s: float) -> list[tuple[int, int]]:
    """Return the arrivals in each of the POINTS windows of the trace; the last arrival is in the last of them."""
    if not window_s:
        return []
    counts = _counts(starts_s, window_s)
    counts[POINTS - 1] = counts.get(POINTS - 1, 0) + counts.pop(POINTS, 0)
    return [(window, counts.get(window, 0)) for window in range(POINTS)]


def _dispersion(starts_s: pl.Series, window_s: float) -> float | None:
    """Return variance over mean of the arrivals in the whole windows of the trace; None if they are too few."""
    windows = math.floor(starts_s[-1] / window_s)
    if windows < LEAST_WINDOWS:
        return None
    counts = [float(count) for window, count in _counts(starts_s, window_s).items() if window < windows]
    mean = sum(counts) / windows
    squares = math.fsum((count - mean) ** 2 for count in counts) + (windows - len(counts)) * mean**2
    return squares / (windows - 1) / mean if mean else None


def _reuse(rows: pl.DataFrame, block_tokens: int) -> float | None:
    """Return the share of prompt tokens that a cache of all earlier prompts would have; answers are not counted."""
    if "prefix_ids" not in rows.columns:
        return None
    says = rows.select((pl.col("prefix_ids").list.len() > 0) | pl.col("session").is_not_null())
    if not says.to_series().any():
        return None
    seen: set[int] = set()
    prompts: dict[str, int] = {}
    reused = 0
    for tokens, blocks, session in rows.select("input_tokens", "prefix_ids", "session").iter_rows():
        before = prompts.get(session, 0) if session is not None else 0
        known = next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        reused += before or min(tokens, known * block_tokens)
        seen.update(blocks)
        if session is not None:
            prompts[session] = tokens
    return reused / float(rows["input_tokens"].sum())
