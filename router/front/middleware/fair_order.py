"""Takes requests in fair order (`router.flow.intake`), and refuses early those of clients that hold their whole share.

The share is of places and of memory for bodies. These requests are refused before they are parsed, at a fraction of
the cost of taking them in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from router.flow.admission_rules import Refused
from router.flow.held_bodies import HeldBodies
from router.flow.intake import Intake
from router.front.http.context import current
from router.front.http.errors import send_error
from router.front.http.routes import GENERATING
from router.front.http.types import Asgi, Message, Receive, Scope, Send
from router.front.middleware.body_limit import announced_bytes


class EarlyRefusal:
    """Refuses requests of clients whose share is used up. `check_share` raises Refused, given how many are coming."""

    def __init__(self, app: Asgi, intake: Intake, check_share: Callable[[str, int], None]) -> None:
        self._app = app
        self._intake = intake
        self._check_share = check_share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in GENERATING:
            client = current().client
            try:
                self._check_share(client, self._intake.of(client))
            except Refused as refused:
                await _refuse(refused, receive, send)
                return
        await self._app(scope, receive, send)


class BoundedBodies:
    """Counts the bytes of bodies until their requests are answered, and refuses bodies for which there is no room.

    `on_refused` gets the reason.
    """

    def __init__(self, app: Asgi, bodies: HeldBodies, on_refused: Callable[[str], None]) -> None:
        self._app = app
        self._bodies = bodies
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol. The app reads a whole body before it does anything else."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        more_to_come = True
        try:
            with self._bodies.holding(current().client, announced_bytes(scope)) as held:

                async def receiving() -> Message:
                    nonlocal more_to_come
                    message = await receive()
                    more_to_come = message.get("more_body", False)
                    held.has_come(len(message.get("body", b"")))
                    return message

                await self._app(scope, receiving, send)
        except Refused as refused:
            self._on_refused(refused.reason)
            await _refuse(refused, receive, send, more_to_come=more_to_come)


class FairOrder:
    """Makes requests wait for their turn, with their bodies complete."""

    def __init__(self, app: Asgi, intake: Intake) -> None:
        self._app = app
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        context = current()
        async with self._intake.turn(context.client) as turn:
            context.taken_in = turn.close

            def sending(message: Message) -> Awaitable[None]:
                turn.close()
                return send(message)

            await self._app(scope, receive, sending)


async def _refuse(refused: Refused, receive: Receive, send: Send, *, more_to_come: bool = True) -> None:
    while more_to_come:  # closing before the end of the body would reset the connection
        more_to_come = (await receive()).get("more_body", False)
    again = (b"retry-after", str(refused.retry_after_s).encode())
    await send_error(send, refused.status, str(refused), headers=[again])
