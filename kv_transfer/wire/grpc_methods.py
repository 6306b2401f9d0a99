"""The names, limits and errors that both ends of the gRPC transport share.

Messages are raw bytes: frames for KV, msgpack for the rest. An error travels as a status whose trailing metadata holds
the reason; gRPC's own failures, which have no reason, are mapped by status code.

The synchronous API is used on purpose. `grpc.aio` has one poller per process, shared by all its event loops. Beside the
worker's own `grpc.aio` server in the same process, every event would wake both loops, and it is no faster here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, NoReturn, TypeVar

import grpc
import msgspec

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import UNREADABLE, HandoffId
from ridgeline.contracts.rpc.channel import GrpcOptions, why_refused

SERVICE: Final = "ridgeline.KvTransfer"
FETCH: Final = "Fetch"
PIN: Final = "Pin"
RENEW: Final = "Renew"
RELEASE: Final = "Release"
DESCRIBE: Final = "Describe"

CONTROL_MESSAGE_BYTES: Final = 64 << 10
MOST_READERS: Final = 1024
"""Largest number of tensor-parallel ranks of the reading engine."""
KEEPALIVE_S: Final = 10
KEEPALIVE_TIMEOUT_S: Final = 5
CONNECT_TIMEOUT_S: Final = 3

_REASON_KEY: Final = "kv-reason"
_FIRST_TOKEN_KEY: Final = "kv-first-token"
_STATUS: Final = {
    errors.LAYOUT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LEASE_EXPIRED: grpc.StatusCode.NOT_FOUND,
    errors.UNKNOWN_HANDOFF: grpc.StatusCode.NOT_FOUND,
    errors.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    errors.REVOKED: grpc.StatusCode.ABORTED,
}
_REASON: Final = {
    grpc.StatusCode.UNAVAILABLE: errors.UNREACHABLE,
    grpc.StatusCode.CANCELLED: errors.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.TIMEOUT,
    grpc.StatusCode.UNIMPLEMENTED: errors.BAD_REQUEST,
}

Answer = TypeVar("Answer")


class Release(msgspec.Struct, frozen=True, array_like=True):
    """Says that reader `reader` of `readers` is done with a hand-off.

    The numbers are bounded, because a source remembers the ids and readers of releases, even for ids it does not know.
    """

    handoff_id: HandoffId
    reader: Annotated[int, msgspec.Meta(ge=0, lt=MOST_READERS)] = 0
    readers: Annotated[int, msgspec.Meta(ge=1, le=MOST_READERS)] = 1


class PinnedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of a pin: where the next blocks lie. They stay there until the reader closes the stream.

    A segment that prefill still computes comes as a message for each layer that has become final.
    """

    incarnation: str
    block_ids: list[int]
    complete: bool
    first_token: int | None = None
    final_layers: int | None = None
    """How many layers of these blocks can be read; None: all."""


def server_options(largest_message_bytes: int) -> GrpcOptions:
    """Return server options: fail on a taken port, bound messages, and accept pings as often as peers send them."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_send_message_length", max(largest_message_bytes, CONTROL_MESSAGE_BYTES)),
        ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel_options(largest_message_bytes: int) -> GrpcOptions:
    """Return channel options: bound messages, and notice a silent or unreachable peer within seconds."""
    return [
        ("grpc.max_receive_message_length", max(largest_message_bytes, CONTROL_MESSAGE_BYTES)),
        ("grpc.max_send_message_length", CONTROL_MESSAGE_BYTES),
        ("SingleThreadedUnaryStream", 1),  # the fetch's own thread reads, which takes a sixth less CPU than gRPC's
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_S * 1000),  # this also bounds one connect attempt
    ]


def abort(context: grpc.ServicerContext, error: errors.HandoffError) -> NoReturn:
    """End the call with this error. Raises, as gRPC's own `abort` does."""
    context.set_trailing_metadata(((_REASON_KEY, error.reason),))
    context.abort(_STATUS.get(error.reason, grpc.StatusCode.INTERNAL), error.message)
    raise AssertionError("gRPC's abort returned")


def end_with_first_token(context: grpc.ServicerContext, first_token: int | None) -> None:
    """Send the token that prefill sampled to the fetching side, at the end of a stream."""
    if first_token is not None:
        context.set_trailing_metadata(((_FIRST_TOKEN_KEY, str(first_token)),))


def first_token_of(call: Any) -> int | None:
    """Return the first token after the stream has ended. Raises TransferFailed(`corrupted`) if it is not a token id."""
    for key, value in call.trailing_metadata() or ():
        if key == _FIRST_TOKEN_KEY:
            if not isinstance(value, str) or not value.isdecimal():
                raise errors.TransferFailed(errors.CORRUPTED, f"the source names {value!r} as the first token")
            return int(value)
    return None


def read_answer(decode: Callable[[bytes], Answer], message: bytes, address: str) -> Answer:
    """Decode a source's answer. Raises TransferFailed(`corrupted`) if it is unreadable."""
    try:
        return decode(message)
    except UNREADABLE as error:
        raise errors.TransferFailed(errors.CORRUPTED, f"the answer of {address} makes no sense: {error}") from error


def reason_of(failure: Any) -> str | None:
    """Return the reason that the source's handler gave; None if the call itself failed."""
    for key, value in failure.trailing_metadata() or ():
        if key == _REASON_KEY:
            return str(value)
    return None


def error_of(failure: Any, address: str) -> errors.HandoffError:
    """Return the error for a failed call; `failure` is the RpcError, which is also the call."""
    reason = reason_of(failure)
    if reason is not None:
        return errors.error_for(reason, failure.details() or "")
    code = failure.code()
    reason = _REASON.get(code, errors.INTERNAL)
    why = why_refused(failure.details())
    return errors.error_for(reason, f"{address}: {code.name if code else 'no status'}: {why}")
