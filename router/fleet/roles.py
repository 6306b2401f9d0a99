"""Which worker is for what, in each mode.

Every worker can run every leg. A mode gives each worker a pool and the limits of its engine's steps; to change the mode
is to give every worker another role, while its engine runs on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.contracts.workers import Role, WorkerDescription
from ridgeline.router.settings import RouterSettings


class ModeImpossible(Exception):
    """This deployment cannot serve in this mode; the message names the setting that prevents it."""


@dataclass(frozen=True)
class RoleTable:
    """The roles of a deployment's workers in each mode that it can serve."""

    first: Mode
    """The mode in which it starts."""
    by_mode: Mapping[Mode, Mapping[str, Role]] = field(default_factory=dict)
    """By mode and worker id. Without an entry a worker stays in the pool for which it was started."""
    why_not: Mapping[Mode, str] = field(default_factory=dict)
    """For each mode that it cannot change to, a sentence that names the setting in the way."""
    of_new: Mapping[Mode, Mapping[Pool, Role]] = field(default_factory=dict)
    """By mode, the roles of workers that came later, by the pool for which they were started."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that it can serve, the first one first."""
        return tuple(dict.fromkeys((self.first, *self.by_mode)))

    def require(self, mode: Mode) -> None:
        """Raise ModeImpossible if it cannot serve in this mode."""
        if mode not in self.modes:
            raise ModeImpossible(self.why_not.get(mode, f"this deployment has no roles for mode {mode}"))

    def newest(self, workers: Sequence[WorkerDescription]) -> Role | None:
        """Return the newest role that a router has given one of these workers, which tells a new router the mode."""
        given = [worker.role for worker in workers if worker.role is not None and worker.role.mode in self.modes]
        return max(given, key=lambda role: role.number, default=None)

    def role_of(self, worker_id: str, started_for: Pool, mode: Mode, number: int) -> Role | None:
        """Return a worker's role in a mode, as the change with this number gives it; None if there is none."""
        role = self.by_mode.get(mode, {}).get(worker_id) or self.of_new.get(mode, {}).get(started_for)
        return None if role is None else msgspec.structs.replace(role, number=number)


def role_table(settings: RouterSettings) -> RoleTable:
    """Return the table that the settings hold."""
    return RoleTable(settings.mode, settings.roles, settings.why_not, settings.roles_of_new)
