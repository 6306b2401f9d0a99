"""Frees a request whose client has left as soon as it has been cancelled.

Starlette writes an answer in a task of its own, in a task group of anyio, and cancels it when the client has left. If
that task ends with the CancelledError, anyio keeps it in a variable of a function that is in the error's own traceback.
That circle, and with it the whole request, would stay until Python looks through all objects for garbage.
"""

from __future__ import annotations

from asyncio import CancelledError
from contextlib import suppress

from starlette.responses import StreamingResponse
from starlette.types import Send

_stream_response = StreamingResponse.stream_response


async def _ends_without_an_error(self: StreamingResponse, send: Send) -> None:
    """Write the answer; when cancelled, end, which is all that its task is to do then."""
    with suppress(CancelledError):
        await _stream_response(self, send)


def install() -> None:
    """Replace the method for every answer of this process."""
    StreamingResponse.stream_response = _ends_without_an_error  # type: ignore[method-assign]
