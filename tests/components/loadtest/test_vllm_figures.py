"""vLLM computes the same figures of a round as its export has."""

import pytest
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics

from ridgeline.loadtest.export import vllm_bench_result
from ridgeline.loadtest.plan import Slo
from tests.support.load_records import a_record


def test_vllm_computes_the_figures_that_a_round_is_exported_with():
    slo = Slo(ttft_ms=200, tpot_ms=50)
    records = [a_record(i, 0.03 + 0.03 * i, 0.011 + 0.007 * i, output_tokens=1 + i) for i in range(9)]
    records.append(a_record(9, 0.1, error="broken"))
    one = {"began": "2026-11-27", "label": "colocated", "rate": 1.0, "variant": "a", "round": 0, "pair": 0}
    found = vllm_bench_result(one, records, slo, "a model", "completions")
    outputs = [
        RequestFuncOutput(
            success=record.ok,
            latency=record.latency_s,
            output_tokens=record.output_tokens,
            ttft=record.ttft_s,
            itl=list(record.itls_s),
            prompt_len=record.input_tokens,
            error=record.error or "",
            start_time=record.sent_s,
        )
        for record in records
    ]
    limits = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms}
    theirs, lengths = calculate_metrics([], outputs, found["duration"], None, [50, 90, 99], limits)
    assert found["output_lens"] == lengths
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (theirs.total_input, theirs.total_output)
    for name in ("completed", "failed", "request_throughput", "request_goodput", "output_throughput"):
        assert found[name] == pytest.approx(getattr(theirs, name)), name
    for name in ("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx"):
        assert found[name] == pytest.approx(getattr(theirs, name)), name
    for name in ("ttft", "tpot", "itl", "e2el"):
        for stat in ("mean", "median", "std"):
            assert found[f"{stat}_{name}_ms"] == pytest.approx(getattr(theirs, f"{stat}_{name}_ms"))
        for rank, value in getattr(theirs, f"percentiles_{name}_ms"):
            assert found[f"p{rank}_{name}_ms"] == pytest.approx(value)
