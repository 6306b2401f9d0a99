"""Names every request: `x-request-id` in each answer, the client's own if that can be echoed.

Clients keep it for whoever helps them (openai's `_request_id`), proxies for their logs.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable
from typing import Final

from router.front.http.context import MAX_REQUEST_ID_CHARACTERS, current
from router.front.http.types import Asgi, Message, Receive, Scope, Send

HEADER: Final = b"x-request-id"
_PRINTABLE: Final = re.compile(rb"[!-~]{1,%d}" % MAX_REQUEST_ID_CHARACTERS)


def new_request_id() -> str:
    """Return an id that no other request has."""
    return uuid.uuid4().hex


class RequestIds:
    """Adds the header to every answer, also to those of the layers below."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        request_id = given if _PRINTABLE.fullmatch(given) else new_request_id().encode()
        current().request_id = request_id.decode()

        def sending(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":  # server_args.enable_request_id_headers adds one too
                others = [header for header in message["headers"] if header[0].lower() != HEADER]
                message = {**message, "headers": [*others, (HEADER, request_id)]}
            return send(message)

        await self._app(scope, receive, sending)
