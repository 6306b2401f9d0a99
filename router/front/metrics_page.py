"""GET /metrics: open to all, so what it costs must not grow with how often it is asked.

In place of vLLM's, which renders for every request; installed by `router.front.app`.
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
"""So often is a page made, and so old may one be, when many ask. Workers are asked as often for the policy."""


def metrics_endpoint(
    refresh: Callable[[], Awaitable[None]],
    registry: CollectorRegistry,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[Request], Awaitable[Response]]:
    """The page of all series, rendered once in `EVERY_S` after the workers were asked for theirs."""

    async def render() -> bytes:
        await refresh()
        return generate_latest(registry)

    page = Shared(render, EVERY_S, clock)

    async def metrics(_request: Request) -> Response:
        return Response(await page(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return metrics
