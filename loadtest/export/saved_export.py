"""Writes the valid rounds of a finished run in the format of another load generator."""

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.export.vllm_bench import RoundHead, vllm_bench_result
from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run_folder import RECORDS, RunFolder
from ridgeline.loadtest.saved import saved_summary

ExportFormat = Literal["vllm-bench"]


def export_rounds(folder: Path, kind: ExportFormat) -> list[Path]:
    """Write `FOLDER/vllm-bench/round-N-VARIANT.json` for each valid round; return the paths. Raises LoadTestError."""
    summary = saved_summary(folder)
    rounds = [each for each in _rounds(folder, summary) if each["valid"]]
    records = RunFolder(folder).records_by_round()
    if missing := [each["round"] for each in rounds if not records.get(each["round"])]:
        raise LoadTestError(f"{folder / RECORDS} has no records of round {missing[0]}: restore the file, or run again")
    out = folder / kind
    out.mkdir(exist_ok=True)
    slo = Slo(**summary["slo"])
    paths: list[Path] = []
    for each in rounds:
        result = vllm_bench_result(_head(each, summary), records[each["round"]], slo)
        paths.append(out / f"round-{each['round']}-{each['variant']}.json")
        paths[-1].write_bytes(msgspec.json.encode(result) + b"\n")
    return paths


def _rounds(folder: Path, summary: dict[str, Any]) -> list[dict[str, Any]]:
    found = summary.get("rates", summary).get("rounds")
    if found is None:
        raise LoadTestError(f"{folder} holds a replay: only rounds of ridgeline compare can be exported")
    if not all("round" in each for each in found):
        raise LoadTestError(
            f"the rounds in {folder} have no numbers, since an earlier version searched there: run it again"
        )
    rounds: list[dict[str, Any]] = found
    return rounds


def _head(each: dict[str, Any], summary: dict[str, Any]) -> RoundHead:
    model = (summary.get("setup", {}).get("configuration") or {}).get("model", {})
    is_chat = summary["plan"].get("endpoint") == "chat"
    return RoundHead(
        began=datetime.fromisoformat(each["began"]),
        label=each["label"],
        model=model.get("served_name") or model.get("path"),
        backend="openai-chat" if is_chat else "openai",
        rate=each.get("rate", summary["load"]["rate"]),
        metadata={"variant": each["variant"], "round": str(each["round"]), "pair": str(each["pair"])},
    )
