"""Describes a trace before anything is sent: lengths, arrivals, sessions, and what a prefix cache could reuse."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import polars as pl

from ridgeline.loadtest.trace.generated import generated_trace, is_generated
from ridgeline.loadtest.trace.readers import path_of
from ridgeline.loadtest.trace.reading.known_formats import read_file
from ridgeline.loadtest.trace.reading.request_table import SCHEMA, RequestTable

LENGTHS = {"prompt tokens": "input_tokens", "output tokens": "output_tokens"}
LEAST_WINDOWS = 10
"""Of which an index of dispersion says something."""
SECOND_S, MINUTE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Numbers of one kind, such as the lengths of all prompts."""

    values: pl.Series

    @property
    def mean(self) -> float:
        """Their mean."""
        return self.total / len(self.values)

    @property
    def total(self) -> float:
        """Their sum."""
        return float(self.values.sum())

    def at(self, level: float) -> float:
        """Return the quantile at a level between 0 and 1."""
        return float(self.values.quantile(level, "higher") or 0.0)


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """How the requests of sessions follow one another."""

    requests: Spread
    """Of each session."""
    forks: int
    """Answers after which several requests begin at once."""
    widest: int
    """Most requests that begin so."""
    joins: int
    """Requests that wait for several answers."""
    delays_s: Spread
    """Seconds between the last answer that a later turn waits for and the turn."""
    first_tokens: float
    """Median of the first prompts of sessions that have a second turn."""
    largest_tokens: float
    """Median of the largest prompts of their conversations, without those of sub-agents."""


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


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """What a trace is."""

    name: str
    format: str
    requests: int
    sessions: SessionFigures | None
    """None if no request is of a session."""
    lengths: Mapping[str, Spread]
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
        sessions=_sessions(rows) if "session" in rows.columns else None,
        lengths={title: Spread(rows[column]) for title, column in LENGTHS.items()},
        arrivals=_arrivals(_starts_s(rows)),
        reuse=_reuse(rows, table.block_tokens),
        block_tokens=table.block_tokens,
        notes=(*table.drop_notes, *table.notes),
    )


def _table_of(name: str, tokenizer: str | None, limit: int | None) -> RequestTable:
    if not is_generated(name):
        return read_file(path_of(name), tokenizer, limit)
    trace = generated_trace(name)
    columns = {column: kind for column, kind in SCHEMA.items() if column != "line"}
    rows = pl.DataFrame([astuple(row) for row in trace.rows], schema=columns, orient="row")
    return RequestTable("generated", rows, trace.prefix_block_tokens)


def _sessions(rows: pl.DataFrame) -> SessionFigures | None:
    of_sessions = rows.filter(pl.col("session").is_not_null())
    if of_sessions.is_empty():
        return None
    inputs, after_of = rows["input_tokens"].to_list(), rows["after"].to_list()
    children = Counter(after[0] for after in after_of if len(after) == 1)
    begins: list[int] = []
    """Where the conversation of each row begins."""
    grown: dict[int, int] = {}
    for place, (after, fresh) in enumerate(zip(after_of, rows["fresh"], strict=True)):
        begin = begins[after[0]] if after and not fresh else place
        begins.append(begin)
        if begin != place and not after_of[begin]:
            grown[begin] = max(grown.get(begin, 0), inputs[place])
    return SessionFigures(
        requests=Spread(of_sessions["session"].value_counts()["count"]),
        forks=sum(count > 1 for count in children.values()),
        widest=max(children.values(), default=0),
        joins=int((rows["after"].list.len() > 1).sum()),
        delays_s=Spread(rows.filter(pl.col("after").list.len() > 0, ~pl.col("fresh"))["think_s"]),
        first_tokens=statistics.median(inputs[place] for place in grown) if grown else 0.0,
        largest_tokens=statistics.median(grown.values()) if grown else 0.0,
    )


def _starts_s(rows: pl.DataFrame) -> pl.Series:
    """Return the arrivals that the trace fixes: those of requests, and of the first turns of sessions."""
    if "session" not in rows.columns:
        return rows["arrival_s"]
    return rows.filter(pl.col("session").is_null() | pl.col("session").is_first_distinct())["arrival_s"]


def _arrivals(starts_s: pl.Series) -> ArrivalFigures:
    duration_s = float(starts_s[-1] - starts_s[0])
    gaps_s = starts_s.diff().drop_nulls()
    return ArrivalFigures(
        duration_s=duration_s,
        mean_rate=(len(starts_s) - 1) / duration_s if duration_s else None,
        peak_rate=max(_counts(starts_s, SECOND_S).values()),
        cv_of_gaps=_variation(gaps_s),
        dispersion={each_s: _dispersion(starts_s, each_s) for each_s in (SECOND_S, MINUTE_S)},
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
    prompts: list[int] = []
    reused = 0
    for tokens, blocks, after, fresh in rows.select("input_tokens", "prefix_ids", "after", "fresh").iter_rows():
        known = next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        reused += min(tokens, prompts[after[0]] if after and not fresh else known * block_tokens)
        seen.update(blocks)
        prompts.append(tokens)
    return reused / float(rows["input_tokens"].sum())
