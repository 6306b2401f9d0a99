"""Worker hosts with fake engines on loopback, and a router's fleet connected to them by real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.router.fleet.fleet import SPLIT_FOR_EVER, Fleet
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.fake_engine import FakeEngine
from tests.support.samples import engine_config


@contextlib.asynccontextmanager
async def hosts(**layouts):
    """Start hosts on loopback, given pool -> layout; the second worker of a pool is called decode_1."""
    started = []
    for name, layout in layouts.items():
        pool, _, number = name.partition("_")
        engine = FakeEngine(pool)
        engine.config = replace(engine_config(pool, f"{pool}-{number or 0}"), incarnation=secrets.token_hex(4))

        async def describe(layout=layout):
            return layout, ["127.0.0.1:7001"]

        engine.describe = describe
        host = WorkerHost(engine, HANDLERS)
        await host.start()
        started.append(host)
    try:
        yield started
    finally:
        await asyncio.gather(*(host.stop() for host in started))


class Done(Exception):
    """Ends the task group that a fleet runs in."""


@contextlib.asynccontextmanager
async def a_fleet(addresses, roles=SPLIT_FOR_EVER, **options):
    """Provide a connected fleet while the block runs."""
    fleet = Fleet("router", roles=roles, **options)
    try:
        async with asyncio.TaskGroup() as group:
            await fleet.connect(addresses, group)
            yield fleet
            raise Done
    except* Done:
        pass
