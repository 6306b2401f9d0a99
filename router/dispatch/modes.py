"""Changes the mode while requests are served: no request is lost, and none starts anew.

What runs on a worker ends there as it began; prompts that wait go the new way, in their order, and so does everything
that comes later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


class Modes(ABC):
    """The mode of this router's deployment."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

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

    @abstractmethod
    async def change(self, mode: Mode) -> ModeChange:
        """Serve in this mode from now on. Raises ModeImpossible or PairingRefused, and then changes nothing."""


class OwnModes(Modes):
    """Those of a router that serves alone, and of the dispatcher."""

    def __init__(self, fleet: Fleet, on_change: Callable[[], int]) -> None:
        """`on_change` sends waiting prompts the new way, and returns how many."""
        super().__init__(fleet)
        self._on_change = on_change
        self._one_at_a_time = asyncio.Lock()

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
