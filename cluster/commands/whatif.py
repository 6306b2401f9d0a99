"""`ridgeline whatif` and `plan`: recorded requests are served again on modelled engines, by other policies and workers.

`whatif` compares what is asked for; `plan` looks for the fewest workers that keep SLOs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.run.quantities import duration_text
from ridgeline.router.scheduler.adaptive import ERROR
from ridgeline.router.scheduler.features import FleetModel
from ridgeline.router.scheduler.offline_simulation import (
    Recorded,
    Served,
    Tried,
    fewest_workers,
    fleet_of,
    grown,
    part_of,
    percentiles,
    recorded,
    simulated,
    usual_policies,
    with_slos,
)
from ridgeline.router.scheduler.recorded_events import AnyEvent, BadRecording, read_recording
from ridgeline.router.scheduler.replay import replay

MOST_SHOWN_DIFFERENCES: Final = 5
FEWEST_REQUESTS: Final = 50
"""Of these, a part of 95 % is known to +- 6 points."""


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
        requests = with_slos(known.requests, ttft_slo_s, tpot_slo_s)
        found = [_seen(known, requests)]
        for number in workers or (len(known.fleet.workers),):
            fleet = fleet_of(known.fleet, number)
            found += (_simulated(known, requests, name, fleet) for name in policies or usual_policies(number))
        console.print(table(known, found))
    except OSError as error:
        raise LoadTestError(f"{file} cannot be read: {error.strerror}") from error
    except (BadRecording, ValueError) as error:
        raise LoadTestError(str(error)) from error


def plan(
    file: Path,
    console: Console,
    *,
    goal: float,
    growth: float,
    most: int,
    ttft_slo_s: float | None = None,
    tpot_slo_s: float | None = None,
) -> None:
    """Print the fewest workers, `most` at most, that keep `goal` of the requests in time at `growth` times their rate.

    Raises LoadTestError for a file that cannot be read, too few requests, or none with an SLO.
    """
    try:
        known = recorded(_events(file))
    except OSError as error:
        raise LoadTestError(f"{file} cannot be read: {error.strerror}") from error
    except (BadRecording, ValueError) as error:
        raise LoadTestError(str(error)) from error
    served = with_slos(known.requests, ttft_slo_s, tpot_slo_s)
    if len(served) < FEWEST_REQUESTS:
        raise LoadTestError(
            f"{file} has {len(served)} answers, and a plan takes {FEWEST_REQUESTS} or more: record for longer"
        )
    if all(math.isinf(one.ttft_slo_s) and math.isinf(one.tpot_slo_s) for one in served):
        raise LoadTestError("no request has an SLO, so that any worker keeps all: give --ttft-ms, --tpot-ms or both")
    with console.status("simulating"):
        found = fewest_workers(grown(served, growth), known.fleet, goal, most, known.models)
    console.print(_plan_table(served, found, growth))
    for sentence in _plan_sentences(known, served, found, goal):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _plan_table(served: Sequence[Served], found: Sequence[Tried], growth: float) -> Table:
    output_tokens = sum(one.output_tokens for one in served)
    made = Table(
        title=f"{len(served)} requests that come in {duration_text(served[-1].arrival_s / growth)}; simulated, the "
        "best policy of each number of workers",
        title_justify="left",
    )
    late_and_times = ("late: TTFT", "TPOT", "TTFT p90", "TPOT p50")
    for heading in ("workers", "policy", "in time", "least", *late_and_times, "tokens/s a worker", "tokens/s a stream"):
        made.add_column(heading, justify="left" if heading == "policy" else "right")
    for one in sorted(found, key=lambda one: one.workers):
        made.add_row(
            str(one.workers),
            one.policy,
            *(f"{part:.1%}" for part in (one.in_time, one.least, one.late_first, one.late_tokens)),
            duration_text(one.ttft_s[1]),
            duration_text(one.tpot_s[0]) if math.isfinite(one.tpot_s[0]) else "-",
            f"{output_tokens / one.took_s / one.workers:.1f}",
            f"{1 / one.tpot_s[0]:.1f}" if one.tpot_s[0] > 0 else "-",
        )
    return made


def _plan_sentences(known: Recorded, served: Sequence[Served], found: Sequence[Tried], goal: float) -> Iterator[str]:
    best = found[-1]
    kept = (
        f"{best.in_time:.1%} in time by policy {best.policy!r}, and {best.least:.1%} to {best.most:.1%} if steps take "
        f"{2 * ERROR:.0%} more or less"
    )
    if best.least >= goal:
        yield f"{best.workers} workers keep {goal:.0%}: {kept}."
    else:
        late = "TTFT" if best.late_first >= best.late_tokens else "TPOT"
        yield (
            f"{best.workers} workers do not keep {goal:.0%}, and more were not tried (--most): {kept}. The SLO on "
            f"{late} is missed most."
        )
    served_by = {*known.policies}
    if len(served_by) == 1 and served_by <= {*usual_policies(len(known.fleet.workers))}:  # others may have options
        again = simulated(served, known.fleet, known.policies[0], known.models)
        yield (
            f"The simulation of what was recorded: {part_of([one.in_time for one in again]):.1%} in time, seen "
            f"{part_of([one.in_time for one in served]):.1%}."
        )
    yield (
        "Prompts count without what prefix caches had, of which more workers would have less. Refused requests are not "
        "in a recording."
    )


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


def _seen(known: Recorded, requests: Sequence[Served]) -> PolicyRow:
    """Return what clients saw."""
    served = [name for name, _ in groupby(known.policies)]
    return PolicyRow(
        f"as served ({', '.join(served[:3])}{', ...' * (len(served) > 3)})",
        len(known.fleet.workers),
        part_of([one.in_time for one in requests]),
        percentiles(one.ttft_s for one in requests if one.ttft_s is not None),
        percentiles(one.tpot_s for one in requests if one.tpot_s is not None),
    )


def _simulated(known: Recorded, served: Sequence[Served], name: str, fleet: FleetModel) -> PolicyRow:
    policy, options = with_options(name)
    requests = simulated(served, fleet, policy, known.models, options)
    return PolicyRow(
        name,
        len(fleet.workers),
        part_of([one.in_time for one in requests]),
        percentiles(one.ttft_s for one in requests),
        percentiles(one.tpot_s for one in requests if one.output_tokens > 1),
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
