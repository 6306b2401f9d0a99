"""records.parquet, read by polars as a user would."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import polars as pl

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report.record_table import COLUMNS, write_record_table, write_replay_table
from ridgeline.loadtest.report.rounds import Round
from ridgeline.loadtest.run.records import RecordFile
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run_folder import RunFolder
from ridgeline.loadtest.trace.trace import Trace, TraceRow
from tests.support.load_records import a_record

SLO = Slo(ttft_ms=200, tpot_ms=50)
TRACE = Trace("simulated", tuple(TraceRow(i / 2, 100, 11) for i in range(20)))


def test_every_line_is_a_row_with_its_round_and_the_figures_of_the_file(tmp_path):
    valid = RecordFile(tmp_path / "records.jsonl", variant="a", mode="colocated", pair=0, round=3)
    valid.add(a_record(0, 0.1))
    valid.add(a_record(1, 0.3))
    valid.add(a_record(2, 0.1, error="broken", latency_s=None, itls_s=()))
    RecordFile(tmp_path / "records.jsonl", variant="b", mode="disaggregated", pair=0, round=4).add(a_record(0, 0.1))
    result = ReplayResult(TRACE, (), 10.0, {}, ())
    rounds = [Round("a", 0, datetime.now(UTC), result, None, (), True, number=3)]
    path = tmp_path / "records.parquet"
    write_record_table(path, RunFolder(tmp_path).record_lines(), rounds, SLO)

    found = pl.read_parquet(path)
    assert dict(found.schema) == {name: kind() if isinstance(kind, type) else kind for name, kind in COLUMNS.items()}
    assert found["valid"].to_list() == [True, True, True, False], "round 4 never ended"
    assert found["rate"].to_list() == [TRACE.mean_rate] * 3 + [None]
    assert found["met_slos"].to_list() == [True, False, False, True]
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in lines[0]} for row in found.to_dicts()] == lines


def test_a_replay_has_the_same_columns_without_variants(tmp_path):
    write_replay_table(tmp_path / "records.parquet", [a_record(0, 0.1)], 2.0, SLO)
    (row,) = pl.read_parquet(tmp_path / "records.parquet").to_dicts()
    assert list(row) == list(COLUMNS)
    assert (row["variant"], row["round"], row["valid"], row["rate"], row["met_slos"]) == (None, None, True, 2.0, True)
    assert row["itls_s"] == [0.01] * 10


def test_a_run_without_records_gives_an_empty_table(tmp_path):
    write_record_table(tmp_path / "records.parquet", RunFolder(tmp_path).record_lines(), [], SLO)
    assert pl.read_parquet(tmp_path / "records.parquet").shape == (0, len(COLUMNS))
