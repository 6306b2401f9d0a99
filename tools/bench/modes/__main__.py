"""The map of three modes over limits of TTFT and TPOT, on one running fleet.

    python -m tools.bench.modes --conversation-trace CONV.csv --code-trace CODE.csv
    python -m tools.bench.modes --workloads poisson --variants colocated,disaggregated --budget-s 1200
    python -m tools.bench.modes --part shift --out runs/bench-shift
    python -m tools.bench.modes --resume --out runs/bench-modes

Three workloads: 512 tokens in and 64 out at Poisson arrivals, and slices of the two Azure traces of 2023. For each the
idle server is measured, which gives the limits and a rate in the middle; then there are rounds in random order until
the time is up. The pure modes know no limits, so one round of theirs serves all cells; the adaptive mode is told a
cell's limits by headers and has rounds of its own for each. Writes OUT/summary.json, with `cells`, OUT/rounds.jsonl as
rounds end, and OUT/records.jsonl, and prints the table.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from rich.console import Console

from ridgeline.cluster.commands.serve import Unfit
from ridgeline.cluster.config.loader import ConfigError
from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.run_folder import ROUNDS, free_folder
from tools.bench.modes.fleet import ORDINALS_PER_ROUND, running
from tools.bench.modes.journal import Clock, Journal, read_journal
from tools.bench.modes.map import run_map
from tools.bench.modes.settings import FROM_FILES, VARIANTS, WORKLOADS, Settings, save, saved
from tools.bench.modes.shift import run_shift

DEFAULTS = Settings()
UNFINISHED_ROUNDS = 4
"""Rounds whose prompts a run that was stopped may have sent without writing that down."""


async def run(settings: Settings, journal: Journal, console: Console, clock: Clock) -> None:
    """Start the deployment, run the part that is asked for, and stop it."""
    async with running(settings, journal.folder, console) as fleet:
        await fleet.check(settings.variants)
        fleet.next_ordinal = journal.next_ordinal + (UNFINISHED_ROUNDS * ORDINALS_PER_ROUND if journal.lines else 0)
        run_part = run_shift if settings.part == "shift" else run_map
        await run_part(fleet, settings, journal, clock, console)


def options() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.modes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", choices=("map", "shift"), default="map")
    add("--variants", type=_words, default=VARIANTS, help=f"modes, by default {','.join(VARIANTS)}")
    add("--workloads", type=_words, default=WORKLOADS, help=f"by default {','.join(WORKLOADS)}")
    for name, file in FROM_FILES.items():
        add(f"--{name}-trace", metavar="FILE", help=f"{file} of github.com/Azure/AzurePublicDataset")
    add("--ttft-factors", type=_numbers, default=DEFAULTS.ttft_factors, help="of the unloaded TTFT")
    add("--tpot-factors", type=_numbers, default=DEFAULTS.tpot_factors, help="of the unloaded decode step")
    add("--rate-factors", type=_numbers, default=DEFAULTS.rate_factors, help="of the middle rate")
    add("--rates", type=_rates, default={}, metavar="WORKLOAD=RATE,..", help="middle rates, instead of calculated ones")
    add("--requests", type=int, default=DEFAULTS.requests, help="requests of a round")
    add("--most-blocks", type=int, default=DEFAULTS.most_blocks, help="most rounds of each pure mode at each rate")
    add("--budget-s", type=float, help=f"seconds in all, start included; by default {DEFAULTS.budget_s:g}")
    add("--phase-s", type=float, default=DEFAULTS.phase_s, help="shift: seconds of a phase")
    add("--share", type=float, default=DEFAULTS.share, help="shift: load, as a share of what both workers hold")
    add("--seed", type=int, default=DEFAULTS.seed)
    add("--config", default=DEFAULTS.config)
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    add("--url", help="a running deployment, instead of starting one")
    add("--out", type=Path, default=Path("runs/bench-modes"))
    add("--resume", action="store_true", help="go on with the run in --out, as it was begun; --budget-s may be new")
    return parser


def settings_of(given: argparse.Namespace) -> Settings:
    """Return the settings that the command line gives."""
    chosen = {name: value for name, value in vars(given).items() if name in Settings.__struct_fields__}
    chosen["traces"] = {name: path for name in FROM_FILES if (path := getattr(given, f"{name}_trace")) is not None}
    chosen["overrides"] = dict(one.partition("=")[::2] for one in given.overrides)
    return Settings(**chosen | {"budget_s": given.budget_s or DEFAULTS.budget_s})


def main() -> None:
    """Read the command line, and run or resume."""
    began_s, given, console = time.monotonic(), options().parse_args(), Console(width=160)
    out: Path = given.out
    try:
        if given.resume:
            settings, journal = saved(out), read_journal(out)
        else:
            settings = settings_of(given)
            settings.check()
            out = free_folder(out)
            save(settings, out)
            journal = Journal(out)
        clock = Clock(began_s - journal.spent_s, given.budget_s or settings.budget_s)
        asyncio.run(run(settings, journal, console, clock))
    except (LoadTestError, ConfigError, Unfit) as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False)
        _tell_how_to_go_on(out, console)
        sys.exit(1)
    except KeyboardInterrupt:
        _tell_how_to_go_on(out, console)
        sys.exit(130)
    console.print(f"wrote {out / 'summary.json'}", highlight=False, markup=False)


def _tell_how_to_go_on(out: Path, console: Console) -> None:
    if (out / ROUNDS).exists():
        how = f"python -m tools.bench.modes --resume --out {out}"
        console.print(f"stopped before the end; to go on: {how}", style="yellow", highlight=False, markup=False)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(sorted({float(word) for word in _words(text)}))


def _rates(text: str) -> dict[str, float]:
    return {name: float(rate) for name, _, rate in (word.partition("=") for word in _words(text))}


if __name__ == "__main__":
    main()
