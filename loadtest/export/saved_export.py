"""Writes the valid rounds of a finished run as `vllm bench serve` writes its results."""

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.export.vllm_bench import RoundHead, vllm_bench_result
from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report.tables import served_model
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
    out, slo = folder / kind, Slo(**summary["slo"])
    out.mkdir(exist_ok=True)
    paths = []
    for each in valid:
        paths.append(out / f"round-{each['round']}-{each['variant']}.json")
        result = vllm_bench_result(_head(each, summary), records[each["round"]], slo)
        paths[-1].write_bytes(msgspec.json.encode(result) + b"\n")
    return paths


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
