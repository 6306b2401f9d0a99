"""The errors of a load test; each message is a full sentence that the command line prints."""

from collections.abc import Sequence

import msgspec

MALFORMED = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What decoding raises: for other types, for half characters, for brackets within brackets without end."""


class LoadTestError(Exception):
    """Anything that stops a load test; the message names the fix if there is one."""


class TraceError(LoadTestError):
    """A trace cannot be read; the message names the file and the line."""


class ServerError(LoadTestError):
    """The server cannot be used for a run: it is unreachable, has no model, failed the warm-up, or restarted."""


class RestartedError(ServerError):
    """A worker was lost or restarted during a run, so its figures are not of one server."""


class NotDisaggregatedError(LoadTestError):
    """Too few requests of a run in mode `disaggregated` went through both pools."""


class UnequalError(LoadTestError):
    """Variants that differ in what can decide a comparison."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__(
            f"these settings differ and could decide the result. {'. '.join(differences)}. Start the servers alike, or "
            "accept it with --allow-unequal, and the report shows it"
        )
