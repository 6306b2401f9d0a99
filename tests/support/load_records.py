"""Records of a load test's requests, so that a test names only the fields it is about."""

from __future__ import annotations

from typing import Any

from ridgeline.loadtest.run.records import RequestRecord


def a_record(index: int, ttft_s: float, tpot_s: float = 0.01, output_tokens: int = 11, **changes: Any) -> RequestRecord:
    """Return the record of a request that was sent in time and got all its tokens at an even pace, with `changes`."""
    fields = {
        "index": index,
        "scheduled_s": float(index),
        "sent_s": float(index),
        "input_tokens": 100,
        "output_tokens": output_tokens,
        "requested_output_tokens": output_tokens,
        "ttft_s": ttft_s,
        "second_token_s": ttft_s + tpot_s,
        "latency_s": ttft_s + tpot_s * (output_tokens - 1),
        "itls_s": (tpot_s,) * (output_tokens - 1),
    }
    return RequestRecord(**(fields | changes))
