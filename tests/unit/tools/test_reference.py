"""The generated reference has a row for each setting and a section for each command."""

import typer

from ridgeline.cluster.cli import app
from ridgeline.cluster.config.models import RidgelineConfig
from tools.docs.reference import cli_page, default, sections, settings_page, type_name


def test_each_setting_has_a_row_with_a_meaning():
    rows = [line.split(" | ") for line in settings_page().splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows if len(row) != 5 or not row[4].rstrip("| ")] == []
    names = {row[0].strip("| `") for row in rows}
    kinds = {type(section) for _, section in sections(RidgelineConfig())}
    parts = {path.rpartition(".")[2] for path, _ in sections(RidgelineConfig())}
    assert names == {name for kind in kinds for name in kind.model_fields} - (parts - {"adaptive"})


def test_defaults_that_differ_between_sections_are_shown_with_them():
    assert default({"pools.prefill": 1, "pools.decode": 1}) == "`1`"
    values = {"pools.prefill": 512, "pools.decode": 512, "pools.colocated": 2048}
    assert default(values) == "`512` (prefill, decode); `2048` (colocated)"


def test_types_are_words():
    assert type_name(float | None) == "number or null"
    assert type_name(dict[str, int]) == "table"


def test_each_command_has_a_section():
    page = cli_page()
    assert all(f"## `ridgeline {name}`" in page for name in typer.main.get_command(app).commands)
