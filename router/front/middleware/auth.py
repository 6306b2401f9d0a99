"""Checks API keys, names each client, and says which web pages may call.

Nothing of a request's body is read before its key has been checked. This process holds only hashes of keys;
`ridgeline.cluster.config.api_keys` reads the keys themselves.

A key is found by its hash in a set. The time this takes may reveal something about the hash, but a caller who could
steer the hash of a guess towards a known one could also find the key, so nothing useful can be learned.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, cast

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ridgeline.router.client_identity import MAX_KEY_BYTES, AddressClients, hash_key, key_client
from ridgeline.router.front.http.context import current
from ridgeline.router.front.http.errors import CHALLENGE, HttpRefusal, send_error
from ridgeline.router.front.http.routes import OPEN_PATHS
from ridgeline.router.front.http.types import Asgi, Receive, Scope, Send
from ridgeline.router.front.middleware.admin_access import AdminAccess, is_admin_path

PREFLIGHT_AGE_S: Final = 600
_READABLE: Final = ("retry-after", "www-authenticate", "x-request-id")
_NO_KEY: Final = (
    "A valid API key is required: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`. Ask whoever runs this "
    "server for one (security.api_keys_file)."
)


@dataclass(frozen=True)
class Access:
    """Who may call, and how clients are named."""

    key_hashes: Set[bytes] = frozenset()
    """Hashes of clients' keys; if empty, everybody may call."""
    admin: AdminAccess = field(default_factory=AdminAccess)
    addresses: AddressClients = field(default_factory=AddressClients)


class KeyGuard:
    """Refuses callers without the key that a route needs, and records which client is being served."""

    def __init__(self, app: Asgi, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        try:
            if is_admin_path(scope["path"]):
                current().admin = self._access.admin.right(scope, shown_keys(scope))
            else:
                current().client = self._client(scope)
        except HttpRefusal as refusal:
            await send_error(send, refusal)
        else:
            await self._app(scope, receive, send)

    def _client(self, scope: Scope) -> str:
        known = self._access.key_hashes
        shown = (hash_key(key) for key in shown_keys(scope)) if known else ()
        key_hash = next((each for each in shown if each in known), None)
        if known and key_hash is None and not _is_open(scope):
            raise HttpRefusal(HTTPStatus.UNAUTHORIZED, _NO_KEY, headers=CHALLENGE)
        return key_client(key_hash) if key_hash else self._by_address(scope)

    def _by_address(self, scope: Scope) -> str:
        client = scope.get("client")
        forwarded_for = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        return self._access.addresses.name(str(client[0]) if client else None, forwarded_for)


def _is_open(scope: Scope) -> bool:
    """Check for exactly these paths, because some of the app's routes are patterns."""
    return scope["method"] == "GET" and scope["path"] in OPEN_PATHS


def shown_keys(scope: Scope) -> tuple[bytes, ...]:
    """Return at most two keys, the first of each header: hashing more would be work that anyone could cause."""
    bearer, plain = _first(scope, b"authorization"), _first(scope, b"x-api-key")
    scheme, _, key = bearer.strip().partition(b" ")
    shown = (key.strip() if scheme.lower() == b"bearer" else b"", plain.strip())
    return tuple(key for key in shown if 0 < len(key) <= MAX_KEY_BYTES)


def _first(scope: Scope, header: bytes) -> bytes:
    value: bytes = next((value for name, value in scope["headers"] if name == header), b"")
    return value


def for_pages(app: Asgi, allowed_origins: Sequence[str]) -> Asgi:
    """Answer web pages of these origins; without any, browsers refuse all pages. No page may use operators' paths.

    This layer comes before the key guard, because a browser first asks without a key (preflight), and because a page
    can read a refusal only with these headers.
    """
    if not allowed_origins:
        return app
    pages = CORSMiddleware(
        cast(ASGIApp, app),  # Starlette accepts any mapping, ours are dictionaries
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_READABLE,
        max_age=PREFLIGHT_AGE_S,
    )

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if is_admin_path(scope["path"]) else cast(Asgi, pages))(scope, receive, send)

    return serve
