"""What happens to a request in each state on each fault, one row each. Source of the table in `docs/how-to/operate.md`.

`tests/components/router/dispatch/test_failure_table.py` runs every row on real gRPC hosts and checks it; a row
that it cannot bring about fails the suite. Real engines meet some of these faults in tests of their own, in `tests/engines`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ridgeline.router.observe.timeline import RequestState

Fault = Literal[
    "prefill_lost",
    "decode_lost",
    "transfer_failed",
    "lease_expired",
    "deadline",
    "client_gone",
    "draining",
    "engine_error",
    "router_restarted",
]
Ending = Literal["whole", "error", "gone"]
"""What the client has at the end: the whole answer, one error, or it has left."""
STATES: tuple[RequestState, ...] = get_args(RequestState)
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True)
class Row:
    """The outcome of one fault in one state."""

    state: RequestState
    fault: Fault
    then: str
    """What is tried again, and where."""
    released: str
    ending: Ending
    client: str
    """What the client sees."""
    counted: str
    """A series of /metrics that grows; empty if nothing went wrong for this request."""


def _retries(state: str, cause: str) -> str:
    return f'ridgeline_retries_total{{state="{state}",cause="{cause}"}}'


_FAILED = 'ridgeline_requests_total{outcome="failed"}'
_CANCELLED = 'ridgeline_requests_total{outcome="cancelled"}'
_FALLBACK = 'ridgeline_requests_total{path="fallback",outcome="finished"}'
_NOTHING = "nothing is held yet"
_PAUSE = "a pause"
_BROKEN = "an error event; after a SIGKILL the connection breaks"
_ABORTED = "all of the lost router's tasks, when their stream breaks"

ROWS: tuple[Row, ...] = (
    Row("queued", "prefill_lost", "another prefill worker takes it, else decode computes the prompt", _NOTHING, "whole", _PAUSE, ""),
    Row("queued", "decode_lost", "before prefill another decode worker is chosen; without one, a prefill worker serves the whole request", _NOTHING, "whole", _PAUSE, ""),
    Row("queued", "deadline", "the request ends", _NOTHING, "error", "504", _FAILED),
    Row("queued", "client_gone", "the request ends", _NOTHING, "gone", "", _CANCELLED),
    Row("queued", "draining", "another worker takes it", _NOTHING, "whole", _PAUSE, ""),
    Row("queued", "engine_error", "a worker without an engine is not chosen", _NOTHING, "whole", _PAUSE, ""),
    Row("queued", "router_restarted", "the request ends", _NOTHING, "gone", _BROKEN, _CANCELLED),
    Row("prefilling", "prefill_lost", "prefill elsewhere", "its blocks end with it", "whole", _PAUSE, _retries("prefilling", "worker_lost")),
    Row("prefilling", "decode_lost", "noticed at the hand-off: prefill again from its prefix cache, decode elsewhere", "the hand-off", "whole", _PAUSE, _retries("handoff", "worker_lost")),
    Row("prefilling", "transfer_failed", "decode begins again after prefill", "what it had fetched", "whole", "nothing", 'ridgeline_overlapped_handoffs_total{result="unreachable"}'),
    Row("prefilling", "deadline", "the request ends", "prefill is aborted", "error", "504", _FAILED),
    Row("prefilling", "client_gone", "the request ends", "prefill is aborted", "gone", "", _CANCELLED),
    Row("prefilling", "draining", "runs to its end there; after the drain time, prefill elsewhere", "prefill is aborted", "whole", _PAUSE, _retries("prefilling", "draining")),
    Row("prefilling", "engine_error", "prefill elsewhere", "its blocks end with the engine", "whole", _PAUSE, _retries("prefilling", "engine_failed")),
    Row("prefilling", "router_restarted", "the request ends", _ABORTED, "gone", _BROKEN, _CANCELLED),
    Row("handoff", "prefill_lost", "decode computes the prompt", "its blocks end with it", "whole", "a later second token", _FALLBACK),
    Row("handoff", "decode_lost", "prefill again from its prefix cache, decode elsewhere", "the hand-off", "whole", _PAUSE, _retries("handoff", "worker_lost")),
    Row("handoff", "transfer_failed", "decode computes the prompt", "the hand-off, by decode", "whole", "a later second token", _FALLBACK),
    Row("handoff", "lease_expired", "decode computes the prompt", "the hand-off, by its lease", "whole", "a later second token", _FALLBACK),
    Row("handoff", "deadline", "the request ends", "decode is aborted, then the hand-off", "error", "the first token and an error event", _FAILED),
    Row("handoff", "client_gone", "the request ends", "decode is aborted, then the hand-off", "gone", "", _CANCELLED),
    Row("handoff", "draining", "runs to its end there; after the drain time, elsewhere", "decode is aborted, then the hand-off", "whole", _PAUSE, _retries("handoff", "draining")),
    Row("handoff", "engine_error", "prefill again from its prefix cache, decode elsewhere", "the hand-off", "whole", _PAUSE, _retries("handoff", "engine_failed")),
    Row("handoff", "router_restarted", "the request ends", f"{_ABORTED}; the hand-off by decode, or by its lease", "gone", _BROKEN, _CANCELLED),
    Row("decoding", "prefill_lost", "nothing: decode has the KV", "its blocks end with it", "whole", "nothing", ""),
    Row("decoding", "decode_lost", "prompt and output so far are prefilled again, decode elsewhere", "its blocks end with it", "whole", _PAUSE, _retries("decoding", "worker_lost")),
    Row("decoding", "deadline", "the request ends", "decode is aborted", "error", "the tokens so far and an error event", _FAILED),
    Row("decoding", "client_gone", "the request ends", "decode is aborted", "gone", "", _CANCELLED),
    Row("decoding", "draining", "runs to its end there; after the drain time it goes on elsewhere", "decode is aborted", "whole", _PAUSE, _retries("decoding", "draining")),
    Row("decoding", "engine_error", "prompt and output so far are prefilled again, decode elsewhere", "its blocks end with the engine", "whole", _PAUSE, _retries("decoding", "engine_failed")),
    Row("decoding", "router_restarted", "the request ends", _ABORTED, "gone", _BROKEN, _CANCELLED),
)  # fmt: skip

CANNOT_HAPPEN: dict[tuple[RequestState, Fault], str] = {
    ("queued", "transfer_failed"): "there is no KV yet",
    ("queued", "lease_expired"): "there is no KV yet",
    ("prefilling", "lease_expired"): "a partial hand-off has no time limit: its request still runs",
    ("decoding", "transfer_failed"): "decode has all of the KV",
    ("decoding", "lease_expired"): "the hand-off was released when decode had the KV",
}


def as_markdown() -> str:
    """Return the table of `docs/how-to/operate.md`: states in which a fault does the same share a row."""
    head = "| fault | state of the request | then | client sees |\n|---|---|---|---|\n"
    states: dict[tuple[Fault, str, str], list[str]] = {}
    for fault in FAULTS:
        for row in ROWS:
            if row.fault == fault:
                states.setdefault((fault, row.then, row.client or "nobody is there"), []).append(row.state)
    return head + "".join(
        f"| `{fault}` | {', '.join(among) if len(among) < len(STATES) else 'any'} | {then} | {client} |\n"
        for (fault, then, client), among in states.items()
    )
