"""Shows the progress of a replay: a bar on a terminal, otherwise a plain line every five seconds."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ridgeline.loadtest.run.records import RequestRecord

LINE_EVERY_S, BAR_EVERY_S = 5.0, 0.25


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
    display = asyncio.create_task(_show(console, progress))
    try:
        yield
    finally:
        display.cancel()
        await asyncio.wait([display])


async def _show(console: Console, progress: ReplayProgress) -> None:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
    )
    began_s, every_s = time.perf_counter(), BAR_EVERY_S if console.is_terminal else LINE_EVERY_S
    with Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal) as bar:
        task = bar.add_task(progress.label, total=progress.total, text=progress.text)

        def show() -> None:
            bar.update(task, completed=progress.finished, text=progress.text)
            if not console.is_terminal:
                done = f"{progress.finished}/{progress.total} done, {progress.text}"
                took_s = time.perf_counter() - began_s
                console.print(f"{progress.label}: {done}, {took_s:.0f} s", highlight=False, markup=False)

        try:
            while True:
                await asyncio.sleep(every_s)
                if console.is_terminal or progress.finished < progress.total:  # the last line comes at the end
                    show()
        finally:
            show()
