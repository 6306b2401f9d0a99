"""Writes records.parquet: records.jsonl as a table with types, and with what is known of each record's round."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report.rounds import Round
from ridgeline.loadtest.run.records import RequestRecord

COLUMNS: dict[str, Any] = {
    "variant": pl.String,
    "mode": pl.String,
    "pair": pl.Int64,
    "round": pl.Int64,
    "valid": pl.Boolean,
    "rate": pl.Float64,
    "index": pl.Int64,
    "scheduled_s": pl.Float64,
    "sent_s": pl.Float64,
    "send_lag_s": pl.Float64,
    "input_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "requested_output_tokens": pl.Int64,
    "ttft_s": pl.Float64,
    "ttft_scheduled_s": pl.Float64,
    "second_token_s": pl.Float64,
    "tpot_s": pl.Float64,
    "latency_s": pl.Float64,
    "itls_s": pl.List(pl.Float64),
    "met_slos": pl.Boolean,
    "finish_reason": pl.String,
    "status": pl.Int64,
    "error": pl.String,
    "in_window": pl.Boolean,
}
"""`valid` and `rate`, in requests/s, are those of the round; `met_slos` judges as the run did."""


def write_record_table(path: Path, lines: Iterable[dict[str, Any]], rounds: Sequence[Round], slo: Slo) -> None:
    """Write one row for each line of records.jsonl. A round that never ended, or lost a worker, is not valid."""
    of_round = {
        each.number: {"valid": each.is_kept, "rate": None if each.result is None else each.result.trace.mean_rate}
        for each in rounds
    }
    unknown = {"valid": False, "rate": None}
    _write(path, [line | of_round.get(line["round"], unknown) | _judged(line, slo) for line in lines])


def write_replay_table(path: Path, records: Iterable[RequestRecord], rate: float | None, slo: Slo) -> None:
    """Write the records of one replay, which has neither variants nor pairs."""
    lines = (msgspec.json.decode(record.as_line(), type=dict[str, Any]) for record in records)
    _write(path, [line | {"valid": True, "rate": rate} | _judged(line, slo) for line in lines])


def _judged(line: dict[str, Any], slo: Slo) -> dict[str, Any]:
    record = msgspec.convert(line, RequestRecord, strict=False)
    return {"met_slos": record.meets(*slo.in_seconds())}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pl.DataFrame(rows, schema=COLUMNS).write_parquet(path)
