"""Every path that the server has, and who may call it.

vLLM's app decides by variables, arguments and plugins which routes it adds, and a next version may have others. What is
not in this table is taken away when the app is built, and said; `tests/unit/router/front/middleware/test_front_door.py`
compares both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, Literal

logger = logging.getLogger(__name__)

Callers = Literal["everybody", "clients", "operators"]
"""`everybody` by GET only: for load balancers, orchestrators and Prometheus; other methods are for clients."""

ROUTES: Final[Mapping[str, Callers]] = {
    "/health": "everybody",
    "/ready": "everybody",
    "/ping": "everybody",
    "/metrics": "everybody",
    "/ridgeline/workers": "operators",
    "/ridgeline/drain": "operators",
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
            "/redoc",
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
"""What is asked for here runs on workers."""
ON_WISH: Final = frozenset({"/static", "/tokenizer_info"})
"""Made for server_args enable_offline_docs and enable_tokenizer_info_endpoint only."""
OPEN_PATHS: Final = frozenset(path for path, callers in ROUTES.items() if callers == "everybody")


def keep_known_routes(app: Any) -> None:
    """On vLLM's FastAPI app, once it is whole."""
    known = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    for route in app.router.routes:
        if route not in known:
            logger.warning("%s is not offered: the table of routes does not have it", getattr(route, "path", route))
    app.router.routes[:] = known
