"""Which web pages may use the server from a browser: none except `server.cors_allowed_origins`.

It comes before the key guard, because a browser first asks without a key (preflight), and because a page can read a
refusal only with these headers. No page may use the operator's paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ridgeline.router.front.http.types import Asgi, Receive, Scope, Send
from ridgeline.router.front.middleware.admin_access import is_admin_path

PREFLIGHT_AGE_S: Final = 600
_READABLE: Final = ("retry-after", "www-authenticate", "x-request-id")


class Cors:
    """Answers pages of these origins. Without any it changes nothing, so that browsers refuse all pages."""

    def __init__(self, app: Asgi, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._for_pages = app
        if allowed_origins:
            pages = CORSMiddleware(
                cast(ASGIApp, app),  # Starlette accepts any mapping, ours are dictionaries
                allow_origins=allowed_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=_READABLE,
                max_age=PREFLIGHT_AGE_S,
            )
            self._for_pages = cast(Asgi, pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        for_pages = scope["type"] == "http" and not is_admin_path(scope["path"])
        await (self._for_pages if for_pages else self._app)(scope, receive, send)
