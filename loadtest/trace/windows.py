"""The requests of each pair of rounds: another window of the trace, or another seed.

One realisation of the arrivals, sent again and again, would say how a server takes those arrivals and no others.
"""

from dataclasses import replace

from ridgeline.loadtest.plan import ComparePlan, ReplayPlan
from ridgeline.loadtest.trace.generated import is_generated, seed_of
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.loadtest.trace.shape import fit_context, shape_trace
from ridgeline.loadtest.trace.trace import Trace, in_order

MOST_TIMES_LONGER = 4
"""A round at a higher rate has at most so many times the requests of one at the first rate."""


class PairTraces:
    """The trace of each pair; all have the same number of requests. Raises TraceError as reading the trace does."""

    def __init__(self, plan: ComparePlan, max_model_tokens: int | None = None, least_prompt_tokens: int = 1) -> None:
        self._plan = plan
        self.max_model_tokens, self.least_prompt_tokens = max_model_tokens, least_prompt_tokens
        whole = self._shaped(0)
        self.requests = len(whole.rows) if self._is_generated else _requests_of_a_round(whole, plan)
        self.windows = len(whole.rows) // self.requests
        self.prefix_ids = max((max(row.prefix_ids, default=0) for row in whole.rows), default=0)
        self.longest_output_tokens = max(row.output_tokens for row in whole.rows)
        self.most_requests = len(load_trace(plan.trace, plan.tokenizer).rows)
        self._usable_requests = len(whole.rows)

    @property
    def most_at_a_rate(self) -> int:
        """The most requests of a round whose number follows from its rate."""
        return MOST_TIMES_LONGER * self.requests if self._is_generated else self._usable_requests

    def at_rate(self, pair: int, rate: float, requests: int) -> Trace:
        """Return so many requests for a pair, with their own mean rate made the one asked for, in requests/s.

        Without that, the bursts of a recorded trace would make rounds at one rate differ by more than variants do.
        """
        trace = self._window(pair, pair % self.windows, requests)
        return shape_trace(trace, ReplayPlan.model_validate({"rate": rate})) if trace.mean_rate else trace

    def _window(self, pair: int, window: int, requests: int) -> Trace:
        if self._is_generated:
            made = requests
            while len((shaped := self._shaped(pair, made)).rows) < requests:
                made *= 2  # contexts that grow beyond the model's limit end sessions early
            return replace(shaped, rows=in_order(shaped.rows, range(requests)))
        shaped = self._shaped(pair)
        first = min(window * self.requests, len(shaped.rows) - requests)
        rows = in_order(shaped.rows, range(first, first + requests))
        start_s = rows[0].arrival_s
        moved = tuple(replace(row, arrival_s=row.arrival_s - start_s) for row in rows)
        return replace(shaped, rows=moved)

    @property
    def note(self) -> str:
        """Where the requests of a pair come from, in words."""
        if self._is_generated:
            return f"each pair replays {self.requests} requests that are generated with another seed"
        if self.windows == 1:
            return f"each pair replays the same {self.requests} requests of the trace"
        return f"pairs replay {self.windows} windows of the trace in turn, of {self.requests} requests each"

    @property
    def _is_generated(self) -> bool:
        return is_generated(self._plan.trace)

    def _shaped(self, pair: int, requests: int | None = None) -> Trace:
        plan = self._plan.model_copy(update={"seed": self._plan.seed + pair})
        if self._is_generated:
            number = "" if requests is None else f",n={requests}"
            plan = plan if requests is None else plan.model_copy(update={"limit": None})
            read = load_trace(f"{plan.trace}{number},seed={seed_of(plan.trace) + pair}")
        else:
            read = load_trace(plan.trace, plan.tokenizer)
            plan = plan.model_copy(update={"limit": None})
        shaped = shape_trace(replace(read, name=self._plan.trace), plan)
        return fit_context(shaped, self.max_model_tokens, self.least_prompt_tokens)


def _requests_of_a_round(whole: Trace, plan: ComparePlan) -> int:
    """Return the requests in a window: no more than are asked for, nor than come in its seconds at the mean rate."""
    seconds = plan.round_s if plan.limit is None else None
    in_time = round(whole.mean_rate * seconds) + 1 if whole.mean_rate and seconds else None
    return min(len(whole.rows), *(most for most in (plan.limit, in_time) if most))
