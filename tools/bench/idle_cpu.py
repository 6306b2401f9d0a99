"""Measures the CPU time of an idle deployment by process, including Ray's own. Run it with `make bench-idle`.

Starts `ridgeline serve`, sends one request so that everything has run once, waits until it is quiet, and adds up the
CPU seconds and the voluntary context switches of all its processes over 40 s; the switches are how often they wake up.

usage: python -m tools.bench.idle_cpu [--set key=value] [--over-s 40]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from tests.engines.serve_process import serving

SETTLE_S = 20.0
"""Time until it is quiet: unused Ray workers end within seconds of the start, and then nothing changes."""
LIMIT = 0.05
"""Largest share of one core that an idle deployment may use in total."""
ROLES: dict[str, Callable[[str, str], bool]] = {
    "router": lambda name, command: command.startswith("ridgeline::router"),
    "workers": lambda name, command: command.startswith("ridgeline::worker"),
    "actors": lambda name, command: "serviceactor" in command,
    "engines": lambda name, command: "vllm::" in command,
    "gcs": lambda name, command: name.startswith("gcs_server"),
    "raylet": lambda name, command: name == "raylet",
    "agents": lambda name, command: "agent" in command or "monitor" in command or "dashboard" in command,
}
"""How to recognise each role by a process's name and command line; the first match counts, the rest are `others`."""


class Used(NamedTuple):
    """What a process has used so far."""

    role: str
    cpu_s: float
    wake_ups: int


def sample(driver: psutil.Process) -> dict[int, Used]:
    """Read the driver and all its descendants, by process id."""
    found: dict[int, Used] = {}
    for process in (driver, *driver.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            role = "driver" if process == driver else _role(process)
            # psutil counts the switches of the main thread alone, so each thread is asked.
            wake_ups = sum(_switches(process.pid, thread.id) for thread in process.threads())
            found[process.pid] = Used(role, times.user + times.system, wake_ups)
    return found


def _role(process: psutil.Process) -> str:
    name, command = process.name(), " ".join(process.cmdline()).lower()
    return next((role for role, fits in ROLES.items() if fits(name, command)), "others")


def _switches(pid: int, thread: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/task/{thread}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
    return 0


def show(before: dict[int, Used], after: dict[int, Used], over_s: float, console: Console) -> float:
    """Print the table; return the share of one core that all processes used, where 1 is a whole core."""
    rows: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for pid, (role, cpu_s, wake_ups) in after.items():
        _, had_s, had = before.get(pid, Used(role, 0.0, 0))
        for row in (role, "total"):
            rows[row].append((cpu_s - had_s, wake_ups - had))
    table = Table("role", "processes", "CPU seconds", "% of a core", "wake-ups/s")
    for role in sorted(rows, key=lambda role: (role == "total", role)):
        seconds, woken = (sum(each) for each in zip(*rows[role], strict=True))
        numbers = (f"{seconds:.2f}", f"{100 * seconds / over_s:.2f}", f"{woken / over_s:.0f}")
        table.add_row(role, str(len(rows[role])), *numbers)
    console.print(table)
    if gone := before.keys() - after.keys():
        console.print(f"[yellow]{len(gone)} processes ended meanwhile, and are not counted[/]")
    return sum(seconds for seconds, _ in rows["total"]) / over_s


def main() -> None:
    """Measure and print; exit with 1 if it is more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--over-s", type=float, default=40.0)
    asked = parser.parse_args()
    console = Console(width=140, highlight=False)
    with serving(*(word for setting in asked.set for word in ("--set", setting))) as serve:
        url, driver = serve.wait_ready(), psutil.Process(serve.process.pid)
        body = {"prompt": [1000 + token for token in range(64)], "max_tokens": 8, "temperature": 0}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        time.sleep(SETTLE_S)
        before, began_s = sample(driver), time.monotonic()
        time.sleep(asked.over_s)
        share = show(before, sample(driver), time.monotonic() - began_s, console)
    console.print(f"{100 * share:.1f} % of a core while idle, the limit is {100 * LIMIT:.0f} %")
    sys.exit(share > LIMIT)


if __name__ == "__main__":
    main()
