"""GET /metrics, which is open to all unless `security.metrics_keys_file` is set, so its cost must stay bounded.

It replaces vLLM's, which renders for every request and at one go. A page of 64 workers takes tens of milliseconds. All
streams of the router would stand still meanwhile, and no less if a thread rendered it, which would hold the
interpreter's lock. So it is rendered in pieces, between which the event loop serves the streams.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Final, TypeVar, cast

from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ridgeline.router.client_identity import hash_key
from ridgeline.router.front.http.errors import error_body
from ridgeline.router.front.middleware.auth import shown_keys
from ridgeline.router.front.single_flight import SingleFlight
from ridgeline.router.settings import RouterStart

_NO_KEY: Final = (
    "/metrics needs a key of its own here: send one of security.metrics_keys_file, or an operator's, as "
    "`Authorization: Bearer KEY` or as `x-api-key: KEY` (Prometheus: authorization.credentials_file)."
)
EVERY_S = 0.5
"""Interval at which the page is rendered, and its greatest age, when many ask for it."""
PIECE_SAMPLES = 64
"""Samples that are rendered at a time: some 0.5 ms."""
SLICE_S: Final = 0.001
"""How long this takes the loop before it gives way, for as long again: a token is late by no more than that."""
T = TypeVar("T")


def metrics_endpoint(
    refresh: Callable[[], Awaitable[None]],
    registry: CollectorRegistry,
    key_hashes: Collection[bytes] = frozenset(),
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint: the page of all series, rendered at most once in `EVERY_S` after asking the workers.

    With `key_hashes`, only for callers who show one of these keys.
    """

    async def render() -> bytes:
        await refresh()
        return await page_of(registry)

    page = SingleFlight(render, EVERY_S, clock)

    async def metrics(request: Request) -> Response:
        if key_hashes and not any(hash_key(key) in key_hashes for key in shown_keys(dict(request.scope))):
            body = error_body(HTTPStatus.UNAUTHORIZED, _NO_KEY)
            return JSONResponse(body, HTTPStatus.UNAUTHORIZED, {"www-authenticate": 'Bearer realm="ridgeline"'})
        return Response(await page(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return metrics


async def page_of(registry: CollectorRegistry) -> bytes:
    """Render all series in Prometheus' text format, giving way to the event loop again and again."""
    return b"".join([piece async for piece in paced(_pieces(registry))])


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, giving way to the event loop whenever making and using them has taken a slice."""
    await asyncio.sleep(0)  # what its caller has done until now is a slice too
    began_s = time.perf_counter()
    for item in items:
        yield item
        took_s = time.perf_counter() - began_s
        if took_s > SLICE_S:
            await asyncio.sleep(took_s)
            began_s = time.perf_counter()


def _pieces(registry: CollectorRegistry) -> Iterator[bytes]:
    for family in registry.collect():
        for first in range(0, max(1, len(family.samples)), PIECE_SAMPLES):
            piece = Metric(family.name, family.documentation, family.type)
            piece.samples = family.samples[first : first + PIECE_SAMPLES]
            text = generate_latest(cast(CollectorRegistry, SimpleNamespace(collect=lambda piece=piece: (piece,))))
            yield text if first == 0 else text.split(b"\n", 2)[2]  # without HELP and TYPE, which have been said


class NodeMetrics(Collector):
    """The request series that this process and the other routers of its node count, as of the last `refresh`.

    So a scrape of any of them shows the sum. This is prometheus-client's mode for several processes: each process
    counts in files, which all of them can read. Prometheus takes a fall for a restart, and would add all that is left
    once more. So the files of a router that has died stay until the deployment ends.
    """

    def __init__(self, router: RouterStart) -> None:
        """Have the series that this process makes from now on count in files. There is one of it per process."""
        self._folder = Path(tempfile.gettempdir(), f"ridgeline-routers-{router.deployment}")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(1, router.number):  # what they were serving, nobody serves any more
            mark_process_dead(_process(router.name, number), self._folder)  # type: ignore[no-untyped-call]
        self._own = f"*_{router.name}.*.db"
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self._folder)
        own = _process(router.name, router.number)
        values.ValueClass = values.MultiProcessValue(lambda: own)  # type: ignore[no-untyped-call]
        self._shown: Collection[str] = ()
        self._families: list[Metric] = []

    def show(self, own: CollectorRegistry) -> None:
        """Sum up the series of this registry, and none that a library makes in this process."""
        self._shown = {family.name for family in own.collect()}

    async def refresh(self) -> None:
        """Read the files, in a thread: four routers have some 3,000 samples."""
        self._families = [family for family in await asyncio.to_thread(self._read) if family.name in self._shown]

    def _read(self) -> list[Metric]:
        files = [str(file) for file in self._folder.glob("*.db")]
        return list(MultiProcessCollector.merge(files))  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Metric]:
        """Yield every family with the sums; called by prometheus-client at each scrape."""
        yield from self._families

    def close(self) -> None:
        """Remove the files of this router and of its former processes, since the deployment ends."""
        for file in self._folder.glob(self._own):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # the last one removes the folder
            self._folder.rmdir()


def _process(name: str, number: int) -> str:
    return f"{name}.{number}"
