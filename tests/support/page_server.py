"""The live page as a router serves it, behind the real guard of operators' paths, with states that a test gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ridgeline.router.client_identity import hash_key
from ridgeline.router.front.http.context import WithContext
from ridgeline.router.front.http.errors import error_body
from ridgeline.router.front.middleware.admin_access import AdminAccess
from ridgeline.router.front.middleware.auth import Access, KeyGuard
from ridgeline.router.front.page import PageFacts, page_routes
from tests.support.http_server import listening
from tests.support.patience import eventually

FACTS = PageFacts("prod-eu", "Llama-3.1-8B-Instruct", "0.9")
PREFIX = "/behind/a/proxy"
State = dict[str, Any]


@dataclass
class PageServer:
    """What it streams and answers, and what it was asked."""

    state: State | None
    """None: no stream begins, as while the router starts."""
    ready: dict[str, Any] = field(default_factory=lambda: {"ready": True})
    refusal: tuple[HTTPStatus, str] | None = None
    """The answer to any change."""
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    """(method, path, body) of changes."""
    paths: list[str] = field(default_factory=list)
    """Of all requests."""
    url: str = ""
    _watchers: set[asyncio.Queue[str | None]] = field(default_factory=set)

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def send(self, state: State) -> None:
        """Send an event to whoever watches."""
        for each in self._watchers:
            each.put_nowait(_event(state))

    def end_streams(self) -> None:
        for each in self._watchers:
            each.put_nowait(None)

    def routes(self) -> list[Route]:
        changes = ("mode", "scale", "drain", "restart", "operation")
        return [
            Route("/ready", self._ready),
            Route("/ridgeline/state/stream", self._stream),
            *(Route(f"/ridgeline/{name}", self._change, methods=["POST", "DELETE"]) for name in changes),
        ]

    async def _ready(self, request: Request) -> Response:
        return JSONResponse(self.ready, HTTPStatus.OK if self.ready["ready"] else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _stream(self, request: Request) -> Response:
        if self.state is None:
            return JSONResponse(error_body(503, "the router is starting"), HTTPStatus.SERVICE_UNAVAILABLE)
        return StreamingResponse(self._events(_event(self.state)), media_type="text/event-stream")

    async def _events(self, first: str) -> AsyncIterator[str]:
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            yield ": a comment\n\n"
            yield first
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._watchers.discard(queue)

    async def _change(self, request: Request) -> Response:
        body = await request.body()
        self.asked.append((request.method, request.url.path, json.loads(body) if body else None))
        if self.refusal is not None:
            status, sentence = self.refusal
            return JSONResponse(error_body(status, sentence), status)
        return JSONResponse({}, HTTPStatus.ACCEPTED)


def _event(state: State) -> str:
    return f"data: {json.dumps(state)}\n\n"


@asynccontextmanager
async def serving_page(state: State | None, key: str = "") -> AsyncIterator[PageServer]:
    """Serve it on this machine, below PREFIX as well; with `key`, operators need that one."""
    served = PageServer(state)
    app: Any = FastAPI(routes=served.routes())
    app.include_router(page_routes(FACTS))
    keys = frozenset({hash_key(key.encode())}) if key else frozenset()
    guarded = WithContext(KeyGuard(app, Access(admin=AdminAccess(keys))))

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        served.paths.append(scope["path"])
        await guarded({**scope, "path": scope["path"].removeprefix(PREFIX)}, receive, send)

    async with listening(counting) as served.url:
        yield served
        served.end_streams()
        await eventually(lambda: not served.watchers)
