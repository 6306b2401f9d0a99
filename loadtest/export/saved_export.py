"""Writes the valid rounds of a finished run in the format of another load generator."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.export.guidellm_report import write_guidellm_report
from ridgeline.loadtest.export.round_head import RoundHead
from ridgeline.loadtest.export.vllm_bench import vllm_bench_result
from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report.tables import served_model
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run_folder import RECORDS, RunFolder
from ridgeline.loadtest.saved import saved_summary

ExportFormat = Literal["vllm-bench", "guidellm"]
Round = tuple[RoundHead, list[RequestRecord]]


def export_rounds(folder: Path, kind: ExportFormat) -> list[Path]:
    """Write the valid rounds to `FOLDER/KIND`; return the paths of the files there. Raises LoadTestError.

    As vLLM writes its results that is a file for each round, as GuideLLM does one for each variant.
    """
    summary = saved_summary(folder)
    valid = [each for each in summary["rounds"] if each["valid"]]
    records = RunFolder(folder).records_by_round()
    if missing := [each["round"] for each in valid if not records.get(each["round"])]:
        raise LoadTestError(f"{folder / RECORDS} has no records of round {missing[0]}: restore the file, or run again")
    rounds = [(_head(each, summary), records[each["round"]]) for each in valid]
    out = folder / kind
    write = _write_vllm_bench if kind == "vllm-bench" else _write_guidellm
    return list(write(out, rounds, Slo(**summary["slo"])))


def _write_vllm_bench(out: Path, rounds: Sequence[Round], slo: Slo) -> Iterator[Path]:
    for head, records in rounds:
        path = out / f"round-{head.metadata['round']}-{head.metadata['variant']}.json"
        out.mkdir(exist_ok=True)
        path.write_bytes(msgspec.json.encode(vllm_bench_result(head, records, slo)) + b"\n")
        yield path


def _write_guidellm(out: Path, rounds: Sequence[Round], slo: Slo) -> Iterator[Path]:
    for variant in sorted({head.metadata["variant"] for head, _ in rounds}):
        path = out / f"benchmarks-{variant}.json"
        write_guidellm_report(path, [each for each in rounds if each[0].metadata["variant"] == variant], slo)
        yield path


def _head(each: dict[str, Any], summary: dict[str, Any]) -> RoundHead:
    is_chat = summary["plan"].get("endpoint") == "chat"
    return RoundHead(
        began=datetime.fromisoformat(each["began"]),
        label=each["label"],
        model=served_model(summary),
        backend="openai-chat" if is_chat else "openai",
        rate=each["rate"],
        metadata={"variant": each["variant"], "round": str(each["round"]), "pair": str(each["pair"])},
    )
