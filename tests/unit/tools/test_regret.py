"""Regret is what is lost to the best of all modes, and the README names the cell in which adaptive loses most."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tools.bench import regret_on_engines
from tools.bench.modes import MODES
from tools.bench.regret import MEASURED, SIZES, Cell, cells, measure, section
from tools.bench.regret_on_engines import EngineCell
from tools.docs.measurements import RESULTS, Section

CELL = Cell(2, "512/64", "tight", 1.0, 0.5, 0.75, 1.0, 0.5)
README = Path(__file__).parents[3] / "README.md"


def test_a_cell_has_the_parts_in_time_by_all_modes_and_by_what_was_recommended():
    cell = measure((2, "512/64", "tight", 1.3), requests=40)
    parts = [getattr(cell, of) for of in MEASURED]
    assert all(0.0 <= part <= 1.0 for part in parts)
    assert min(cell.regret(of) for of in MEASURED) == 0.0
    assert cell.plan in (cell.colocated, cell.division, cell.adaptive)


def test_regret_is_counted_in_requests_of_100_and_summed_up_by_workers_and_by_shape():
    worse = msgspec.structs.replace(CELL, shape="code", adaptive=0.25)
    made = msgspec.json.decode(msgspec.json.encode(section([CELL, worse], "a command")), type=Section)
    by_workers = made.figures[0]
    assert [one.shape for one in made.figures] == ["2 workers, 2 cells", "512/64, 1 cells", "code, 1 cells"]
    assert by_workers.figure.values == (25.0, 25.0, 50.0)
    assert {one.of: one.values for one in by_workers.beside}["colocated"] == (37.5, 37.5, 50.0)
    assert "code" in by_workers.note
    assert len(made.raw["cells"]) == 2


def test_every_cell_is_published_and_the_readme_names_the_worst():
    made = msgspec.json.decode((RESULTS / "regret.json").read_bytes(), type=Section)
    published = msgspec.convert(made.raw["cells"], list[Cell])
    assert [(one.workers, one.shape, one.slos, one.load) for one in published] == cells([*SIZES])
    worst = max(published, key=lambda one: one.regret("adaptive"))
    told = " ".join(README.read_text().split())
    assert f"{worst.regret('adaptive'):.0f} of 100" in told
    assert worst.named in told


def test_regret_on_engines_is_of_the_best_mode_and_of_the_plan_only_where_it_answers():
    errors = dict.fromkeys(MODES, (0.1, -0.2, 0.3, 0.0))
    parts = {"colocated": 0.5, "disaggregated": 0.75, "adaptive": 0.25}
    sure = EngineCell("512/64", "tight", 0.6, parts, "colocated", "", errors)
    unsure = msgspec.structs.replace(sure, load=0.9, doubt="batches are larger")
    both, one, other, shape, *times = regret_on_engines.section([sure, unsure], "Zen 4", "e2642911").figures
    assert both.figure.values == (50.0, 50.0, 50.0)
    assert {one.of: one.values[0] for one in both.beside} == {
        "plan (1)": 25.0,
        "adaptive there": 50.0,
        "colocated": 25.0,
        "disaggregated": 0.0,
    }
    assert [len(record.beside) for record in (one, other, shape)] == [3, 2, 4]
    assert [record.figure.values for record in times] == [(10, 10), (20, 20), (30, 30), (0, 0)]


def test_all_30_cells_on_engines_are_published_and_the_readme_names_the_worst():
    made = msgspec.json.decode((RESULTS / "regret-engines.json").read_bytes(), type=Section)
    published = msgspec.convert(made.raw["cells"], list[EngineCell])
    assert len({one.named for one in published}) == 30
    worst = max(published, key=lambda one: one.regret("adaptive"))
    told = " ".join(README.read_text().split())
    assert f"{worst.regret('adaptive'):.0f} of 100" in told
    assert worst.named in told
