"""Former names of settings, options and commands: read for one version, with a warning that says the present name."""

from __future__ import annotations

import warnings


class FormerName(FutureWarning):
    """Something was given by a name that the next version will not know."""


def warn_of_former_name(former: str, present: str) -> None:
    """Warn, once for each name."""
    warnings.warn(f"{former} is now {present}; the next version knows only that", FormerName, stacklevel=2)
