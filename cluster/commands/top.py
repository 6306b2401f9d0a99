"""`ridgeline top`: one line per pool, refreshed from the server's /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ridgeline.loadtest.errors import RestartedError, ServerError
from ridgeline.loadtest.report.pools import describe_pools
from ridgeline.loadtest.run.server import open_http
from ridgeline.loadtest.run.server_metrics import MetricsDelta, Scrape, difference, scrape

_SUMMED = ("running", "waiting", "kv_blocks_free")
_COLUMNS = ("pool", "workers", "running", "waiting", "KV blocks free", "busy", "tok/s", "AI", "ridge", "MFU", "MBU")


async def watch(url: str, interval_s: float, count: int, console: Console) -> None:
    """Show figures of the last interval until Ctrl-C, or `count` times; one in which the server restarted has none.

    Raises ServerError when the server does not answer.
    """
    async with open_http(url) as client:
        with Live(console=console, auto_refresh=False) as live:
            before, before_s = await _read(client), time.monotonic()
            readings = 0
            while count == 0 or readings < count:
                await asyncio.sleep(interval_s)
                after, after_s = await _read(client), time.monotonic()
                with contextlib.suppress(RestartedError):
                    live.update(_table(difference(before, after, after_s - before_s)), refresh=True)
                before, before_s = after, after_s
                readings += 1


async def _read(client: httpx.AsyncClient) -> Scrape:
    reading = await scrape(client)
    if reading is None:
        raise ServerError(f"{client.base_url} publishes no ridgeline_ metrics: is it a Ridgeline server?")
    return reading


def _table(delta: MetricsDelta) -> Table:
    table = Table(*_COLUMNS, title=f"last {delta.wall_s:.1f} s", title_justify="left")
    for pool, figures in describe_pools(delta).items():
        summed = (delta.level_sum(f"ridgeline_{name}", pool=pool) for name in _SUMMED)
        tokens_per_s = delta.total("ridgeline_tokens_total", pool=pool) / delta.wall_s
        table.add_row(
            pool,
            *map(_number, (delta.level("ridgeline_workers", pool=pool), *summed)),
            _percent(figures["busy_fraction"]),
            f"{tokens_per_s:.0f}",
            *(_number(figures[name], 1) for name in ("arithmetic_intensity", "ridge")),
            *(_percent(figures[name]) for name in ("mfu", "mbu")),
        )
    return table


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
