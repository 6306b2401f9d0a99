"""What the connector has to tell the handler of a running request, outside the token stream.

The connector runs in the engine's process; what it says travels with the statistics that vLLM sends after every step.
A prefill handler learns so that a hand-off can be followed, a decode handler that following failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from contracts.handoff import KvHandoff
from contracts.tasks import TokenDelta


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """About one hand-off: it can be followed from now on, or following it failed for this reason."""

    handoff_id: str
    handoff: KvHandoff | None = None
    failed: str = ""


class NoticeBoard:
    """Handlers wait here by hand-off id; the engine's statistics arrive here."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Notice]] = {}

    @contextmanager
    def expect(self, handoff_id: str) -> Iterator[asyncio.Future[Notice]]:
        """A future for the first notice about this hand-off."""
        future: asyncio.Future[Notice] = asyncio.get_running_loop().create_future()
        self._waiting[handoff_id] = future
        try:
            yield future
        finally:
            del self._waiting[handoff_id]
            future.cancel()

    def deliver(self, notices: Iterable[object]) -> None:
        """As they come out of the statistics, plain data."""
        for plain in notices:
            notice = msgspec.convert(plain, Notice)
            future = self._waiting.get(notice.handoff_id)
            if future is not None and not future.done():
                future.set_result(notice)


async def with_notice(
    deltas: AsyncGenerator[TokenDelta, None], notice: asyncio.Future[Notice]
) -> AsyncGenerator[TokenDelta | Notice, None]:
    """The deltas, and the notice in between if it comes; ends with the deltas."""
    while True:
        following = asyncio.ensure_future(anext(deltas))
        try:
            if not notice.done():
                await asyncio.wait((following, notice), return_when=asyncio.FIRST_COMPLETED)
                if notice.done() and not notice.cancelled():
                    yield notice.result()
            delta = await following
        except StopAsyncIteration:
            return
        finally:
            if not following.done():
                following.cancel()
                with suppress(asyncio.CancelledError):
                    await following
            elif not following.cancelled():
                following.exception()  # of no interest to who left; unread, asyncio would print it
        yield delta
