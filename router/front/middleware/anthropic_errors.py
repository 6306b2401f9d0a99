"""Errors of /v1/messages as Anthropic's API has them, whoever raised them: a layer, vLLM's app, or a stream on its way.

Everything behind this layer speaks OpenAI's form, and vLLM's own translation covers only what its handler returns.
Anthropic's clients tell errors apart by `error.type`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any, Final

from ridgeline.router.front.http.context import current
from ridgeline.router.front.http.types import Asgi, Message, Receive, Scope, Send

_PATH: Final = "/v1/messages"
_EVENT: Final = b"event: error\ndata: "
_TYPES: Final[dict[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""Anthropic's types by status; others are `invalid_request_error` below 500 and `api_error` from there on."""


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": current().request_id}


class AnthropicErrors:
    """Rewrites the errors of Anthropic's paths, with the status as it is, and adds Anthropic's `request-id`."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == _PATH or path.startswith(f"{_PATH}/")):
            await self._app(scope, receive, _Rewriting(send).send)
        else:
            await self._app(scope, receive, send)


class _Rewriting:
    """One answer on its way."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        """The head of an error, which waits for its body."""
        self._body = b""
        """As much of an error as has come."""
        self._told = False

    def send(self, message: Message) -> Awaitable[None]:
        """Pass the message on, or rewrite it."""
        if message["type"] == "http.response.start":
            named = (b"request-id", current().request_id.encode())
            message = {**message, "headers": [*message["headers"], named]}
            if message["status"] >= HTTPStatus.BAD_REQUEST:
                self._start = message
                return _nothing()
        elif self._start:
            return self._send_error(message)
        elif self._told:
            message = {**message, "body": b""}
        elif message.get("body", b"").startswith(_EVENT):  # each event of a stream is sent at once
            event = message["body"].removeprefix(_EVENT)
            message = {**message, "body": _EVENT + _rewritten(HTTPStatus.INTERNAL_SERVER_ERROR, event) + b"\n\n"}
        return self._send(message)

    async def _send_error(self, message: Message) -> None:
        """Send head and body once all of the error has come; the end of the answer may come later (`ingress`)."""
        self._body += message.get("body", b"")
        if message.get("more_body", False) and not _is_whole(self._body):
            return
        start, self._start, self._told = self._start, {}, True
        body = _rewritten(start["status"], self._body)
        standard = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        kept = [header for header in start["headers"] if header[0] not in (b"content-type", b"content-length")]
        await self._send({**start, "headers": [*standard, *kept]})
        await self._send({**message, "body": body})


def _rewritten(status: int, body: bytes) -> bytes:
    """Return the error in Anthropic's form; a `code` in it, which an event has for want of a status, counts more."""
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
        status = code if isinstance(code, int) else status
    except (ValueError, LookupError, TypeError, AttributeError):
        message = body.decode(errors="replace") or HTTPStatus(status).phrase
    return json.dumps(anthropic_error(status, message)).encode()


def _is_whole(body: bytes) -> bool:
    """Return whether an error's body is complete JSON."""
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


async def _nothing() -> None:
    """Keep a head until its body is known."""
