"""The page of measurements is what its tool writes from docs/results/, which refuses what it cannot tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tools.docs.measurements import PAGE, RESULTS, Machine, Record, Section, load, page

RECORD: dict[str, Any] = {
    "what": "SLO attainment",
    "shape": "512 / 64, 2/s",
    "unit": "%",
    "figure": {"of": "adaptive", "values": [90, 85.0], "interval": [74, 97]},
    "beside": [{"of": "colocated", "values": [1040], "interval": [None, 50]}],
    "machine": "zen4",
    "date": "2026-11-26",
    "commit": "afa2cb9",
    "command": "make demo",
    "note": "two runs",
}


def record(**changes: Any) -> Record:
    return msgspec.json.decode(json.dumps(RECORD | changes), type=Record)


def page_of(*records: Record) -> str:
    return page([Section("Modes", "Two engines.", records)], {"zen4": Machine("Zen 4", "2 cores")})


def test_the_committed_page_is_the_one_that_the_results_give():
    assert PAGE.read_text() == page(*load()), "run `make measurements`"


def test_a_record_is_a_row_with_its_run_below_the_table():
    text = page_of(record())
    figures = "adaptive **90, 85.0 %** (74 to 97); colocated 1,040 (below 50). Two runs."
    assert f"| SLO attainment: 512 / 64, 2/s | {figures} | 1 |" in text
    assert "- [1] Zen 4, 2026-11-26, `afa2cb9`: `make demo`\n" in text


def test_figures_of_one_run_share_its_line():
    text = page_of(record(), record(shape="64 / 128"), record(command="make test"))
    assert "| … 64 / 128 |" in text
    assert text.count("- [") == 2


def test_a_long_command_is_cut_between_words_and_its_quotes_closed():
    text = page_of(record(command='make bench-modes BENCH="--part shift --phase-s 30 --most-blocks 2 --budget-s 840"'))
    assert ': `make bench-modes BENCH="--part shift --phase-s 30"` …\n' in text


@pytest.mark.parametrize(
    "changes",
    [
        {"unit": ""},
        {"colour": "red"},
        {"date": "yesterday"},
        {"commit": "main"},
        {"command": None},
        {"method": "by hand"},
        {"figure": {"of": "adaptive", "values": []}},
    ],
)
def test_a_record_that_does_not_say_how_to_get_it_again_is_refused(changes: dict[str, Any]):
    with pytest.raises(msgspec.ValidationError):
        record(**changes)


def test_a_machine_that_is_not_described_is_refused(tmp_path: Path):
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "machines.json").write_text("{}")
    with pytest.raises(ValueError, match="zen4"):
        load(tmp_path)
