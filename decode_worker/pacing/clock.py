"""From when to when a step lasts. Pure but for the time it is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ridgeline.decode_worker.pacing.model import StepLoad


class StepClock:
    """Steps in flight, oldest first.

    A step that follows another without a pause lasts from the other's outputs to its own: that is the gap that a stream
    sees, it includes what the engine does between two steps, and it is also right where two steps are in flight (async
    scheduling). Only a step after a pause lasts from when it was scheduled.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[float, StepLoad, float]] = deque()
        self._last_s = 0.0
        self._pause = True
        self.took_s = 0.0
        """What the last step took that has ended."""

    def begin(self, began_s: float, load: StepLoad, predicted_s: float) -> None:
        """Note a step that computes something, scheduled from `began_s` on."""
        self._in_flight.append((began_s, load, predicted_s))

    def end(self, now_s: float) -> tuple[StepLoad, float] | None:
        """Return what the oldest step computed and how long it took; None if none is in flight."""
        if not self._in_flight:
            return None
        began_s, load, _ = self._in_flight.popleft()
        self.took_s = now_s - self._from_s(began_s)
        self._last_s = now_s
        return load, self.took_s

    def then(self, *, more_to_run: bool) -> None:
        """Say, after a step's outputs, whether the engine goes on at once."""
        self._pause = not more_to_run and not self._in_flight

    @property
    def loads(self) -> Iterator[StepLoad]:
        """Yield what the steps in flight compute."""
        return (load for _, load, _ in self._in_flight)

    def remaining_s(self, now_s: float) -> float:
        """Return how long the steps in flight are still expected to take."""
        total_s, since_s = 0.0, None
        for began_s, _, predicted_s in self._in_flight:
            since_s = self._from_s(began_s) if since_s is None else since_s
            total_s += predicted_s
        return 0.0 if since_s is None else max(0.0, total_s - (now_s - since_s))

    def _from_s(self, began_s: float) -> float:
        return max(began_s, self._last_s) if self._pause else self._last_s
