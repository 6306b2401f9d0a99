"""Who is let in, by API keys, and what each client is called.

Nothing of a request's body is read before its key is known to be good. Only hashes of keys are in this process;
`cluster.config.api_keys` reads the keys themselves.

A key is found by its hash in a set. How long that takes may tell something of the hash, but a caller can no more steer
the hash of a guess towards a known one than find the key, so there is nothing to learn from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from router.client_identity import MAX_KEY_BYTES, AddressClients, hash_key, key_client
from router.front.context import current
from router.front.errors import send_error
from router.front.middleware.admin_access import AdminAccess, AdminRefusal, is_admin_path
from router.front.middleware.types import Asgi, Receive, Scope, Send
from router.front.routes import OPEN_PATHS

_POLICY_VIOLATION: Final = 1008
_NO_KEY: Final = (
    "A valid API key is required: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`. Ask whoever runs this "
    "server for one (security.api_keys_file)."
)


@dataclass(frozen=True)
class Access:
    """Who is let in, and what they are called."""

    key_hashes: frozenset[bytes] = frozenset()
    """Of clients' keys; none: open to all."""
    admin: AdminAccess = field(default_factory=AdminAccess)
    addresses: AddressClients = field(default_factory=AddressClients)


class KeyGuard:
    """Refuses whoever shows no key for what is asked, and says who is being served."""

    def __init__(self, app: Asgi, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request as ASGI asks for it."""
        if scope["type"] not in ("http", "websocket"):  # the app's own start and end
            await self._app(scope, receive, send)
        elif is_admin_path(scope["path"]):
            await self._serve_operator(scope, receive, send)
        else:
            await self._serve_client(scope, receive, send)

    async def _serve_operator(self, scope: Scope, receive: Receive, send: Send) -> None:
        right = self._access.admin.right(scope, _shown_keys(scope))
        if isinstance(right, AdminRefusal):
            await _refuse_key(scope, send, right.status, right.sentence)
            return
        current().admin = right
        await self._app(scope, receive, send)

    async def _serve_client(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = self._access.key_hashes
        shown = (hash_key(key) for key in _shown_keys(scope)) if known else ()
        key_hash = next((each for each in shown if each in known), None)
        if known and key_hash is None and not _is_open(scope):
            await _refuse_key(scope, send, HTTPStatus.UNAUTHORIZED, _NO_KEY)
            return
        current().client = key_client(key_hash) if key_hash else self._by_address(scope)
        await self._app(scope, receive, send)

    def _by_address(self, scope: Scope) -> str:
        client = scope.get("client")
        forwarded_for = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        return self._access.addresses.name(str(client[0]) if client else None, forwarded_for)


def _is_open(scope: Scope) -> bool:
    """By exactly these names: some of the app's routes are patterns."""
    return scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in OPEN_PATHS


def _shown_keys(scope: Scope) -> tuple[bytes, ...]:
    """Two at most, the first of each header: to try more would be work that anybody could ask for."""
    bearer, plain = _first(scope, b"authorization"), _first(scope, b"x-api-key")
    scheme, _, key = bearer.strip().partition(b" ")
    shown = (key.strip() if scheme.lower() == b"bearer" else b"", plain.strip())
    return tuple(key for key in shown if 0 < len(key) <= MAX_KEY_BYTES)


def _first(scope: Scope, header: bytes) -> bytes:
    value: bytes = next((value for name, value in scope["headers"] if name == header), b"")
    return value


async def _refuse_key(scope: Scope, send: Send, status: HTTPStatus, sentence: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "a valid API key is required"})
        return
    unauthorized = status == HTTPStatus.UNAUTHORIZED
    challenge = [(b"www-authenticate", b'Bearer realm="ridgeline"')] if unauthorized else []
    await send_error(send, status, sentence, headers=challenge)
