"""Policies by name: those that come with Ridgeline, and those that installed packages add by entry points."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Final

from ridgeline.router.scheduler.policies import Colocated, Disaggregated, Policy, Slack, Threshold

GROUP: Final = "ridgeline.policies"
"""The group of entry points. Each names a class, or a function that returns a `Policy`."""
ADAPTIVE: Final = "adaptive"
"""Not a policy, but the choice among policies by simulation (`ridgeline.router.scheduler.adaptive`)."""
BUILT_IN: Final[Mapping[str, Callable[..., Policy]]] = {
    "colocated": Colocated,
    "colocated, paced": partial(Colocated, paced=True),
    "disaggregated": Disaggregated,
    "threshold": Threshold,
    "slack": Slack,
}
_DIVISION = re.compile(r"([1-9]\d*) of ([1-9]\d*) for prefill(, slack)?")


def division_name(prefill_workers: int, workers: int, *, slack: bool = False) -> str:
    """Return the name of the policy by which so many workers compute prompts, with exceptions (`Slack`) or without."""
    return f"{prefill_workers} of {workers} for prefill" + ", slack" * slack


def policy_names() -> list[str]:
    """Return the names of all policies that are installed here."""
    return sorted({*BUILT_IN, *entry_points(group=GROUP).names})


def make_policy(name: str, options: Mapping[str, object]) -> Policy:
    """Return a policy made with these options. Raises ValueError for one that is not there, or cannot be made."""
    maker = BUILT_IN.get(name) or _division(name) or _installed(name)
    try:
        made = maker(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"policy {name!r} cannot be made with the options {dict(options)}: {error}") from error
    if not callable(getattr(made, "assign", None)) or not isinstance(getattr(made, "paced", None), bool):
        raise ValueError(
            f"policy {name!r} has no `assign` or no `paced`: see ridgeline.router.scheduler.policies.Policy"
        )
    return made


def _division(name: str) -> Callable[..., Policy] | None:
    found = _DIVISION.fullmatch(name)
    if found is None:
        return None
    return partial(Slack if found[3] else Disaggregated, int(found[1]) / int(found[2]))


def _installed(name: str) -> Callable[..., Policy]:
    for found in entry_points(group=GROUP, name=name):
        try:
            loaded: Callable[..., Policy] = found.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"policy {name!r} ({found.value}) cannot be imported: {error}") from error
        return loaded
    raise ValueError(f"there is no policy {name!r} here: choose {ADAPTIVE} or one of {', '.join(policy_names())}")
