"""The Retry-After header of refusals. vLLM's errors carry no headers, so the estimate is in the request's context."""

from __future__ import annotations

from collections.abc import Awaitable
from http import HTTPStatus
from typing import Final

from router.front.http.context import current
from router.front.http.types import Asgi, Message, Receive, Scope, Send

_RETRYABLE: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class RetryAfter:
    """Adds Retry-After to every 429 and 503."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        context = current()

        def sending(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and message["status"] in _RETRYABLE:
                header = (b"retry-after", str(context.retry_after_s).encode())
                message = {**message, "headers": [*message["headers"], header]}
            return send(message)

        await self._app(scope, receive, sending)
