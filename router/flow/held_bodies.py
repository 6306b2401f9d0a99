"""How much of requests' bodies is kept in memory at a time, for all clients together and for one of them.

The limit on one body says nothing of how many come at a time: a client could send hundreds to their last byte and keep
that one, or have hundreds of long ones answered, and the router's memory would be full. So bodies are counted, by the
length that is announced before they come, until their requests have been answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final

from router.flow.admission import Refused
from router.flow.fair_queue import may_have_more

MOST_BODIES: Final = 64
"""Of the longest that is allowed; ordinary ones are far more before they are as much."""
PART: Final = 3 / 4
"""Of what the others leave, for one client."""


class HeldBody:
    """One request's body: its length as it was announced, or what has come of it, if that is more."""

    def __init__(self, bodies: HeldBodies, client: str, announced_bytes: int) -> None:
        self._bodies = bodies
        self._client = client
        self._come_bytes = 0
        self.held_bytes = announced_bytes

    def has_come(self, number_of_bytes: int) -> None:
        """Count a part of it. Raises Refused if the body is longer than announced, and its client has no more room."""
        self._come_bytes += number_of_bytes
        if (more_bytes := self._come_bytes - self.held_bytes) > 0:
            self._bodies.require_room(self._client)
            self.held_bytes += more_bytes
            self._bodies.count(self._client, more_bytes)


class HeldBodies:
    """The bodies of all requests that are being received or answered; a router has one."""

    def __init__(self, max_request_bytes: int) -> None:
        self._max_bytes = MOST_BODIES * max_request_bytes
        self._held = Counter[str]()

    @property
    def held_bytes(self) -> int:
        """What is kept for all clients together."""
        return self._held.total()

    @contextmanager
    def holding(self, client: str, announced_bytes: int) -> Iterator[HeldBody]:
        """Count one body while the block runs. Raises Refused before it begins if there is no room for it."""
        if announced_bytes:
            self.require_room(client)
        held = HeldBody(self, client, announced_bytes)
        self.count(client, held.held_bytes)
        try:
            yield held
        finally:
            self.count(client, -held.held_bytes)

    def require_room(self, client: str) -> None:
        """Raise Refused (429) if this client holds its share."""
        held_bytes = self._held[client]
        if not may_have_more(held_bytes, self._held.total() - held_bytes, self._max_bytes, PART):
            raise Refused(
                HTTPStatus.TOO_MANY_REQUESTS,
                "client_share",
                f"the bodies of your requests take your share of the {self._max_bytes} bytes that are kept at a time "
                f"({MOST_BODIES} times server.max_request_bytes, for all clients): send fewer at a time",
            )

    def count(self, client: str, number_of_bytes: int) -> None:
        """Add to, or take from, what is kept for a client."""
        self._held[client] += number_of_bytes
        if not self._held[client]:
            del self._held[client]
