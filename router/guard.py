"""What stands before vLLM's app: keys, the longest body, and the name of the client. Plain ASGI, no framework.

Called by `router.app`, outermost, so that nothing of a request is read before its key is known to be good. Only hashes
of keys are in this process. `cluster.api_keys` reads the keys themselves.

A key is found by its hash in a set. How long that takes may tell something of the hash, but a caller can no more steer
the hash of a guess towards a known one than find the key, so there is nothing to learn from it.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from starlette.requests import ClientDisconnect

from router.admin_access import ADMIN, AdminAccess, AdminRefusal, is_admin_path
from router.asgi import Asgi, Message, Receive, Scope, Send
from router.client_identity import CLIENT, MAX_KEY_BYTES, AddressClients, hash_key, key_client
from router.routes import OPEN_PATHS

LINGER_BYTES: Final = 64 << 20
BODY_PART_WITHIN_S: Final = 30.0
"""A client that sends its body slower, part by part, is not waited for."""
LINGER_S: Final = 2.0
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


def guarded(app: Asgi, access: Access, max_request_bytes: int) -> Asgi:
    """The app behind keys and a limit on bodies; `CLIENT` and `ADMIN` are set for whatever it does."""
    return KeyGuard(BodyLimit(app, max_request_bytes), access)


class KeyGuard:
    """Refuses whoever shows no key for what is asked, and says who is being served."""

    def __init__(self, app: Asgi, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
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
        token = ADMIN.set(right)
        try:
            await self._app(scope, receive, send)
        finally:
            ADMIN.reset(token)

    async def _serve_client(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = self._access.key_hashes
        shown = (hash_key(key) for key in _shown_keys(scope)) if known else ()
        key_hash = next((each for each in shown if each in known), None)
        if known and key_hash is None and not _is_open(scope):
            await _refuse_key(scope, send, HTTPStatus.UNAUTHORIZED, _NO_KEY)
            return
        token = CLIENT.set(key_client(key_hash) if key_hash else self._by_address(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            CLIENT.reset(token)

    def _by_address(self, scope: Scope) -> str:
        client = scope.get("client")
        forwarded_for = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        return self._access.addresses.name(str(client[0]) if client else None, forwarded_for)


class BodyLimit:
    """Refuses with 413 a body that is too long, by what it announces or as soon as it is; keeps nothing of it."""

    def __init__(self, app: Asgi, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _CountedBody(self._max_bytes, receive, send)
        if _announced_bytes(scope) > self._max_bytes:
            await body.refuse_length()
            return
        try:
            await self._app(scope, body.receive, body.send)
        except ClientDisconnect:
            if not body.refused:
                raise


class _CountedBody:
    """One request's messages. After the refusal its app reads a client that left, and what it sends goes nowhere."""

    def __init__(self, max_bytes: int, receive: Receive, send: Send) -> None:
        self._left_bytes = max_bytes
        self._max_bytes = max_bytes
        self._receive = receive
        self._send = send
        self._answering = False
        self._whole = False
        self.refused = False

    async def receive(self) -> Message:
        """The next part of the body."""
        if self.refused:
            return {"type": "http.disconnect"}
        try:
            async with asyncio.timeout(None if self._whole else BODY_PART_WITHIN_S):
                message = await self._receive()
        except TimeoutError:
            await self._refuse(408, f"No part of the request body came for {BODY_PART_WITHIN_S:g} s: send it at once.")
            return {"type": "http.disconnect"}
        more = message.get("more_body", False)
        self._whole = not more
        self._left_bytes -= len(message.get("body", b""))
        if self._left_bytes >= 0:
            return message
        await self.refuse_length(more_to_come=more)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """The app's answer."""
        if not self.refused:
            self._answering = True
            await self._send(message)

    async def refuse_length(self, *, more_to_come: bool = True) -> None:
        """413."""
        sentence = (
            f"The request body is longer than {self._max_bytes} bytes: send less, or have server.max_request_bytes "
            "raised."
        )
        await self._refuse(413, sentence, more_to_come=more_to_come)

    async def _refuse(self, status: int, sentence: str, *, more_to_come: bool = False) -> None:
        """And the end of the connection, since the rest of the body will not be read."""
        self.refused = True
        if self._answering:
            return
        close = [(b"connection", b"close")]
        await _answer(self._send, status, "invalid_request_error", sentence, close, more_body=True)
        if more_to_come:
            await self._linger()
        await self._send({"type": "http.response.body", "body": b""})

    async def _linger(self) -> None:
        """Throw away some of what still comes: closing at once would reset the connection of a client that sends its
        whole body before it reads, and it would never see the answer."""
        left_bytes = LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while left_bytes > 0:
                    message = await self._receive()
                    left_bytes -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


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


def _announced_bytes(scope: Scope) -> int:
    """Zero for a body whose length is not told, which is then counted, and for nonsense, which the parser refuses."""
    announced = [value for name, value in scope["headers"] if name == b"content-length"]
    return max((int(value) for value in announced if value.isdigit()), default=0)


async def _refuse_key(scope: Scope, send: Send, status: HTTPStatus, sentence: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "a valid API key is required"})
        return
    unauthorized = status == HTTPStatus.UNAUTHORIZED
    challenge = [(b"www-authenticate", b'Bearer realm="ridgeline"')] if unauthorized else []
    kind = "authentication_error" if unauthorized else "permission_error"
    await _answer(send, status, kind, sentence, challenge)


async def _answer(
    send: Send, status: int, kind: str, sentence: str, headers: list[tuple[bytes, bytes]], *, more_body: bool = False
) -> None:
    """An error as OpenAI's API and vLLM write it."""
    body = json.dumps({"error": {"message": sentence, "type": kind, "param": None, "code": status}}).encode()
    all_headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
