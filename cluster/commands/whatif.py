"""`ridgeline whatif`: serves recorded requests again by other policies, on modelled engines, and compares them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.run.quantities import duration_text
from ridgeline.router.scheduler.features import FleetModel
from ridgeline.router.scheduler.offline_simulation import (
    Recorded,
    fleet_of,
    recorded,
    requests_of,
    serve,
    serve_adaptively,
)
from ridgeline.router.scheduler.recorded_events import AnyEvent, BadRecording, read_recording
from ridgeline.router.scheduler.registry import ADAPTIVE, division_name, make_policy
from ridgeline.router.scheduler.replay import replay

PURE: Final = ("colocated", "disaggregated")
"""The policies that are modes too: in these, prompts go first come, first served."""
MOST_SHOWN_DIFFERENCES: Final = 5


class PolicyRow(msgspec.Struct, frozen=True):
    """What became of the requests, seen or simulated."""

    policy: str
    workers: int
    in_time: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]


def whatif(
    file: Path,
    console: Console,
    policies: Sequence[str],
    workers: Sequence[int],
    ttft_slo_s: float | None = None,
    tpot_slo_s: float | None = None,
) -> None:
    """Print what was seen, whether its decisions come out the same again, and what other policies would have done.

    Without `policies`: the pure modes, mode adaptive, and the divisions of the fleet; without `workers`: as many as
    were recorded. Raises LoadTestError for a file that cannot be read and for a policy that is not there.
    """
    try:
        known = recorded(_events(file))
        _print_replay(file, console)
        found = [_seen(known, ttft_slo_s, tpot_slo_s)]
        for number in workers or (len(known.fleet.workers),):
            fleet = fleet_of(known.fleet, number)
            found += (_simulated(known, name, fleet, ttft_slo_s, tpot_slo_s) for name in policies or _usual(number))
        console.print(table(known, found))
    except OSError as error:
        raise LoadTestError(f"{file} cannot be read: {error.strerror}") from error
    except (BadRecording, ValueError) as error:
        raise LoadTestError(str(error)) from error


def _events(file: Path) -> Iterator[AnyEvent]:
    with file.open("rb") as lines:
        yield from read_recording(lines, str(file))


def _print_replay(file: Path, console: Console) -> None:
    made = replay(_events(file))
    same = made.placements + made.comparisons - len(made.differences)
    console.print(
        f"decided again: {same} of {made.placements + made.comparisons} decisions come out the same "
        f"({made.placements} placements, {made.comparisons} comparisons of policies)",
        highlight=False,
    )
    for one in made.differences[:MOST_SHOWN_DIFFERENCES]:
        console.print(
            f"  after {one.at_s:.1f} s: {one.recorded} then, {one.replayed} now", highlight=False, markup=False
        )


def _usual(workers: int) -> tuple[str, ...]:
    divisions = {round(part * workers) for part in (0.25, 0.5, 0.75)} & {*range(1, workers)}
    return ("colocated", *(division_name(number, workers, slack=False) for number in sorted(divisions)), ADAPTIVE)


def _seen(known: Recorded, ttft_slo_s: float | None, tpot_slo_s: float | None) -> PolicyRow:
    """Return what clients saw, by these SLOs if given."""
    requests = [
        msgspec.structs.replace(
            one,
            ttft_slo_s=one.ttft_slo_s if ttft_slo_s is None else ttft_slo_s,
            tpot_slo_s=one.tpot_slo_s if tpot_slo_s is None else tpot_slo_s,
        )
        for one in known.requests
    ]
    served = [name for name, _ in groupby(known.policies)]
    return PolicyRow(
        f"as served ({', '.join(served[:3])}{', ...' * (len(served) > 3)})",
        len(known.fleet.workers),
        _share(one.in_time for one in requests),
        _percentiles(one.ttft_s for one in requests if one.ttft_s is not None),
        _percentiles(one.tpot_s for one in requests if one.tpot_s is not None),
    )


def _simulated(
    known: Recorded, name: str, fleet: FleetModel, ttft_slo_s: float | None, tpot_slo_s: float | None
) -> PolicyRow:
    requests, (policy, options) = requests_of(known.requests, ttft_slo_s, tpot_slo_s), with_options(name)
    if policy != ADAPTIVE:
        serve(requests, fleet, make_policy(policy, options), models=known.models, by_deadline=policy not in PURE)
    elif options:
        raise ValueError(f"{ADAPTIVE} has no options: leave out {', '.join(options)}")
    else:
        serve_adaptively(requests, fleet, known.models)
    overhead_s = fleet.overhead_s
    return PolicyRow(
        name,
        len(fleet.workers),
        _share(one.ttft_s + overhead_s <= one.ttft_slo_s and one.tpot_s <= one.tpot_slo_s for one in requests),
        _percentiles(one.ttft_s + overhead_s for one in requests),
        _percentiles(one.tpot_s for one in requests if one.output_tokens > 1),
    )


def with_options(asked: str) -> tuple[str, dict[str, object]]:
    """Return the name and the options of `NAME` or `NAME:OPTION=VALUE,OPTION=VALUE`. Raises ValueError."""
    name, _, given = asked.partition(":")
    options: dict[str, object] = {}
    for one in filter(None, given.split(",")):
        option, equals, value = one.partition("=")
        if not equals or not option.strip():
            raise ValueError(
                f"policy {asked!r}: write options as NAME:OPTION=VALUE, as threshold:split_above_tokens=256"
            )
        try:
            options[option.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"policy {asked!r}: {value!r} is no value of {option.strip()}") from error
    return name, options


def table(known: Recorded, found: Sequence[PolicyRow]) -> Table:
    """Return the rows as a table."""
    requests = known.requests
    left_out = f", {known.unanswered} without an answer are left out" if known.unanswered else ""
    made = Table(
        title=f"{len(requests)} requests in {duration_text(requests[-1].arrival_s)}{left_out}; "
        "all rows but the first are simulated",
        title_justify="left",
    )
    for heading in ("policy", "workers", "in time", "TTFT p50", "p90", "TPOT p50", "p90"):
        made.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in found:
        times = [duration_text(value) if math.isfinite(value) else "-" for value in (*row.ttft_s, *row.tpot_s)]
        made.add_row(row.policy, str(row.workers), f"{row.in_time:.1%}", *times)
    return made


def _share(flags: Iterable[bool]) -> float:
    return float(np.mean([*flags]))


def _percentiles(values: Iterable[float]) -> tuple[float, float]:
    """Return the median and the 90th percentile; nan of nothing."""
    each = [*values]
    return tuple(np.percentile(each, (50, 90), method="higher").tolist()) if each else (math.nan, math.nan)
