"""Which web pages may use the server from a browser: none, but for `server.cors_allowed_origins`.

Outside the keys' guard, because a browser asks first and without a key (preflight), and because a page can read a
refusal only with these headers. The operators' paths are for no page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from router.admin_access import is_admin_path
from router.asgi import Asgi, Receive, Scope, Send

PREFLIGHT_AGE_S: Final = 600
_READABLE: Final = ("retry-after", "www-authenticate", "x-request-id")


def with_cors(app: Asgi, allowed_origins: Sequence[str]) -> Asgi:
    """The app, which answers pages of these origins; as it is without any, so that a browser refuses them all."""
    if not allowed_origins:
        return app
    for_pages = CORSMiddleware(
        cast(ASGIApp, app),  # Starlette's types are any mappings, ours are dictionaries
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_READABLE,
        max_age=PREFLIGHT_AGE_S,
    )

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_admin_path(scope["path"]):
            await cast(Asgi, for_pages)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return call
