"""Summarises request records under vLLM bench's names, each with its formula."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.records import RequestRecord

SCHEMA = "urn:ridgeline:summary:4"
"""The `$id` of docs/reference/summary.schema.json. A field removed or of another meaning makes it :4."""
PERCENTILES = (50, 90, 99)
FORMULAS = {
    "window": "seconds in which requests arrived, to the last arrival and one mean gap more, added over rounds",
    "request_throughput": "completed / window",
    "request_goodput": "requests that met every SLO / window",
    "attainment": "requests that met every SLO / all requests; a failed request, or one with a wrong number of tokens, "
    "is a miss",
    "output_throughput": "output tokens of completed requests / window",
    "total_token_throughput": "input and output tokens of completed requests / window",
    "ttft": "first streamed chunk - scheduled time of the request",
    "ttst": "second streamed chunk - first streamed chunk",
    "tpot": "(e2el - TTFT) / (output tokens - 1), a request; one of a single token has none, and meets any SLO",
    "itl": "gap between two streamed chunks, of all requests pooled",
    "gap": "largest gap between two streamed chunks of a request; one of a single chunk has none, and meets any SLO",
    "e2el": "last streamed chunk - scheduled time of the request",
    "send_lag": "sending - scheduled time; part of TTFT and of e2el",
    "ci": "Wilson's 95 % interval of a share, of requests taken as independent",
}


def least_count(rank: int) -> int:
    """Return how many values it takes until the 95 % interval of a percentile has an upper end among them.

    For the 99th that is 368, as GuideLLM has it: the largest of n values is below it with probability 0.99**n.
    """
    return math.ceil(math.log(0.025) / math.log(rank / 100)) if rank > 50 else 1


def summarise(records: Sequence[RequestRecord], window_s: float, slo: Slo) -> dict[str, Any]:
    """Compute every figure of one or several replays. Figures without data are None, never 0.

    Rates are over the seconds in which requests arrived: a single slow answer would lengthen any other time.
    """
    done = [record for record in records if record.ok]
    good = [record.meets(*slo.in_seconds()) for record in records]
    input_tokens = sum(record.input_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    figures: dict[str, Any] = {
        "window": window_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / window_s,
        "request_goodput": sum(good) / window_s,
        "attainment": sum(good) / len(records) if records else None,
        "output_throughput": output_tokens / window_s,
        "total_token_throughput": (input_tokens + output_tokens) / window_s,
        "p99_send_lag_ms": float(np.percentile([record.send_lag_s for record in records], 99)) * 1e3,
        "max_send_lag_ms": max(record.send_lag_s for record in records) * 1e3,
    }
    series = latency_series(done)
    for name, values_s in series.items():
        figures |= _spread(name, values_s)
    figures["max_itl_ms"] = max(series["itl"]) * 1e3 if series["itl"] else None
    figures["ci95"] = {"attainment": _wilson_interval(sum(good), len(records))}
    return figures


def latency_series(done: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return the latencies of finished requests in seconds, by vLLM bench's short names."""
    return {
        "ttft": [ttft_s for record in done if (ttft_s := record.ttft_scheduled_s) is not None],
        "ttst": [ttst_s for record in done if (ttst_s := record.ttst_s) is not None],
        "tpot": [tpot_s for record in done if (tpot_s := record.tpot_s) is not None],
        "itl": [itl_s for record in done for itl_s in record.itls_s],
        "gap": [gap_s for record in done if (gap_s := record.largest_gap_s) is not None],
        "e2el": [e2el_s for record in done if (e2el_s := record.e2el_s) is not None],
    }


def _wilson_interval(met: int, total: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share at 95 % (Journal of the American Statistical Association 22, 1927)."""
    z = NormalDist().inv_cdf(0.975)
    centre = (met + z * z / 2) / (total + z * z)
    half = z / (total + z * z) * math.sqrt(met * (total - met) / total + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def _spread(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    values_ms = np.asarray(values_s, dtype=np.float64) * 1e3
    some = len(values_s) > 0
    spread: dict[str, float | None] = {
        f"mean_{name}_ms": float(np.mean(values_ms)) if some else None,
        f"median_{name}_ms": float(np.median(values_ms)) if some else None,
        f"std_{name}_ms": float(np.std(values_ms)) if some else None,
    }
    return spread | {f"p{rank}_{name}_ms": _percentile_ms(values_s, rank) for rank in PERCENTILES}


def _percentile_ms(values_s: Sequence[float], rank: int) -> float | None:
    """Return a percentile, or None if there are too few values to say anything of it."""
    return float(np.percentile(values_s, rank)) * 1e3 if len(values_s) >= least_count(rank) else None
