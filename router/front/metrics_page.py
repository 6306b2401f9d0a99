"""GET /metrics, which is open to all, so its cost must not grow with the number of calls.

It replaces vLLM's, which renders for every request; made by `router.server`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from router.front.shared_answer import Shared

EVERY_S = 0.5
"""Interval at which the page is rendered, and its greatest age, when many ask for it."""


def metrics_endpoint(
    refresh: Callable[[], Awaitable[None]],
    registry: CollectorRegistry,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint: the page of all series, rendered at most once in `EVERY_S` after asking the workers."""

    async def render() -> bytes:
        await refresh()
        return generate_latest(registry)

    page = Shared(render, EVERY_S, clock)

    async def metrics(_request: Request) -> Response:
        return Response(await page(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return metrics
