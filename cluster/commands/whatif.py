"""`ridgeline whatif` and `plan`: requests are served on modelled engines, by other policies, workers and devices.

`whatif` compares what is asked for; `plan` looks for the fewest workers that keep SLOs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.run.quantities import counted, duration_text
from ridgeline.loadtest.run_folder import RUN
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.roofline.analysis import datasheet_steps
from ridgeline.roofline.cost import StepCostModel
from ridgeline.roofline.hardware import hardware_by_name
from ridgeline.roofline.model_shape import load_model_shape
from ridgeline.router.scheduler.adaptive import ERROR
from ridgeline.router.scheduler.features import FleetModel, WorkerSpec, window_tokens
from ridgeline.router.scheduler.offline_simulation import (
    AS_MODELLED,
    Calibration,
    Models,
    Recorded,
    Served,
    Tried,
    calibrated,
    fewest_workers,
    fleet_of,
    grown,
    in_time_alone,
    outcome,
    ranked,
    recorded,
    simulated,
    usual_policies,
    with_slos,
)
from ridgeline.router.scheduler.recorded_events import AnyEvent, read_recording
from ridgeline.router.scheduler.replay import replay

if TYPE_CHECKING:  # of the serving part, which a client does not have
    from ridgeline.cluster.config.models import RidgelineConfig

MOST_SHOWN_DIFFERENCES: Final = 5
FEWEST_REQUESTS: Final = 50
"""Of these, a part of 95 % is known to +- 6 points."""
MOST_REQUESTS: Final = 2_000
"""Of a trace or a recording, that are simulated."""
MOST_UNANSWERED: Final = 0.1
"""With more than this part of the load left out, there is no answer: as much as steps may err at least."""
OF_FLOOR: Final = 3.0
"""On an H100, steps took 1.5 to 3.2 times what the data sheet allows (docs/how-to/operate.md). The range is from 1."""
STEPS_TAKE: Final = math.sqrt(OF_FLOOR)
HANDOVER_S: Final = 0.013
"""Of a data sheet's fleet: what a hand-off by CUDA IPC took on an H100, whatever its bytes."""
OVERHEAD_S: Final = 0.02
"""Of a TTFT outside of engines, likewise."""
MEMORY_USED: Final = 0.9
"""The part of a device's memory that an engine takes: vLLM's gpu_memory_utilization."""
STEP_TOKENS: Final = (2048, 8192)
"""The token budgets of a step that are tried on a device: those of decode and of prefill pools with GPUs."""
MOST_ERROR: Final = 0.5
"""Of a calibrated simulation on what was recorded; beyond that it is not believed."""
CHECKED_PAIRS: Final = 2
"""Of rounds on engines: the fewest that say anything."""
CHECKED_TRACE: Final = "trace.jsonl"
SEQUENCES: Final = 256
"""Of an engine on a device, as in a colocated pool with GPUs."""


