"""What a replay says of its progress where there is no terminal."""

import asyncio
import io

import pytest
from rich.console import Console

from ridgeline.loadtest.run import progress as module
from ridgeline.loadtest.run.progress import ReplayProgress, shown
from tests.support.patience import eventually


@pytest.mark.parametrize(("finished", "lines"), [(1, range(2, 1000)), (2, range(1, 2))])
async def test_lines_come_while_requests_run_and_one_when_all_are_done(monkeypatch, finished, lines):
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.001)
    text = io.StringIO()
    async with shown(Console(file=text), ReplayProgress("replay", 2, finished, finished)):
        await eventually(lambda: text.getvalue().count("done") >= lines[0] - 1)
        await asyncio.sleep(0.05)
    assert text.getvalue().count(f"{finished}/2 done") in lines
