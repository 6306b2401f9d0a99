"""Summarises request records under vLLM bench's names, each with its formula.

Called by `loadtest.compare` and `loadtest.report.replay_output`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.plan import Slo
from loadtest.report.bootstrap import mean_interval, median_interval
from loadtest.run.records import RequestRecord

PERCENTILES = (50, 90, 99)
FORMULAS = {
    "duration": "seconds from the first request's time to the last answer, added over rounds",
    "request_throughput": "completed / duration",
    "request_goodput": "requests that met both limits of the SLO / duration",
    "goodput_ratio": "requests that met both limits of the SLO / all requests; a failed request is a miss",
    "output_throughput": "output tokens of completed requests / duration",
    "total_token_throughput": "input and output tokens of completed requests / duration",
    "ttft": "first streamed chunk - sending",
    "ttst": "second streamed chunk - first streamed chunk",
    "tpot": "(latency - TTFT) / (output tokens - 1), a request; one of a single token has none, and meets any limit",
    "itl": "gap between two streamed chunks, of all requests pooled",
    "e2el": "last streamed chunk - sending (the latency of TPOT)",
    "send_lag": "sending - arrival in the trace",
    "ci": "95 % bootstrap interval over requests, 2000 seeded resamples",
}


def summarise(records: Sequence[RequestRecord], duration_s: float, slo: Slo, seed: int = 0) -> dict[str, Any]:
    """Compute every figure of one or several replays. Figures without data are None, never 0."""
    done = [record for record in records if record.ok]
    good = [record.meets(slo.ttft_ms / 1e3, slo.tpot_ms / 1e3) for record in records]
    input_tokens = sum(record.input_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration_s,
        "request_goodput": sum(good) / duration_s,
        "goodput_ratio": sum(good) / len(records) if records else None,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        "p99_send_lag_ms": _percentile_ms([record.send_lag_s for record in records], 99),
    }
    series = latency_series(done)
    for name, values_s in series.items():
        figures |= _spread(name, values_s)
    figures["max_itl_ms"] = max(series["itl"]) * 1e3 if series["itl"] else None
    figures["ci95"] = {
        "goodput_ratio": mean_interval([float(met) for met in good], seed),
        "median_ttft_ms": _ms(median_interval(series["ttft"], seed)),
        "median_tpot_ms": _ms(median_interval(series["tpot"], seed)),
    }
    return figures


def latency_series(done: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return the latencies of finished requests in seconds, by vLLM bench's short names."""
    return {
        "ttft": [record.ttft_s for record in done if record.ttft_s is not None],
        "ttst": [
            record.second_token_s - record.ttft_s
            for record in done
            if record.second_token_s is not None and record.ttft_s is not None
        ],
        "tpot": [tpot_s for record in done if (tpot_s := record.tpot_s) is not None],
        "itl": [itl_s for record in done for itl_s in record.itls_s],
        "e2el": [record.latency_s for record in done if record.latency_s is not None],
    }


def attainment(records: Sequence[RequestRecord], slo: Slo, scale: float) -> float:
    """Return the share of requests that meet both limits multiplied by `scale`."""
    met = sum(record.meets(scale * slo.ttft_ms / 1e3, scale * slo.tpot_ms / 1e3) for record in records)
    return met / len(records) if records else 0.0


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
    return float(np.percentile(values_s, rank)) * 1e3 if len(values_s) else None


def _ms(ends_s: tuple[float, float] | None) -> tuple[float, float] | None:
    return (ends_s[0] * 1e3, ends_s[1] * 1e3) if ends_s else None
