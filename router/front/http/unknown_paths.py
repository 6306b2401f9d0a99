"""The answer to paths and methods that the server does not have, which names the right path.

Most are one base URL away: `POST /chat/completions` comes of a base URL without /v1, `/v1/v1/messages` of one too many.
Clients print only the error's message, so that has to say it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from ridgeline.router.front.http.errors import error_body
from ridgeline.router.front.http.routes import ROUTES

_PREFIXES: Final = frozenset({"", "v1", "api", "openai", "anthropic"})
"""Parts of a path that base URLs of clients have or lack."""
_SHOWN_CHARACTERS: Final = 100
"""How much of a path the answer repeats."""


def _tail(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.lower().split("/") if part not in _PREFIXES)


_BY_TAIL: Final = {_tail(path): path for path, callers in ROUTES.items() if callers != "operators"}


def meant_by(path: str) -> str | None:
    """Return the route that a path without a route most likely means."""
    return _BY_TAIL.get(_tail(path))


def install(app: Any) -> None:
    """Let the FastAPI app answer so; routes themselves raise FastAPI's own class, which vLLM's handler answers."""
    app.add_exception_handler(HTTPException, _answer)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    method, path = request.method, request.url.path[:_SHOWN_CHARACTERS]
    allowed = (error.headers or {}).get("Allow")
    if error.detail != status.phrase:  # not the app's own
        sentence = str(error.detail)
    elif status == HTTPStatus.METHOD_NOT_ALLOWED and allowed:
        sentence = f"{path} does not take {method}: use {allowed}."
    elif meant := meant_by(path):
        sentence = f"This server has no {path}: use {meant} (check the client's base URL)."
    else:
        sentence = f"This server has no {path}: GET /openapi.json lists its paths."
    return JSONResponse(error_body(status, sentence), status, error.headers)
