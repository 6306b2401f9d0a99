"""Changes the mode while requests are served: no request is lost, and none starts anew.

What runs on a worker ends there as it began; prompts that wait go the new way, in their order, and so does everything
that comes later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ridgeline.contracts.vocabulary import Mode
from ridgeline.router.fleet.fleet import Fleet

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModeChange:
    """What a change of mode did."""

    mode: Mode
    rerouted_prompts: int
    """Prompts that waited for a worker and go another way now."""
    took_s: float


class AnyModes(Protocol):
    """The mode, and the way to change it: `Modes`, or that of the dispatcher (`router.shared.shared_modes`)."""

    @property
    def mode(self) -> Mode: ...
    @property
    def possible(self) -> tuple[Mode, ...]: ...
    @property
    def why_not(self) -> Mapping[Mode, str]: ...
    async def change(self, mode: Mode) -> ModeChange: ...


class Modes:
    """The mode of this router's deployment, and the one way to change it."""

    def __init__(self, fleet: Fleet, on_change: Callable[[], int]) -> None:
        """`on_change` sends waiting prompts the new way, and returns how many."""
        self._fleet = fleet
        self._on_change = on_change
        self._one_at_a_time = asyncio.Lock()

    @property
    def mode(self) -> Mode:
        """The mode in which new requests are served."""
        return self._fleet.mode

    @property
    def possible(self) -> tuple[Mode, ...]:
        """The modes that this deployment can serve."""
        return self._fleet.roles.modes

    @property
    def why_not(self) -> Mapping[Mode, str]:
        """For each other mode, the setting that prevents it."""
        return self._fleet.roles.why_not

    async def change(self, mode: Mode) -> ModeChange:
        """Serve in this mode from now on. Raises ModeImpossible or PairingRefused, and then changes nothing."""
        began_s, rerouted = time.monotonic(), 0

        def send_on() -> None:
            nonlocal rerouted
            rerouted = self._on_change()

        async with self._one_at_a_time:
            if mode != self._fleet.mode:
                logger.warning("the mode changes from %s to %s", self._fleet.mode, mode)
                await self._fleet.change_mode(mode, send_on)
        return ModeChange(mode, rerouted, time.monotonic() - began_s)