class PlanAsked(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is for: requests of a recording or a trace, workers of a recording or a data sheet."""

    file: Path | None = None
    trace: str | None = None
    model: str | None = None
    hardware: str | None = None
    link_gb_per_s: float = 450.0
    goal: float = 0.95
    growth: float = 1.0
    most: int = 32
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    is_checked: bool = False
    """Whether it is checked on engines next."""

    @property
    def unit(self) -> str:
        """By what it counts."""
        return "device" if self.hardware else "worker"


class Layout(msgspec.Struct, frozen=True):
    """Workers of one kind, and how well it is known what their steps take."""

    fleet: FleetModel
    models: Models = ()
    calibration: Calibration = AS_MODELLED
    name: str = ""
    devices: int = 1
    """Of each worker."""
    unanswered: float = 0.0
    """The part of the recorded requests that is not simulated, because its answers are not known."""


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
    with _refusals(file):
        known = recorded(_events(file))
        _print_replay(file, console)
        requests = with_slos(known.requests, ttft_slo_s, tpot_slo_s)
        calibration = calibrated(known, ttft_slo_s, tpot_slo_s)
        served = [name for name, _ in groupby(known.policies)]
        name = f"as served ({', '.join(served[:3])}{', ...' * (len(served) > 3)})"
        found = [outcome(name, len(known.fleet.workers), requests)]
        for number in workers or (len(known.fleet.workers),):
            fleet = fleet_of(known.fleet, number)
            for asked in policies or usual_policies(number):
                policy, options = with_options(asked)
                longer = calibration.slowdown, calibration.prompts
                made = simulated(requests, fleet, policy, known.models, options, *longer)
                found.append(outcome(asked, number, made))
    left_out = f", {known.unanswered} without an answer are left out" if known.unanswered else ""
    title = f"{len(requests)} requests in {duration_text(requests[-1].arrival_s)}{left_out}; "
    console.print(table(f"{title}all rows but the first are simulated", found))
    _say([*_error(calibration)], console)


def plan(asked: PlanAsked, console: Console) -> tuple[list[Tried], list[Served]]:
    """Print the fewest workers, or devices, that keep the goal.

    Return the modes of so many, the best one first, and the requests. Raises LoadTestError for what cannot be read, too
    few requests, none with an SLO, and a model that does not fit.
    """
    with _refusals(asked.file or asked.trace):
        known = recorded(_events(asked.file)) if asked.file else None
        served = grown(_traffic(asked, known), asked.growth)
        layouts = [*_datasheet_layouts(asked, served)] if asked.hardware else [_recorded_layout(asked, known)]
    _require_possible(served, layouts, asked)
    found: list[tuple[Layout, list[Tried]]] = []
    with console.status("simulating") as status:
        for layout in layouts:
            status.update(f"simulating workers{layout.name}")
            most = asked.most // layout.devices
            tried = fewest_workers(served, layout.fleet, asked.goal, most, layout.models, layout.calibration)
            found.append((layout, [_of_layout(one, layout) for one in tried]))
        found.sort(key=lambda one: _rank(one[1][-1], asked.goal))
        layout, of_best = found[0]
        fleet = fleet_of(layout.fleet, of_best[-1].workers)
        modes = ranked(served, fleet, asked.goal, layout.models, layout.calibration)
    rows = [*(_of_layout(one, layout) for one in modes), *of_best[:-1], *(others[-1] for _, others in found[1:])]
    over = duration_text(served[-1].arrival_s)
    first = "the first " if len(served) == MOST_REQUESTS else ""
    console.print(table(f"{first}{len(served)} requests that come in {over}; simulated, the best row first", rows))
    _say([*_answer(rows[0], layout, asked), *_limits(layout, asked)], console)
    return modes, served


def _require_possible(served: Sequence[Served], layouts: Sequence[Layout], asked: PlanAsked) -> None:
    """Raise LoadTestError if no number of workers can serve the requests, or serve them in time."""
    longest = max(one.prompt_tokens + one.output_tokens for one in served)
    if (holds := max(layout.fleet.workers[0].kv_tokens for layout in layouts)) < longest:
        raise LoadTestError(f"a request of {longest:,} tokens is more than the KV cache of a worker, {holds:,}")
    alone = [in_time_alone(served, layout.fleet, layout.calibration) for layout in layouts]
    if (best := max(alone, key=lambda one: one.in_time)).in_time < asked.goal:
        more = ", or devices by --most" if asked.hardware else ""
        raise LoadTestError(
            f"no number of {asked.unit}s helps: each alone on an idle worker, {best.in_time:.1%} of the requests meet "
            f"their SLOs, with a TTFT of {_time(best.ttft_s[1])} and a TPOT of {_time(best.tpot_s[1])} (p90): raise "
            f"the SLOs{more}, or lower --goal"
        )


def compare_plan(modes: Sequence[Tried], served: Sequence[Served], out: Path) -> ComparePlan:
    """Return what compares the best two modes on engines. Raises LoadTestError."""
    best, other = (one.policy.partition(" ")[0] for one in modes[:2])
    slos = {(one.ttft_slo_s, one.tpot_slo_s) for one in served}
    (ttft_slo_s, tpot_slo_s), *others = slos
    if others or math.inf in (ttft_slo_s, tpot_slo_s):
        raise LoadTestError("--check takes one SLO on TTFT and one on TPOT: give --ttft-ms and --tpot-ms")
    if modes[0].workers == 1:
        raise LoadTestError(
            "one worker serves in mode colocated alone, so there is nothing to check: leave out --check"
        )
    if not served[-1].arrival_s:
        raise LoadTestError("all requests come at once, so there is no rate to compare at: give a trace over some time")
    return ComparePlan(
        trace=str(out / CHECKED_TRACE),
        rate=(len(served) - 1) / served[-1].arrival_s,
        limit=len(served),
        slo_ttft_ms=1e3 * ttft_slo_s,
        slo_tpot_ms=1e3 * tpot_slo_s,
        variants=f"{best},{other}",
        pairs=CHECKED_PAIRS,
    )


def pools_of(modes: Sequence[Tried]) -> list[str]:
    """Return the settings that give a deployment as many workers in each mode, divided as planned; else 1:1."""
    workers = modes[0].workers if modes else 2
    division = next((one.policy.partition(" ")[2] for one in modes if ":" in one.policy), f"1:{workers - 1}")
    numbers = zip(("prefill", "decode", "colocated"), (*division.split(":"), workers), strict=True)
    return [f"pools.{pool}.workers={number}" for pool, number in numbers]


def require_new(out: Path) -> None:
    """Raise LoadTestError for a folder that a check cannot have."""
    if (out / RUN).exists() or (out.exists() and not out.is_dir()):
        raise LoadTestError(f"{out} is a file, or the folder of an earlier run: name a new folder")


def write_trace(served: Sequence[Served], out: Path) -> None:
    """Write what a check replays. Raises LoadTestError."""
    rows = (
        {"timestamp": 1e3 * one.arrival_s, "input_length": one.prompt_tokens, "output_length": one.output_tokens}
        for one in served
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / CHECKED_TRACE).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    except OSError as error:
        raise LoadTestError(f"{out} cannot be written: {error.strerror}") from error


async def checked(config: RidgelineConfig, comparison: ComparePlan, out: Path, console: Console) -> None:
    """Serve the best two modes on engines, and print how much worse than the better one the best of the plan was."""
    from ridgeline.cluster.commands.loadtest import compare_command

    summary = await compare_command(config, comparison, out, console)
    goodput = {one["mode"]: one["points"][0]["request_goodput"] for one in summary["variants"].values()}
    told = ", ".join(f"{mode} {value:.3g} requests/s" for mode, value in goodput.items())
    if not (best := max(goodput.values())):
        console.print("regret of the plan: not known, since no request met its SLOs in either mode", highlight=False)
        return
    kept = goodput[comparison.modes[0]] / best
    console.print(f"regret of the plan: {1 - kept:.1%} of the goodput, of which engines had: {told}", highlight=False)


def _of_layout(one: Tried, layout: Layout) -> Tried:
    devices = one.workers * layout.devices
    return msgspec.structs.replace(one, policy=one.policy + layout.name, devices=devices)


def _rank(one: Tried, goal: float) -> tuple[bool, int, float]:
    """Return what is less for a better plan: one that keeps the goal, with fewer devices, with more in time."""
    keeps = one.least >= goal
    return not keeps, one.devices if keeps else 0, -one.usual


def _traffic(asked: PlanAsked, known: Recorded | None) -> list[Served]:
    name, what, fix = str(asked.file), "answers", "record for longer"
    if asked.trace is not None:
        name, what, fix = asked.trace, "requests", "give a longer trace"
        rows = load_trace(asked.trace).rows[:MOST_REQUESTS]
        if any(row.after for row in rows):
            raise LoadTestError(f"{name}: turns that wait for answers are not simulated: give a trace without sessions")
        served = [Served(row.arrival_s, row.input_tokens, row.output_tokens) for row in rows]
    elif known is not None:
        served = [*known.requests[:MOST_REQUESTS]]
    else:
        raise LoadTestError("there is no traffic to plan for: give a recording, or --trace")
    served = with_slos(served, asked.ttft_slo_s, asked.tpot_slo_s)
    if len(served) < FEWEST_REQUESTS:
        raise LoadTestError(f"{name} has {len(served)} {what}, and a plan takes {FEWEST_REQUESTS} or more: {fix}")
    if all(math.isinf(one.ttft_slo_s) and math.isinf(one.tpot_slo_s) for one in served):
        raise LoadTestError("no request has an SLO, so that any worker keeps all: give --ttft-ms, --tpot-ms or both")
    return served


def _recorded_layout(asked: PlanAsked, known: Recorded | None) -> Layout:
    if known is None:
        raise LoadTestError("nothing says how long steps take: give a recording, or --model and --hardware")
    models = () if asked.trace else [(at_s / asked.growth, each) for at_s, each in known.models]
    unanswered = 0.0 if asked.trace else known.unanswered / (known.unanswered + len(known.requests))
    first = msgspec.structs.replace(known, requests=known.requests[:MOST_REQUESTS])
    return Layout(known.fleet, models, calibrated(first, asked.ttft_slo_s, asked.tpot_slo_s), unanswered=unanswered)


def _datasheet_layouts(asked: PlanAsked, served: Sequence[Served]) -> Iterator[Layout]:
    """Yield workers of one device and of several, as far as attention heads can be divided and the model fits."""
    if asked.hardware is None or asked.model is None:
        raise LoadTestError("a device needs a model, and a model a device: give --model and --hardware")
    hardware, shape = hardware_by_name(asked.hardware), load_model_shape(asked.model)
    longest = max(one.prompt_tokens + one.output_tokens for one in served)
    memory_bytes = MEMORY_USED * (hardware.memory_bytes or math.inf)
    fits = False
    for devices in (1 << power for power in range(asked.most.bit_length())):
        token_bytes = StepCostModel(shape, tensor_parallel_size=devices).decode(1, longest).kv_read_bytes / longest
        kv_tokens = int((memory_bytes * devices - shape.weight_bytes) / token_bytes)
        if shape.num_q_heads % devices or kv_tokens < longest:
            continue
        fits, floor = True, datasheet_steps(shape, hardware, devices, asked.link_gb_per_s * 1e9)
        for tokens in STEP_TOKENS:
            spec = WorkerSpec("w", floor, tokens, window_tokens(floor, tokens), SEQUENCES, kv_tokens)
            yield Layout(
                FleetModel((spec,), HANDOVER_S, OVERHEAD_S),
                calibration=Calibration(STEPS_TAKE, STEPS_TAKE, STEPS_TAKE - 1.0),
                name=f", TP {devices}, steps of {tokens}",
                devices=devices,
            )
    if not fits:
        raise LoadTestError(
            f"up to {asked.most} {hardware.name} have no room for {shape.name} ({shape.weight_bytes / 1e9:,.1f} GB) "
            f"and a request of {longest:,} tokens: allow more by --most, or name another device"
        )


def _answer(best: Tried, layout: Layout, asked: PlanAsked) -> Iterator[str]:
    kept = (
        f"{best.in_time:.1%} in time in mode {best.policy}, and {best.least:.1%} to {best.most:.1%} if steps take "
        f"{1 + layout.calibration.error:.2f} times as long, and if 1/{1 + layout.calibration.error:.2f} of that"
    )
    number = counted(best.devices, asked.unit)
    again = layout.calibration.simulated
    if why := doubt(best, layout):
        yield f"I do not know whether {number} would keep {asked.goal:.0%}: {why}."
    elif best.least >= asked.goal:
        yield f"{number} would keep {asked.goal:.0%}: {kept}."
    else:
        yield f"{number} would not keep {asked.goal:.0%}, and more were not tried (--most): {kept}."
    mode = best.policy.partition(" ")[0]
    if again is not None and again.policy != mode and best.workers > 1 and not asked.is_checked:
        yield f"Mode {mode} was not recorded, so check this on engines: --check DIR."
    if late := max(best.late_first, best.late_tokens):
        yield f"The SLO on {'TTFT' if late == best.late_first else 'TPOT'} binds: {late:.1%} miss it."


def doubt(best: Tried, layout: Layout) -> str:
    """Return why a plan is not to be believed, or nothing."""
    seen, again = layout.calibration.seen, layout.calibration.simulated
    if layout.unanswered > MOST_UNANSWERED:
        return f"{layout.unanswered:.0%} of the recorded requests have no answer, and are not simulated"
    if again is not None and layout.calibration.error > MOST_ERROR:
        return f"what was recorded comes out {layout.calibration.error:.0%} off"
    if seen is not None and again is not None and abs(again.in_time - seen.in_time) > ERROR:
        return f"of what was recorded {again.in_time:.0%} come out in time, and {seen.in_time:.0%} were"
    return f"there are {best.beyond}" if best.beyond else ""


def _limits(layout: Layout, asked: PlanAsked) -> Iterator[str]:
    """Say how far a plan is to be believed."""
    if asked.hardware:
        yield (
            f"Nothing of this is measured: steps take {STEPS_TAKE:.1f} times what the data sheet of "
            f"{asked.hardware} allows, and the range is 1 to {OF_FLOOR:g} times. On an H100 they took 1.5 to 3.2."
        )
    else:
        yield from _error(layout.calibration)
    if asked.trace is None:
        yield "Prompts count without the tokens that prefix caches had. A recording has no refused requests."


def _error(calibration: Calibration) -> Iterator[str]:
    made, seen = calibration.simulated, calibration.seen
    if made is None or seen is None:
        yield "The simulation is not calibrated: that takes a recording of one mode."
        return
    times = zip(
        (*made.ttft_s, *made.tpot_s), (*seen.ttft_s, *seen.tpot_s), ("TTFT p50", "p90", "TPOT p50", "p90"), strict=True
    )
    told = ", ".join(f"{name} {_time(one_s)} ({_time(seen_s)})" for one_s, seen_s, name in times)
    yield (
        f"Steps take {calibration.slowdown:.2f} times what their models say, by the TPOT seen, and prompts "
        f"{calibration.prompts:.2f} times, by the TTFT. So simulated, what was recorded has {made.in_time:.1%} in time "
        f"(seen {seen.in_time:.1%}), {told}."
    )


def _say(sentences: Sequence[str], console: Console) -> None:
    for sentence in sentences:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _refusals(name: Path | str | None) -> Iterator[None]:
    """Turn what is wrong with a file or a name into a LoadTestError."""
    try:
        yield
    except OSError as error:
        raise LoadTestError(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
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


def table(title: str, found: Sequence[Tried]) -> Table:
    """Return the rows as a table; those marked have no other with more tokens both a device and a stream."""
    made = Table(title=title, title_justify="left")
    planned = any(one.devices for one in found)
    headings = ["policy", "workers", "in time", *["range"] * planned, "TTFT p50", "p90", "TPOT p50", "p90"]
    for heading in (*headings, *["tokens/s a device", "a stream"] * planned):
        made.add_column(heading, justify="left" if heading == "policy" else "right")
    for one in found:
        cells = [one.policy, str(one.workers), f"{one.in_time:.1%}"]
        cells += [f"{one.least:.0%} to {one.most:.0%}"] if planned else []
        cells += [_time(value_s) for value_s in (*one.ttft_s, *one.tpot_s)]
        if planned:
            a_device, a_stream = _speeds(one)
            best = not any(other[0] > a_device and other[1] > a_stream for other in map(_speeds, found))
            cells += [f"{a_device:.1f}", f"{a_stream:.1f}{' *' if best else '  '}"]
        made.add_row(*cells)
    return made


def _speeds(one: Tried) -> tuple[float, float]:
    """Return output tokens a second, of a device and of a stream."""
    return one.tokens_per_s / max(1, one.devices), 1 / one.tpot_s[0] if one.tpot_s[0] > 0 else math.inf


def _time(value_s: float) -> str:
    return duration_text(value_s) if math.isfinite(value_s) else "-"
