"""The body of every error that the router itself returns, in the format of OpenAI's API and of vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

from ridgeline.router.front.http.types import Send

_KINDS: Final[dict[int, str]] = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.REQUEST_TIMEOUT: "invalid_request_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "invalid_request_error",
}
"""The value of `type` by status; for other statuses it is the status's phrase, as in vLLM."""


def error_body(status: int, sentence: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error as a JSON object; `param` names what is wrong in the request."""
    kind = _KINDS.get(status, HTTPStatus(status).phrase)
    return {"error": {"message": sentence, "type": kind, "param": param, "code": int(status)}}


CHALLENGE: Final = ((b"www-authenticate", b'Bearer realm="ridgeline"'),)
"""The header of each answer 401."""


class HttpRefusal(Exception):
    """The request is refused with this status; the message says why. `param` names what is wrong in it."""

    def __init__(
        self,
        status: int,
        sentence: str,
        *,
        param: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        closes: bool = False,
    ) -> None:
        super().__init__(sentence)
        self.status = int(status)
        self.param = param
        self.headers = [*headers, (b"connection", b"close")] if closes else [*headers]
        self.closes = closes
        """Whether the connection is closed, since the rest of the body is not read."""


async def send_error(send: Send, refusal: HttpRefusal, *, more_body: bool = False) -> None:
    """Send a refusal as the answer. With `more_body` the caller ends the answer itself."""
    body = json.dumps(error_body(refusal.status, str(refusal), refusal.param)).encode()
    standard = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": [*standard, *refusal.headers]})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
