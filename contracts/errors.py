"""Every way a hand-off can fail, as one small tree.

    HandoffError(reason, message)
    ├── LayoutMismatch      the two engines store KV differently; nothing was sent
    ├── LeaseExpired        the source freed the blocks before they were asked for
    ├── UnknownHandoff      wrong, released or never published id
    ├── TransferCancelled   the receiving side gave up
    └── TransferFailed      unreachable, timeout, corrupted, busy, revoked, or a request the source refuses

`reason` comes from a closed set and is a metric label; `message` is a sentence for a person. Transports raise these,
`KvFetcher.fetch` turns them into a `TransferResult`, and so does nobody else. All survive pickling.
"""

from __future__ import annotations

from typing import Final

LAYOUT_MISMATCH: Final = "layout_mismatch"
LEASE_EXPIRED: Final = "lease_expired"
UNKNOWN_HANDOFF: Final = "unknown_handoff"
CANCELLED: Final = "cancelled"
UNREACHABLE: Final = "unreachable"
TIMEOUT: Final = "timeout"
CORRUPTED: Final = "corrupted"
BUSY: Final = "busy"
BAD_REQUEST: Final = "bad_request"
REVOKED: Final = "revoked"
STALE_PAIRING: Final = "stale_pairing"
INTERNAL: Final = "internal"

REASONS: Final = (
    LAYOUT_MISMATCH,
    LEASE_EXPIRED,
    UNKNOWN_HANDOFF,
    CANCELLED,
    UNREACHABLE,
    TIMEOUT,
    CORRUPTED,
    BUSY,
    BAD_REQUEST,
    REVOKED,
    STALE_PAIRING,
    INTERNAL,
)


class HandoffError(Exception):
    """A hand-off, or one step of it, did not happen."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class LayoutMismatch(HandoffError):
    """The KV blocks of the two engines mean different things; the message names the differing fields."""


class LeaseExpired(HandoffError):
    """The source has already freed the blocks because nobody renewed the lease."""


class UnknownHandoff(HandoffError):
    """The source never published this id, or it was released."""


class TransferCancelled(HandoffError):
    """The receiving side stopped the transfer."""


class TransferFailed(HandoffError):
    """The bytes did not arrive whole and in time."""


_CLASS_BY_REASON: Final[dict[str, type[HandoffError]]] = {
    LAYOUT_MISMATCH: LayoutMismatch,
    LEASE_EXPIRED: LeaseExpired,
    UNKNOWN_HANDOFF: UnknownHandoff,
    CANCELLED: TransferCancelled,
}


def error_for(reason: str, message: str) -> HandoffError:
    """Rebuild the error that the other side named; a reason this version does not know becomes `internal`."""
    if reason not in REASONS:
        return TransferFailed(INTERNAL, f"{reason}: {message}")
    return _CLASS_BY_REASON.get(reason, TransferFailed)(reason, message)


class EngineError(Exception):
    """Base class of the errors with which an engine or its worker answers a task."""


class InvalidTask(EngineError):
    """The request asks for something that this engine refuses; the client's fault, not retried."""


class EngineFailed(EngineError):
    """The engine process is gone or cannot go on; the request may be tried on another worker."""


class AdapterRefused(EngineError):
    """A LoRA adapter cannot be served; the message names the fix."""


class WorkerLost(EngineError):
    """The connection to a worker broke, or it did not answer in time."""


def first_line(error: Exception) -> str:
    """Return what an error says, without what libraries append for their developers."""
    return str(error).partition("\n")[0]


class HandoffLost(EngineError):
    """A decode leg whose transfer overlapped the prefill cannot go on.

    It has emitted nothing, and the prefill may well succeed.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the transfer that overlapped the prefill failed: {reason}")
        self.reason = reason


class WorkerDraining(EngineError):
    """The worker leaves and has cut the request off; it can go on elsewhere, after the tokens that came."""


class TaskRejected(EngineError):
    """The worker does not take new work (draining)."""
