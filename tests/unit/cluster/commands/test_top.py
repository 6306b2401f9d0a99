"""`ridgeline top`: what a pool's line says, and that a restart of the server does not end it."""

import io

import pytest
from rich.console import Console

from ridgeline.cluster.commands import top
from ridgeline.loadtest.run.server_metrics import parse_metrics

PAGE = """
# TYPE ridgeline_busy_seconds counter
ridgeline_busy_seconds_total{{pool="decode",worker="0"}} {busy}
ridgeline_busy_seconds_total{{pool="decode",worker="1"}} {busy}
# TYPE ridgeline_running gauge
ridgeline_running{{pool="decode",worker="0"}} 5
ridgeline_running{{pool="decode",worker="1"}} 6
# TYPE ridgeline_kv_blocks_free gauge
ridgeline_kv_blocks_free{{pool="decode",worker="0"}} 100
ridgeline_kv_blocks_free{{pool="decode",worker="1"}} 23
"""


@pytest.fixture
def pages(monkeypatch):
    """Counters of successive readings: the server restarts between the second and the third."""
    busy = iter((10.0, 11.0, 0.5, 1.5))

    async def read(_):
        return parse_metrics(PAGE.format(busy=next(busy)))

    monkeypatch.setattr(top, "_read", read)


async def test_a_restart_leaves_out_an_interval_and_figures_are_sums_over_workers(pages):
    shown = io.StringIO()
    await top.watch("http://unused", 0.0, 3, Console(file=shown, width=120))
    cells = [cell.strip() for cell in shown.getvalue().splitlines()[-2].split("│")]
    assert cells[1:6] == ["decode", "-", "11", "-", "123"]
