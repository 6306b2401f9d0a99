"""The errors a load test raises, each a full sentence for the person at the terminal. Caught by the command line."""


class LoadTestError(Exception):
    """Anything that stops a load test; its text names the fix where there is one."""


class TraceError(LoadTestError):
    """A trace cannot be read: the text names the file and the line."""


class ServerError(LoadTestError):
    """The server cannot be used for a run: unreachable, no model, failed warm-up, restarted meanwhile."""


class NotDisaggregatedError(LoadTestError):
    """A run in mode `disaggregated` sent too few of its requests through both pools to be called that."""
