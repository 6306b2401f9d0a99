"""Errors of /v1/messages as Anthropic's API has them, whoever raised them: a layer, vLLM's app, or a stream on its way.

Everything behind this layer speaks OpenAI's form, and vLLM's own translation covers only what its handler returns.
Anthropic's clients tell errors apart by `error.type`.
"""

from __future__ import annotations

import json
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


def anthropic_errors(app: Asgi) -> Asgi:
    """Rewrite the errors of Anthropic's paths, with the status as it is, and add Anthropic's `request-id`."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        anthropics = scope["path"] == _PATH or scope["path"].startswith(f"{_PATH}/")
        await app(scope, receive, _rewriting(send) if anthropics else send)

    return serve


def _rewriting(send: Send) -> Send:
    start: Message = {}
    error = bytearray()
    """As much of an error as has come."""
    told = False

    async def rewriting(message: Message) -> None:
        nonlocal start, told
        if message["type"] == "http.response.start":
            named = (b"request-id", current().request_id.encode())
            start = {**message, "headers": [*message["headers"], named]}
            if start["status"] < HTTPStatus.BAD_REQUEST:
                await send(start)
            return
        part = message.get("body", b"")
        if told:
            message = {**message, "body": b""}
        elif start["status"] >= HTTPStatus.BAD_REQUEST:
            error.extend(part)
            if message.get("more_body", False) and not _is_whole(error):
                return  # once it is, it is told: the end of the answer may come later (`ingress`)
            told, body = True, _rewritten(start["status"], bytes(error))
            standard = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            kept = [header for header in start["headers"] if header[0] not in (b"content-type", b"content-length")]
            await send({**start, "headers": [*standard, *kept]})
            message = {**message, "body": body}
        elif part.startswith(_EVENT):  # each event of a stream is sent at once
            event = _rewritten(HTTPStatus.INTERNAL_SERVER_ERROR, part.removeprefix(_EVENT))
            message = {**message, "body": _EVENT + event + b"\n\n"}
        await send(message)

    return rewriting


def _rewritten(status: int, body: bytes) -> bytes:
    """Return the error in Anthropic's form; a `code` in it, which an event has for want of a status, counts more."""
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
        status = code if isinstance(code, int) else status
    except (ValueError, LookupError, TypeError, AttributeError):
        message = body.decode(errors="replace") or HTTPStatus(status).phrase
    return json.dumps(anthropic_error(status, message)).encode()


def _is_whole(body: bytearray) -> bool:
    """Return whether an error's body is complete JSON."""
    try:
        json.loads(body)
    except ValueError:
        return False
    return True
