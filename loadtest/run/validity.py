"""Says why a round says nothing of its server: a worker was lost, the machine was disturbed, the client was late.

A late client's limits are relative to the TTFT SLO, because lateness adds to the TTFT that is judged: 2 % of the
limit for 99 of 100 requests, and 10 % for any, change few requests' fate. A fixed 5 ms would discard most rounds on a
machine of two busy cores, where lateness of 20 ms means nothing against a limit of seconds.
"""

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.machine import Disturbance
from ridgeline.loadtest.run.replay import ReplayResult

P99_LAG_SHARE, MAX_LAG_SHARE = 0.02, 0.10
MOST_STOLEN, MOST_OTHER = 0.05, 0.10
"""Shares of all cores' time; the scatter between rounds is about as large as the second."""


def discard_reasons(result: ReplayResult, others: Disturbance | None, limits: Slo) -> tuple[str, ...]:
    """Return why the round is discarded, a sentence each; empty if it is valid."""
    reasons = [result.fleet_change] if result.fleet_change else []
    p99_ms, max_ms = result.p99_send_lag_s * 1e3, result.max_send_lag_s * 1e3
    if p99_ms > P99_LAG_SHARE * limits.ttft_ms or max_ms > MAX_LAG_SHARE * limits.ttft_ms:
        reasons.append(
            f"requests left late: p99 {p99_ms:.0f} ms, the latest {max_ms:.0f} ms; the TTFT SLO allows "
            f"{P99_LAG_SHARE * limits.ttft_ms:.0f} and {MAX_LAG_SHARE * limits.ttft_ms:.0f} ms"
        )
    if others is not None and others.stolen > MOST_STOLEN:
        reasons.append(f"the host gave {others.stolen:.0%} of this machine's CPU time to other guests")
    if others is not None and others.other > MOST_OTHER:
        reasons.append(f"other work took {others.other:.0%} of this machine's CPU time")
    return tuple(reasons)
