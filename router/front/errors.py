"""The one body that every error of the router's own has: as OpenAI's API and vLLM write it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

from router.front.middleware.types import Send

_KINDS: Final[dict[int, str]] = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.REQUEST_TIMEOUT: "invalid_request_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "invalid_request_error",
}
"""What `type` says; for other statuses, their phrase, as vLLM does."""


def error_body(status: int, sentence: str, param: str | None = None) -> dict[str, Any]:
    """The body of an answer with this status, as a JSON object; `param` names what is wrong in the request."""
    kind = _KINDS.get(status, HTTPStatus(status).phrase)
    return {"error": {"message": sentence, "type": kind, "param": param, "code": int(status)}}


async def send_error(
    send: Send,
    status: int,
    sentence: str,
    *,
    param: str | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
    more_body: bool = False,
) -> None:
    """Answer with an error. With `more_body` the caller ends the answer itself."""
    body = json.dumps(error_body(status, sentence, param)).encode()
    standard = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": int(status), "headers": [*standard, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
