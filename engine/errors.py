"""What can go wrong with an engine, for its callers in the worker and in the router."""

from __future__ import annotations


class EngineError(Exception):
    """Base of this package's errors."""


class InvalidTask(EngineError):
    """The request asks for something this engine refuses; the client's fault, not retried."""


class EngineFailed(EngineError):
    """The engine process is gone or cannot go on; the request may be tried on another worker."""


class WorkerLost(EngineError):
    """The connection to a worker broke, or it did not answer in time."""


class HandoffLost(EngineError):
    """A decode leg that followed a prefill cannot go on; nothing was emitted, and the prefill may well succeed."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"following the hand-off failed: {reason}")
        self.reason = reason


class WorkerDraining(EngineError):
    """The worker leaves and has cut the request off; it can go on elsewhere, after the tokens that came."""


class TaskRejected(EngineError):
    """The worker does not take new work (draining)."""
