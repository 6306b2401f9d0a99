"""Messages from the connector to the handler of a running request, beside the token stream.

The connector runs in the engine's process, so its messages travel with the statistics that vLLM sends after each step,
or go out before one. They tell a prefill handler that its hand-off can be fetched (overlap), and a decode handler that
such a fetch failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from contracts.handoff import KvHandoff
from contracts.tasks import TokenDelta


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A message about one hand-off: it can be fetched from now on, or fetching it failed for this reason."""

    handoff_id: str
    handoff: KvHandoff | None = None
    failed: str = ""


class NoticeBoard:
    """Delivers messages to the handlers that wait for them, by hand-off id."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Notice]] = {}

    @contextmanager
    def expect(self, handoff_id: str) -> Iterator[asyncio.Future[Notice]]:
        """Provide a future for the first notice about this hand-off."""
        future: asyncio.Future[Notice] = asyncio.get_running_loop().create_future()
        self._waiting[handoff_id] = future
        try:
            yield future
        finally:
            del self._waiting[handoff_id]
            future.cancel()

    def deliver(self, notices: Iterable[object]) -> None:
        """Deliver notices as they come out of the statistics, as plain data."""
        for plain in notices:
            notice = msgspec.convert(plain, Notice)
            future = self._waiting.get(notice.handoff_id)
            if future is not None and not future.done():
                future.set_result(notice)


async def with_notice(
    deltas: AsyncGenerator[TokenDelta, None], notice: asyncio.Future[Notice]
) -> AsyncGenerator[TokenDelta | Notice, None]:
    """Yield the deltas, and the notice before the first one if it comes until then; end with the deltas.

    Later there is nothing to be told: prefill makes one token, and decode's first one shows that it has the KV. So only
    the first delta costs a task.
    """
    first = asyncio.ensure_future(anext(deltas))
    try:
        await asyncio.wait((first, notice), return_when=asyncio.FIRST_COMPLETED)
        if notice.done() and not notice.cancelled():
            yield notice.result()
        delta = await first
    except StopAsyncIteration:
        return
    finally:
        if not first.done():
            first.cancel()
            with suppress(asyncio.CancelledError):
                await first
        elif not first.cancelled():
            first.exception()  # the caller has left; asyncio would log an exception that nobody retrieves
    yield delta
    async for delta in deltas:
        yield delta
