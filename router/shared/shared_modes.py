"""Changes the mode through the dispatcher: what `router.dispatch.modes.Modes` is where one router serves alone."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.contracts.vocabulary import Mode
from ridgeline.router.dispatch.modes import ModeChange
from ridgeline.router.fleet.fleet import PAIR_WITHIN_S, ROLES_WITHIN_S, Fleet
from ridgeline.router.fleet.roles import ModeImpossible
from ridgeline.router.shared.link import Link, NoDispatcher
from ridgeline.router.shared.messages import ChangeMode, ModeChanged

CHANGE_WITHIN_S = PAIR_WITHIN_S + ROLES_WITHIN_S + 30.0
"""More than the dispatcher takes for a change while another one is under way."""


class SharedModes:
    """The mode of this router's deployment, as the dispatcher last told it."""

    def __init__(self, fleet: Fleet, link: Link) -> None:
        self._fleet = fleet
        self._link = link

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
        """Have all routers serve in this mode from now on. Raises ModeImpossible, and then changes nothing."""
        try:
            changed = await self._link.call("ChangeMode", ChangeMode(mode), ModeChanged, CHANGE_WITHIN_S)
        except NoDispatcher as error:
            raise ModeImpossible(str(error)) from error
        if changed.refused:
            raise ModeImpossible(changed.refused)
        return ModeChange(mode, changed.rerouted_prompts, changed.took_s)
