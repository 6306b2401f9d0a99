"""The live page at /: one self-contained HTML document, and its route.

Whoever asks gets it: it has the deployment's name, its model and the version. All else it fetches as an operator from
`ridgeline/state/stream`, and draws it. Its parts are `page.html`, `page.css` and the scripts in `script/`.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

_SCRIPTS: Final = (
    *("text", "dom", "state", "verdict", "promise", "roofline", "pools", "flow", "requests", "controls", "stream"),
    "start",
)
"""They share one scope; the last one begins."""


class PageFacts(msgspec.Struct, frozen=True):
    """What a stranger may know."""

    name: str
    """Of the deployment."""
    model: str
    version: str


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _allowed(inline: str) -> str:
    """Return the source of a Content-Security-Policy that allows exactly this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


_STYLE: Final = _file("page.css")
_SCRIPT: Final = "\n".join(["(() => {", '"use strict";', *(_file(f"script/{name}.js") for name in _SCRIPTS), "})();"])
_DOCUMENT: Final = _file("page.html").replace("{{style}}", _STYLE).replace("{{script}}", _SCRIPT)
HEADERS: Final = {
    "cache-control": "no-store",
    # Nothing from elsewhere, nothing inline but what is above, and no page of others around the buttons.
    "content-security-policy": f"default-src 'none'; script-src {_allowed(_SCRIPT)}; style-src {_allowed(_STYLE)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page(facts: PageFacts) -> bytes:
    """Return the document. In a script element the facts must not end it, whatever names an operator has chosen."""
    told = msgspec.json.encode(facts).decode().replace("<", "\\u003c")
    return _DOCUMENT.replace("{{facts}}", told).encode()


def page_routes(facts: PageFacts) -> APIRouter:
    """Return the route GET /."""
    routes, document = APIRouter(), page(facts)

    @routes.get("/", include_in_schema=False)
    async def live_page() -> Response:
        return Response(document, media_type="text/html", headers=HEADERS)

    return routes
