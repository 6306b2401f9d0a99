"""Limits how many bytes of request bodies are in memory at a time, for all clients together and for each of them.

The limit on one body does not limit how many come at a time: a client could send hundreds except for their last byte,
or have hundreds of long ones answered, and fill the router's memory. So bodies are counted by their announced length
from before they arrive until their requests are answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final

from ridgeline.router.flow.admission_rules import Refused
from ridgeline.router.flow.fair_queue import may_have_more

MOST_BODIES: Final = 64
"""The limit in bodies of the longest allowed length; it is far more of ordinary ones."""
PART: Final = 3 / 4
"""The fraction of what the others leave that one client may have."""


class HeldBody:
    """One request's body, counted by its announced length, or by what has arrived if that is more."""

    def __init__(self, bodies: HeldBodies, client: str, announced_bytes: int) -> None:
        self._bodies = bodies
        self._client = client
        self._come_bytes = 0
        self.held_bytes = announced_bytes

    def has_come(self, number_of_bytes: int) -> None:
        """Count an arrived part.

        Raises Refused if the body exceeds its announced length and its client has no room left.
        """
        self._come_bytes += number_of_bytes
        if (more_bytes := self._come_bytes - self.held_bytes) > 0:
            self._bodies.require_room(self._client)
            self.held_bytes += more_bytes
            self._bodies.count(self._client, more_bytes)


class HeldBodies:
    """The bodies of all requests that are being received or answered; one object per router."""

    def __init__(self, max_request_bytes: int, on_refused: Callable[[str], None]) -> None:
        """`on_refused` gets the reason of each refusal."""
        self._on_refused = on_refused
        self._max_bytes = MOST_BODIES * max_request_bytes
        self._held = Counter[str]()

    @property
    def held_bytes(self) -> int:
        """Bytes held for all clients together."""
        return self._held.total()

    @contextmanager
    def holding(self, client: str, announced_bytes: int) -> Iterator[HeldBody]:
        """Count one body while the block runs. Raises Refused at the start if there is no room for it."""
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
            self._on_refused("client_share")
            raise Refused(
                HTTPStatus.TOO_MANY_REQUESTS,
                "client_share",
                f"the bodies of your requests take your share of the {self._max_bytes} bytes that are kept at a time "
                f"({MOST_BODIES} times server.max_request_bytes, for all clients): send fewer at a time",
            )

    def count(self, client: str, number_of_bytes: int) -> None:
        """Add to the bytes held for a client; a negative number subtracts."""
        self._held[client] += number_of_bytes
        if not self._held[client]:
            del self._held[client]
