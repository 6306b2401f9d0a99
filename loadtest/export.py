"""Writes the valid rounds of a finished run as `vllm bench serve --save-detailed` of vLLM 0.32 writes its results.

The figures follow vLLM's formulas, not ours: rates are over the time to the last answer, the SLO on the largest gap
does not count, and TTFT is from sending. What a replay does not know is null, or empty as vLLM leaves it.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report.summary import PERCENTILES
from ridgeline.loadtest.report.tables import served_model
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run_folder import RECORDS, RunFolder
from ridgeline.loadtest.saved import saved_summary

ExportFormat = Literal["vllm-bench"]


def export_rounds(folder: Path, kind: ExportFormat) -> list[Path]:
    """Write each valid round as a file in `FOLDER/KIND`; return their paths. Raises LoadTestError."""
    summary = saved_summary(folder)
    valid = [each for each in summary["rounds"] if each["valid"]]
    records = RunFolder(folder).records_by_round()
    if missing := [each["round"] for each in valid if not records.get(each["round"])]:
        raise LoadTestError(f"{folder / RECORDS} has no records of round {missing[0]}: restore the file, or run again")
    out, slo, model = folder / kind, Slo(**summary["slo"]), served_model(summary)
    out.mkdir(exist_ok=True)
    paths = []
    for each in valid:
        paths.append(out / f"round-{each['round']}-{each['variant']}.json")
        result = vllm_bench_result(each, records[each["round"]], slo, model, summary["plan"].get("endpoint", ""))
        paths[-1].write_bytes(msgspec.json.encode(result) + b"\n")
    return paths


def vllm_bench_result(
    each: Mapping[str, Any], records: Sequence[RequestRecord], slo: Slo, model: str | None, endpoint: str
) -> dict[str, Any]:
    """Return the content of the file of a round, of which `each` is what summary.json says."""
    backend = "openai-chat" if endpoint == "chat" else "openai"
    done = [record for record in records if record.ok]
    duration_s = _duration_s(records)
    input_tokens = sum(record.input_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    result: dict[str, Any] = {
        "date": f"{datetime.fromisoformat(each['began']):%Y%m%d-%H%M%S}",
        "endpoint_type": backend,
        "backend": backend,
        "label": each["label"],
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(records),
        **{name: str(each[name]) for name in ("variant", "round", "pair")},
        "request_rate": each["rate"],
        "burstiness": None,
        "max_concurrency": None,
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _rate(len(done), duration_s),
        "request_goodput": _rate(sum(_is_good(record, slo) for record in done), duration_s),
        "output_throughput": _rate(output_tokens, duration_s),
        "total_token_throughput": _rate(input_tokens + output_tokens, duration_s),
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens if record.ok else 0 for record in records],
        "ttfts": [record.ttft_s or 0.0 for record in records],
        "itls": [list(record.itls_s) for record in records],
        "latencies": [record.latency_s or 0.0 for record in records],
        "start_times": [record.sent_s for record in records],
        "queue_times": [0.0] * len(records),
        "generated_texts": [""] * len(records),
        "errors": [record.error or "" for record in records],
        **_peaks(done),
        "rtfx": 0.0,
    }
    series_s = {
        "ttft": [record.ttft_s or 0.0 for record in done],
        "tpot": [tpot_s for record in done if (tpot_s := record.tpot_s) is not None],
        "itl": [itl_s for record in done for itl_s in record.itls_s],
        "e2el": [record.latency_s or 0.0 for record in done],
    }
    for name, values_s in series_s.items():
        result |= _spread(name, values_s)
    return result


def _duration_s(records: Sequence[RequestRecord]) -> float:
    ended_s = max((record.sent_s + (record.latency_s or 0.0) for record in records), default=0.0)
    return ended_s - min((record.sent_s for record in records), default=0.0)


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s else 0.0


def _is_good(record: RequestRecord, slo: Slo) -> bool:
    ttft_s, tpot_s, _ = slo.in_seconds()
    return (record.ttft_s or 0.0) <= ttft_s and (record.tpot_s or 0.0) <= tpot_s


def _peaks(done: Sequence[RequestRecord]) -> dict[str, float]:
    """Return the most tokens and requests of any second since the first was sent, counted as vLLM does."""
    if not done:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    began_s = min(record.sent_s for record in done)
    tokens: dict[int, int] = {}
    requests: dict[int, int] = {}
    for record in done:
        sent_s = record.sent_s - began_s
        for token_s in sent_s + (record.ttft_s or 0.0) + np.cumsum([0.0, *record.itls_s]):
            tokens[int(token_s)] = tokens.get(int(token_s), 0) + 1
        for second in range(math.floor(sent_s), math.floor(sent_s + (record.latency_s or 0.0)) + 1):
            requests[second] = requests.get(second, 0) + 1
    return {"max_output_tokens_per_s": float(max(tokens.values())), "max_concurrent_requests": max(requests.values())}


def _spread(name: str, values_s: Sequence[float]) -> dict[str, float]:
    values_ms = np.asarray(values_s or [0.0], dtype=np.float64) * 1e3  # 0 without values, as vLLM has it
    return {
        f"mean_{name}_ms": float(np.mean(values_ms)),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(np.std(values_ms)),
        **{f"p{rank}_{name}_ms": float(np.percentile(values_ms, rank)) for rank in PERCENTILES},
    }
