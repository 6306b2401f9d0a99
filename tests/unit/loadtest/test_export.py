"""Rounds as vllm bench's JSON: figures worked by hand, and the keys that the installed vLLM writes.

That vLLM computes the same figures is in `tests/components/loadtest/test_vllm_figures.py`.
"""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.export import export_rounds, vllm_bench_result
from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report.summary import SCHEMA
from ridgeline.loadtest.run.records import RecordFile
from tests.support.load_records import a_record

SLO = Slo(ttft_ms=200, tpot_ms=50)
ROUND = {"began": "2026-11-27T12:30:05", "label": "colocated", "rate": 2.0, "variant": "a", "round": 3, "pair": 0}
RECORDS = [
    a_record(0, 0.1, 0.02, output_tokens=3),
    a_record(1, 0.3, 0.02, output_tokens=3),
    a_record(2, 0.1, error="broken"),
]


def keys_of_vllm() -> set[str]:
    """The keys that vLLM's source puts into every result of a text benchmark, without importing it."""
    (folder,) = find_spec("vllm").submodule_search_locations
    tree = ast.parse((Path(folder) / "benchmarks" / "serve.py").read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
    dicts = [node for node in ast.walk(functions["benchmark"]) if isinstance(node, ast.Dict)]
    keys = [{key.value for key in each.keys if isinstance(key, ast.Constant)} for each in dicts]
    (figures,) = (found for found in keys if "ttfts" in found)
    head = {
        node.targets[0].slice.value
        for node in ast.walk(functions["main_async"])
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
        if ast.unparse(node.targets[0].value) == "result_json" and isinstance(node.targets[0].slice, ast.Constant)
    }
    return figures | {key for key in head if not key.startswith("ramp_up")}


def test_a_round_has_the_keys_of_the_installed_vllm_and_percentiles():
    spreads = {
        f"{stat}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for stat in ("mean", "median", "std", "p50", "p90", "p99")
    }
    assert set(vllm_bench_result(ROUND, RECORDS, SLO, "a model", "")) == keys_of_vllm() | spreads | {
        "variant",
        "round",
        "pair",
    }


def test_figures_and_lists_are_those_worked_by_hand():
    found = vllm_bench_result(ROUND, RECORDS, SLO, "a model", "")
    assert (found["date"], found["model_id"], found["request_rate"]) == ("20261127-123005", "a model", 2.0)
    assert (found["num_prompts"], found["completed"], found["failed"]) == (3, 2, 1)
    assert found["duration"] == pytest.approx(2 + 0.1 + 10 * 0.01)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (200, 6)
    assert found["request_throughput"] == pytest.approx(2 / 2.2)
    assert found["request_goodput"] == pytest.approx(1 / 2.2)
    assert found["output_throughput"] == pytest.approx(6 / 2.2)
    assert found["input_lens"] == [100, 100, 100]
    assert found["output_lens"] == [3, 3, 0]
    assert found["ttfts"] == [0.1, 0.3, 0.1]
    assert found["itls"][:2] == [[0.02, 0.02], [0.02, 0.02]]
    assert found["errors"] == ["", "", "broken"]
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["p90_ttft_ms"] == pytest.approx(280)
    assert [found["mean_tpot_ms"], found["p99_itl_ms"]] == pytest.approx([20, 20])
    assert found["max_output_tokens_per_s"] == 3
    assert found["max_concurrent_requests"] == 1


def test_a_round_in_which_nothing_finished_has_zeros_as_vllm_has_it():
    found = vllm_bench_result(ROUND, [a_record(0, 0.1, error="broken")], SLO, "a model", "")
    assert (found["completed"], found["mean_ttft_ms"], found["max_concurrent_requests"]) == (0, 0, 0)


def _run(folder: Path, **summary: object) -> Path:
    rounds = [
        {"round": number, "variant": "a", "label": "colocated", "pair": 0, "valid": number == 1, "began": "2026-11-27"}
        | {"rate": 1.5}
        for number in range(2)
    ]
    whole = {"schema": SCHEMA, "variants": {}, "rounds": rounds, "slo": SLO.model_dump(), "plan": {"endpoint": "chat"}}
    setup = {"setup": {"configuration": {"model": {"path": "a model", "served_model_name": None}}}}
    (folder / "summary.json").write_text(json.dumps(whole | setup | summary))
    for number in range(2):
        RecordFile(folder / "records.jsonl", variant="a", mode="colocated", pair=0, round=number).add(RECORDS[0])
    return folder


def test_valid_rounds_of_a_run_are_written(tmp_path):
    (path,) = export_rounds(_run(tmp_path), "vllm-bench")
    found = json.loads(path.read_text())
    assert path == tmp_path / "vllm-bench" / "round-1-a.json"
    assert (found["backend"], found["model_id"], found["request_rate"]) == ("openai-chat", "a model", 1.5)
    assert (found["variant"], found["round"], found["pair"], found["completed"]) == ("a", "1", "0", 1)


def test_what_cannot_be_exported_is_refused_with_the_fix(tmp_path):
    with pytest.raises(LoadTestError, match="written by another version"):
        export_rounds(_run(tmp_path, schema="urn:ridgeline:summary:2"), "vllm-bench")
    (_run(tmp_path) / "records.jsonl").unlink()
    with pytest.raises(LoadTestError, match="no records of round 1"):
        export_rounds(tmp_path, "vllm-bench")
