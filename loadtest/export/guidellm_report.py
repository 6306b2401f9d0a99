"""The rounds of one variant as the benchmarks.json of GuideLLM, which computes its figures itself.

GuideLLM's own classes are filled with the records and write the file, so that its formulas and its schema are those of
the version installed. TTFT is from sending there, and the SLO on the largest gap does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.export.round_head import RoundHead
from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.records import RequestRecord

if TYPE_CHECKING:
    from guidellm.benchmark.schemas import GenerativeBenchmark
    from guidellm.schemas import RequestInfo

MISSING = "--export guidellm needs GuideLLM, which is not installed: pip install 'guidellm==0.8.1'"


def write_guidellm_report(path: Path, rounds: Sequence[tuple[RoundHead, Sequence[RequestRecord]]], slo: Slo) -> None:
    """Write all rounds of one variant as the benchmarks of one report. Raises LoadTestError without GuideLLM."""
    try:
        from guidellm.benchmark.schemas import GenerativeBenchmarksReport
    except ImportError as error:
        raise LoadTestError(f"{MISSING} ({error})") from error
    scenario = {
        "metadata": {"labels": {"source": "ridgeline", "variant": rounds[0][0].label}},
        "spec": {
            "backend": {"kind": "openai_http", "target": "", "model": rounds[0][0].model or ""},
            "profile": {"kind": "replay"},
            "data": [{"kind": "in_memory_dict", "data": {}}],
        },
    }
    benchmarks = [_benchmark(index, head, records, slo) for index, (head, records) in enumerate(rounds)]
    report = GenerativeBenchmarksReport.model_validate({"config": scenario, "benchmarks": benchmarks})
    path.parent.mkdir(exist_ok=True)
    report.save_file(path)


def _benchmark(index: int, head: RoundHead, records: Sequence[RequestRecord], slo: Slo) -> GenerativeBenchmark:
    from guidellm.benchmark.schemas import GenerativeBenchmark, GenerativeBenchmarkAccumulator
    from guidellm.benchmark.schemas.base import BenchmarkConfig
    from guidellm.scheduler import SchedulerProgress, SchedulerState
    from guidellm.schemas import GenerationRequest, GenerationResponse, UsageMetrics

    config = BenchmarkConfig.model_validate(
        {
            "run_id": head.label,
            "run_index": index,
            "strategy": {"type_": "trace"},
            "constraints": {},
            "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
            "warnings": [],
            "profile": {"kind": "replay", "rate": head.rate},
            "requests": {},
            "backend": {"kind": head.backend},
            "environment": head.metadata,
        }
    )
    began_s = head.began.timestamp()
    infos = [_info(record, began_s) for record in records]
    ended_s = max(info.timings.request_end or 0.0 for info in infos)
    done = sum(record.ok for record in records)
    state = SchedulerState(
        start_time=began_s,
        start_requests_time=min(info.timings.request_start or began_s for info in infos),
        end_requests_time=ended_s,
        end_processing_time=ended_s,
        end_time=ended_s,
        progress=SchedulerProgress(stop_time=ended_s),
        created_requests=len(records),
        processed_requests=len(records),
        successful_requests=done,
        errored_requests=len(records) - done,
    )
    accumulator = GenerativeBenchmarkAccumulator(config=config)
    for record, info in zip(records, infos, strict=True):
        tokens = UsageMetrics(text_tokens=record.input_tokens)
        request = GenerationRequest(request_id=info.request_id, input_metrics=tokens)
        response = GenerationResponse(
            request_id=info.request_id,
            request_args=None,
            input_metrics=tokens,
            output_metrics=UsageMetrics(text_tokens=record.output_tokens),
        )
        accumulator.update_estimate(response, request, info, state)
    return GenerativeBenchmark.compile(accumulator, state)


def _info(record: RequestRecord, began_s: float) -> RequestInfo:
    from guidellm.schemas import RequestInfo

    sent_s = began_s + record.sent_s
    ended_s = sent_s + (record.latency_s or 0.0)
    first_s = None if record.ttft_s is None else sent_s + record.ttft_s
    chunks = 0 if first_s is None else len(record.itls_s) + 1
    return RequestInfo.model_validate(
        {
            "request_id": str(record.index),
            "status": "completed" if record.ok else "errored",
            "error": record.error,
            "timings": {
                "targeted_start": began_s + record.scheduled_s,
                **dict.fromkeys(("queued", "dequeued", "scheduled_at", "resolve_start", "request_start"), sent_s),
                **dict.fromkeys(
                    ("first_request_iteration", "first_token_iteration", "first_output_token_iteration"), first_s
                ),
                **dict.fromkeys(("last_token_iteration", "last_request_iteration"), ended_s if chunks else None),
                **dict.fromkeys(("request_iterations", "token_iterations"), chunks),
                **dict.fromkeys(("request_end", "resolve_end", "finalized"), ended_s),
            },
        }
    )
