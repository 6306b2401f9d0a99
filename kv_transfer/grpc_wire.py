"""What both ends of the gRPC transport agree on: names, limits, and how errors travel.

Messages are raw bytes: frames for KV, msgpack for the rest. An error travels as a status whose trailing metadata holds
the reason; gRPC's own failures, which have no reason, are mapped by status code.

The synchronous API is used on purpose. `grpc.aio` has one poller per process, shared by all its event loops: beside the
worker's own `grpc.aio` data plane in the same process it would wake both for every event, and it is no faster here.
"""

from __future__ import annotations

from typing import Any, Final

import grpc

from kv_transfer import errors
from kv_transfer.frames import largest_frame_bytes
from kv_transfer.handoff import KvLayout

SERVICE: Final = "ridgeline.KvTransfer"
FETCH: Final = "Fetch"
RENEW: Final = "Renew"
RELEASE: Final = "Release"
DESCRIBE: Final = "Describe"

CONTROL_MESSAGE_BYTES: Final = 64 << 10
KEEPALIVE_S: Final = 10
KEEPALIVE_TIMEOUT_S: Final = 5
CONNECT_TIMEOUT_S: Final = 3

_REASON_KEY: Final = "kv-reason"
_STATUS: Final = {
    errors.LAYOUT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LEASE_EXPIRED: grpc.StatusCode.NOT_FOUND,
    errors.UNKNOWN_HANDOFF: grpc.StatusCode.NOT_FOUND,
    errors.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
}
_REASON: Final = {
    grpc.StatusCode.UNAVAILABLE: errors.UNREACHABLE,
    grpc.StatusCode.CANCELLED: errors.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.TIMEOUT,
    grpc.StatusCode.UNIMPLEMENTED: errors.BAD_REQUEST,
}

Options = list[tuple[str, int]]


def server_options() -> Options:
    """A taken port is an error, requests are small, and peers may ping as often as they do."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel_options(layout: KvLayout) -> Options:
    """Accept one frame at a time; notice a silent or unreachable peer within seconds."""
    return [
        ("grpc.max_receive_message_length", max(largest_frame_bytes(layout), CONTROL_MESSAGE_BYTES)),
        ("grpc.max_send_message_length", CONTROL_MESSAGE_BYTES),
        ("SingleThreadedUnaryStream", 1),  # a fetch's thread reads for itself: a sixth less CPU than by gRPC's own
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_S * 1000),  # which is also what bounds one connect attempt
    ]


def abort(context: grpc.ServicerContext, error: errors.HandoffError) -> None:
    """End the call with this error; raises, as gRPC's own `abort` does."""
    context.set_trailing_metadata(((_REASON_KEY, error.reason),))
    context.abort(_STATUS.get(error.reason, grpc.StatusCode.INTERNAL), error.message)


def error_of(failure: Any, address: str) -> errors.HandoffError:
    """The error that a failed call stands for; `failure` is the RpcError, which is also the call."""
    for key, value in failure.trailing_metadata() or ():
        if key == _REASON_KEY:
            return errors.error_for(value, failure.details() or "")
    code = failure.code()
    reason = _REASON.get(code, errors.INTERNAL)
    return errors.error_for(reason, f"{address}: {code.name if code else 'no status'}: {failure.details()}")
