"""Measures the CPU time of an idle deployment by process, including Ray's own. Run it with `make bench-idle`.

Starts `ridgeline serve` on a free port, sends one request so that everything has run once, waits until it is quiet, and
adds up the CPU seconds of all its processes over 40 s. `--threads` also lists the threads with the most voluntary
context switches per second, which are those that wake up.

usage: python -m tools.bench.idle_cpu [--config deploy/local.yaml] [--threads 25] [--set key=value]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx
import psutil
from rich.console import Console
from rich.table import Table

OVER_S = 40.0
SETTLE_S = 20.0
"""Time until it is quiet: unused Ray workers end within seconds of the start, and then nothing changes."""
START_WITHIN_S = 600.0
STOP_WITHIN_S = 60.0
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


@dataclass(frozen=True)
class Sample:
    """The resources that each process has used so far."""

    at_s: float
    cpu_s: dict[int, float]
    """CPU seconds by process id."""
    roles: dict[int, str]
    switches: dict[tuple[int, int], int]
    """Voluntary context switches by process and thread id."""
    threads: dict[tuple[int, int], str]
    """Names of threads by process and thread id."""
    thread_cpu_s: dict[tuple[int, int], float]


def take_sample(driver: psutil.Process) -> Sample:
    """Read the driver and all its descendants."""
    cpu_s: dict[int, float] = {}
    roles: dict[int, str] = {}
    switches: dict[tuple[int, int], int] = {}
    threads: dict[tuple[int, int], str] = {}
    thread_cpu_s: dict[tuple[int, int], float] = {}
    for process in (driver, *driver.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            cpu_s[process.pid] = times.user + times.system
            roles[process.pid] = "driver" if process == driver else _role(process)
            for one in process.threads():
                thread_cpu_s[process.pid, one.id] = one.user_time + one.system_time
            for thread, name, count in _threads(process.pid):
                threads[process.pid, thread] = name
                switches[process.pid, thread] = count
    return Sample(time.monotonic(), cpu_s, roles, switches, threads, thread_cpu_s)


def _role(process: psutil.Process) -> str:
    name, command = process.name(), " ".join(process.cmdline()).lower()
    return next((role for role, fits in ROLES.items() if fits(name, command)), "others")


def _threads(pid: int) -> Iterator[tuple[int, str, int]]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            lines = (task / "status").read_text().splitlines()
            values = dict(line.split(":", 1) for line in lines)
            yield int(task.name), values["Name"].strip(), int(values["voluntary_ctxt_switches"])


def show(before: Sample, after: Sample, num_threads: int, console: Console) -> float:
    """Print the table; return the share of one core that all processes used, where 1 is a whole core."""
    over_s = after.at_s - before.at_s
    used_s = {pid: after.cpu_s[pid] - before.cpu_s.get(pid, 0.0) for pid in after.cpu_s}
    wakeups: Counter[int] = Counter()
    by_thread: Counter[tuple[int, int]] = Counter()
    for thread, count in after.switches.items():
        by_thread[thread] = count - before.switches.get(thread, 0)
        wakeups[thread[0]] += by_thread[thread]
    members: defaultdict[str, list[int]] = defaultdict(list)
    for pid, role in after.roles.items():
        members[role].append(pid)
    table = Table("role", "processes", "CPU seconds", "% of a core", "wake-ups/s")
    for role in ("router", "workers", "actors", "engines", "driver", "raylet", "gcs", "agents", "others"):
        pids = members[role]
        seconds = sum(used_s[pid] for pid in pids)
        woken = sum(wakeups[pid] for pid in pids)
        table.add_row(role, str(len(pids)), f"{seconds:.2f}", f"{100 * seconds / over_s:.2f}", f"{woken / over_s:.0f}")
    total_s = sum(used_s.values())
    woken = sum(wakeups.values())
    table.add_row("total", str(len(used_s)), f"{total_s:.2f}", f"{100 * total_s / over_s:.2f}", f"{woken / over_s:.0f}")
    console.print(table)
    for (pid, thread), count in by_thread.most_common(num_threads):
        name = after.threads[pid, thread]
        seconds = after.thread_cpu_s.get((pid, thread), 0.0) - before.thread_cpu_s.get((pid, thread), 0.0)
        console.print(
            f"{count / over_s:8.1f} wake-ups/s  {seconds:5.2f} s  {after.roles[pid]:8s} {pid}/{thread} {name}"
        )
    if gone := before.cpu_s.keys() - after.cpu_s.keys():
        console.print(f"[yellow]{len(gone)} processes ended meanwhile, and are not counted[/]")
    return total_s / over_s


@contextmanager
def serving(config: str, settings: list[str], log: TextIO) -> Iterator[tuple[psutil.Process, str]]:
    """Run `ridgeline serve` until the block ends; yield its process and its URL."""
    ridgeline = str(Path(sys.executable).with_name("ridgeline"))
    command = [ridgeline, "serve", "--config", config, "--set", "server.port=0", "--name", f"idle-{os.getpid()}"]
    for setting in settings:
        command += ["--set", setting]
    with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            yield psutil.Process(process.pid), _url(process, Path(log.name))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    give_up_s = time.monotonic() + START_WITHIN_S
    while time.monotonic() < give_up_s and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("ready: "):
                return line.split()[1].removesuffix("/v1")
        time.sleep(0.2)
    raise SystemExit(f"the deployment did not become ready:\n{log.read_text()}")


def main() -> None:
    """Measure and print; exit with 1 if it is more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="deploy/local.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--over-s", type=float, default=OVER_S)
    asked = parser.parse_args()
    console = Console(width=140, highlight=False)
    log_path = Path("runs/idle_cpu.log")
    log_path.parent.mkdir(exist_ok=True)
    with log_path.open("w") as log, serving(asked.config, asked.set, log) as (driver, url):
        body = {"prompt": [1000 + token for token in range(64)], "max_tokens": 8, "temperature": 0}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        time.sleep(SETTLE_S)
        before = take_sample(driver)
        time.sleep(asked.over_s)
        share = show(before, take_sample(driver), asked.threads, console)
    console.print(f"{100 * share:.1f} % of a core while idle, the limit is {100 * LIMIT:.0f} %")
    if share > LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
