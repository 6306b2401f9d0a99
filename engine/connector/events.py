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

from ridgeline.contracts.handoff import KvHandoff
from ridgeline.contracts.tasks import TokenDelta


class TransferEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A message about one hand-off: it can be fetched from now on, or fetching it failed for this reason."""

    handoff_id: str
    handoff: KvHandoff | None = None
    failed: str = ""


class TransferEvents:
    """Delivers messages to the handlers that wait for them, by hand-off id."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[TransferEvent]] = {}

    @contextmanager
    def expect(self, handoff_id: str) -> Iterator[asyncio.Future[TransferEvent]]:
        """Provide a future for the first event about this hand-off."""
        future: asyncio.Future[TransferEvent] = asyncio.get_running_loop().create_future()
        self._waiting[handoff_id] = future
        try:
            yield future
        finally:
            del self._waiting[handoff_id]
            future.cancel()

    def deliver(self, events: Iterable[object]) -> None:
        """Deliver events as they come out of the statistics, as plain data."""
        for plain in events:
            event = msgspec.convert(plain, TransferEvent)
            future = self._waiting.get(event.handoff_id)
            if future is not None and not future.done():
                future.set_result(event)


async def with_event(
    deltas: AsyncGenerator[TokenDelta, None], event: asyncio.Future[TransferEvent]
) -> AsyncGenerator[TokenDelta | TransferEvent, None]:
    """Yield the deltas, and the event before the first one if it comes until then; end with the deltas.

    Later there is nothing to be told: prefill makes one token, and decode's first one shows that it has the KV. So only
    the first delta costs a task.
    """
    first = asyncio.ensure_future(anext(deltas))
    try:
        await asyncio.wait((first, event), return_when=asyncio.FIRST_COMPLETED)
        if event.done() and not event.cancelled():
            yield event.result()
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
