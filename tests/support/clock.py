"""A clock for tests of what depends on time."""

from __future__ import annotations


class FakeClock:
    """A clock that moves only when a test moves it."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
