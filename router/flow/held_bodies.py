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
    def holding(self, client: str, announced_bytes: int) -> Iterator[Callable[[int], None]]:
        """Count one body while the block runs: its announced length, or what the block says has come if that is more.

        Raises Refused (429), here or there, if it takes more bytes and its client has no room left.
        """
        held_bytes = 0

        def hold(number_of_bytes: int) -> None:
            nonlocal held_bytes
            if number_of_bytes > held_bytes:
                self._require_room(client)
                self._held[client] += number_of_bytes - held_bytes
                held_bytes = number_of_bytes

        hold(announced_bytes)
        try:
            yield hold
        finally:
            self._held[client] -= held_bytes
            if not self._held[client]:
                del self._held[client]

    def _require_room(self, client: str) -> None:
        held_bytes = self._held[client]
        if not may_have_more(held_bytes, self._held.total() - held_bytes, self._max_bytes, PART):
            self._on_refused("client_share")
            raise Refused(
                HTTPStatus.TOO_MANY_REQUESTS,
                "client_share",
                f"the bodies of your requests take your share of the {self._max_bytes} bytes that are kept at a time "
                f"({MOST_BODIES} times server.max_request_bytes, for all clients): send fewer at a time",
            )
