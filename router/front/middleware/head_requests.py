"""Answers HEAD wherever GET is answered: load balancers, uptime checks and `curl -I` ask so whether a server is well.

vLLM's routes know GET only. uvicorn sends no body to a HEAD request, whatever the app sends.
"""

from __future__ import annotations

from router.front.http.types import Asgi, Receive, Scope, Send


class HeadAsGet:
    """Shows the layers below a GET, so that both have the same rights and the same headers."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
