"""One server stream, read on a thread; shared by all pullers that ask a source over gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
import msgspec

from ridgeline.contracts import errors
from ridgeline.kv_transfer.interfaces import Pull
from ridgeline.kv_transfer.wire import grpc_methods

BUSY_RETRY_S: Final = 0.05

_encode: Final = msgspec.msgpack.Encoder().encode

Consume = Callable[[Any], None]
"""Iterates over the call's messages; raises a HandoffError if they are wrong."""


class SourceStream:
    """One streamed answer of a source. `run` runs on its own thread; `cancel` may be called from any other."""

    def __init__(self, channel: grpc.Channel, method: str, pull: Pull) -> None:
        self._channel = channel  # an unreferenced channel closes and ends its calls
        self._method = channel.unary_stream(f"/{grpc_methods.SERVICE}/{method}")
        self._message = _encode(pull.request)
        self._address = pull.address
        self._give_up_at_s = pull.give_up_at_s
        self._progress = pull.progress
        self._lock = threading.Lock()
        self._call: Any = None
        self.cancelled = threading.Event()

    def run(self, consume: Consume) -> None:
        """Read one whole answer. Retries while the source is busy; raises a HandoffError.

        If time runs out during a retry, the source is still reported as busy.
        """
        refusal: errors.TransferFailed | None = None
        while True:
            try:
                return self._read(consume)
            except errors.TransferFailed as error:
                if refusal is not None and error.reason == errors.TIMEOUT and not self._progress.anything_arrived:
                    raise refusal from error
                if error.reason != errors.BUSY or time.monotonic() + BUSY_RETRY_S > self._give_up_at_s:
                    raise
                refusal = error
            self.cancelled.wait(BUSY_RETRY_S)

    def cancel(self) -> None:
        """Make `run` raise soon. May be called from any thread."""
        self.cancelled.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def raise_if_cancelled(self) -> None:
        """Raise TransferCancelled if cancelled; called between messages."""
        if self.cancelled.is_set():
            raise errors.TransferCancelled(errors.CANCELLED, "cancelled by the fetching side")

    def _read(self, consume: Consume) -> None:
        call = self._begin()
        try:
            consume(call)
        except grpc.RpcError as failure:
            self.raise_if_cancelled()
            raise grpc_methods.error_of(failure, self._address) from failure
        finally:
            call.cancel()
            read_last_events(call)

    def _begin(self) -> Any:
        left_s = self._give_up_at_s - time.monotonic()
        if left_s <= 0:
            raise errors.TransferFailed(errors.TIMEOUT, f"no thread was free to fetch from {self._address} in time")
        with self._lock:
            self.raise_if_cancelled()
            self._call = self._method(self._message, timeout=left_s)
            return self._call


def read_last_events(call: Any) -> None:
    """Read the last events of a call that has ended or was cancelled; they come at once.

    A call that is read on its caller's own thread keeps 17 KB in its channel until its last events have been read, and
    gRPC has no public way to read them after a cancel (1.85: `grpc._channel._SingleThreadedRendezvous`).
    """
    while call._state.due:
        call._consume_next_event()
