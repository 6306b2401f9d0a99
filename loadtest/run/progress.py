"""Shows the progress of a replay: a bar on a terminal, otherwise a plain line every five seconds."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ridgeline.loadtest.run.records import RequestRecord

LINE_EVERY_S = 5.0


@dataclass(slots=True)
class ReplayProgress:
    """Counts that a replay updates and a display shows."""

    label: str
    total: int
    sent: int | None = None
    finished: int = 0
    failed: int = 0

    def set_sent(self, requests: int) -> None:
        """Set the number of requests sent so far; the client tells it a few times a second."""
        self.sent = requests

    def add(self, record: RequestRecord) -> None:
        """Count one ended request."""
        self.finished += 1
        self.failed += not record.ok

    @property
    def text(self) -> str:
        """The requests in flight and failed, in words; before the first was sent, what happens instead."""
        if self.sent is None:
            return "warming up"
        failures = f", {self.failed} failed" if self.failed else ""
        return f"{max(0, self.sent - self.finished)} in flight{failures}"


@asynccontextmanager
async def shown(console: Console, progress: ReplayProgress) -> AsyncIterator[None]:
    """Show `progress` while the block runs."""
    show = _show_bar if console.is_terminal else _show_lines
    display = asyncio.create_task(show(console, progress))
    try:
        yield
    finally:
        display.cancel()
        await asyncio.wait([display])


async def _show_bar(console: Console, progress: ReplayProgress) -> None:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task(progress.label, total=progress.total, text=progress.text)
        try:
            while True:
                bar.update(task, completed=progress.finished, text=progress.text)
                await asyncio.sleep(0.25)
        finally:
            bar.update(task, completed=progress.finished, text=progress.text)


async def _show_lines(console: Console, progress: ReplayProgress) -> None:
    start = time.perf_counter()

    def print_line() -> None:
        done = f"{progress.finished}/{progress.total} done, {progress.text}"
        console.print(f"{progress.label}: {done}, {time.perf_counter() - start:.0f} s", highlight=False, markup=False)

    try:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            print_line()
    finally:
        print_line()
