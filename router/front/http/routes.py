"""Every route of the server, and who may call it.

vLLM's app decides by variables, arguments and plugins which routes it adds, and a next version may add others. Routes
that are not in this table are removed when the app is built, with a warning;
`tests/components/router/front/middleware/test_front_door.py` compares the two.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from ridgeline.router.front.http.errors import error_body

logger = logging.getLogger(__name__)

Callers = Literal["everybody", "clients", "operators"]
"""`everybody` may only read (GET, HEAD), for load balancers, orchestrators, Prometheus and strangers to the live page;
the rest is for clients."""

ROUTES: Final[Mapping[str, Callers]] = {
    "/": "everybody",
    "/health": "everybody",
    "/ready": "everybody",
    "/ping": "everybody",
    "/metrics": "everybody",
    "/ridgeline/state": "operators",
    "/ridgeline/state/stream": "operators",
    "/ridgeline/workers": "operators",
    "/ridgeline/drain": "operators",
    "/ridgeline/mode": "operators",
    "/ridgeline/decisions": "operators",
    "/ridgeline/requests": "operators",
    "/ridgeline/record": "operators",
    "/ridgeline/forget_prefixes": "operators",
    "/ridgeline/scale": "operators",
    "/ridgeline/restart": "operators",
    "/ridgeline/operation": "operators",
    "/v1/load_lora_adapter": "operators",
    "/v1/unload_lora_adapter": "operators",
    **dict.fromkeys(
        (
            "/docs",
            "/docs/oauth2-redirect",
            "/generative_scoring",
            "/detokenize",
            "/inference/v1/abort_requests",
            "/inference/v1/generate",
            "/invocations",
            "/kv_event_sources",
            "/load",
            "/openapi.json",
            "/static",
            "/tokenize",
            "/tokenizer_info",
            "/v1/chat/completions",
            "/v1/chat/completions/batch",
            "/v1/chat/completions/derender",
            "/v1/chat/completions/render",
            "/v1/completions",
            "/v1/completions/derender",
            "/v1/completions/render",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/messages/render",
            "/v1/models",
            "/v1/models/{model:path}",
            "/v1/responses",
            "/v1/responses/render",
            "/v1/responses/{response_id}",
            "/v1/responses/{response_id}/cancel",
            "/version",
        ),
        "clients",
    ),
}
GENERATING: Final = frozenset(
    {
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
    }
)
"""Routes whose requests run on workers."""
ON_WISH: Final = frozenset({"/tokenizer_info"})
"""Routes that exist only with server_args enable_tokenizer_info_endpoint."""
OPEN_PATHS: Final = frozenset(path for path, callers in ROUTES.items() if callers == "everybody")


def keep_known_routes(app: Any) -> None:
    """Remove all other routes from vLLM's FastAPI app, once it is complete."""
    known = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    for route in app.router.routes:
        if route not in known:
            logger.warning("%s is not offered: it is not in the table of routes", getattr(route, "path", route))
    app.router.routes[:] = known


_PREFIXES: Final = frozenset({"", "v1", "api", "openai", "anthropic"})
"""Parts of a path that base URLs of clients have or lack."""
_SHOWN_CHARACTERS: Final = 100
"""How much of a path the answer repeats."""


def _tail(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.lower().split("/") if part not in _PREFIXES)


_BY_TAIL: Final = {_tail(path): path for path, callers in ROUTES.items() if callers != "operators" and path != "/"}


def name_the_right_path(app: Any) -> None:
    """Let the FastAPI app name the right path to whoever asks for one, or by a method, that it does not have.

    Most are one base URL away: `POST /chat/completions` comes of a base URL without /v1. Clients print only the error's
    message. Routes themselves raise FastAPI's own class, which vLLM's handler answers.
    """
    app.add_exception_handler(HTTPException, _name_the_right_path)


async def _name_the_right_path(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status, path = HTTPStatus(error.status_code), request.url.path
    shown, allowed = path[:_SHOWN_CHARACTERS], (error.headers or {}).get("Allow")
    if error.detail != status.phrase:  # not the app's own
        sentence = str(error.detail)
    elif status == HTTPStatus.METHOD_NOT_ALLOWED and allowed:
        sentence = f"{shown} does not take {request.method}: use {allowed}."
    elif meant := _BY_TAIL.get(_tail(path)):
        sentence = f"This server has no {shown}: use {meant} (check the client's base URL)."
    else:
        sentence = f"This server has no {shown}: GET /openapi.json lists its paths."
    return JSONResponse(error_body(status, sentence), status, error.headers)
