"""Maps of packages and tables of workarounds name what is there, and folders stay small."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PRODUCT = (
    *("cluster", "contracts", "decode_worker", "engine", "kv_transfer", "loadtest", "prefill_worker", "roofline"),
    *("router", "worker_runtime"),
)
MOST_MODULES = 12
MOST_LINES = {
    "cluster": 10_570,
    "contracts": 1_212,
    "decode_worker": 1_640,
    "engine": 5_724,
    "kv_transfer": 4_408,
    "loadtest": 8_885,
    "prefill_worker": 950,
    "roofline": 1_962,
    "router": 17_631,
    "tests": 60_257,
    "tools": 6_678,
    "worker_runtime": 1_040,
}
"""Of Python, by package. A commit that raises one says what the lines are worth; one that deletes lines lowers it."""
MAP_LINE = re.compile(r"([\w.-]+/?) {2,}\S")
ROW = re.compile(r"\| \[([^]]+)\]")


def modules() -> Iterator[Path]:
    for package in PRODUCT:
        yield from sorted((REPOSITORY / package).rglob("*.py"))


def folders(*more: str) -> list[Path]:
    paths = [*modules(), *(path for package in more for path in (REPOSITORY / package).rglob("*.py"))]
    return sorted({path.parent for path in paths})


def entries_of_map(folder: Path) -> list[str]:
    """Modules and folders that a package's docstring names, one a line: `module.py  what it is`; sorted."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return sorted(match[1] for line in docstring.splitlines() if (match := MAP_LINE.match(line)))


def contents(folder: Path) -> list[str]:
    """What a map must name, once each: modules, and folders with modules in them; sorted."""
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    return sorted(files | {f"{path.name}/" for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))})


def test_a_package_says_what_each_of_its_modules_is_and_names_nothing_else():
    for folder in folders("tools"):
        assert entries_of_map(folder) == contents(folder), folder


def test_a_folder_holds_a_dozen_modules_at_most():
    assert not [folder for folder in folders() if len(list(folder.glob("*.py"))) - 1 > MOST_MODULES]


@pytest.mark.parametrize("package", MOST_LINES)
def test_a_package_does_not_grow_unseen(package):
    lines = sum(path.read_text().count("\n") for path in (REPOSITORY / package).rglob("*.py"))
    assert lines <= MOST_LINES[package]


@pytest.mark.parametrize("folder", [folder for folder in folders() if folder.name.endswith("_workarounds")], ids=str)
def test_every_workaround_is_described_with_its_reason_and_how_to_see_that_it_can_go(folder):
    rows = [line for line in (folder / "README.md").read_text().splitlines() if ROW.match(line)]
    described = {ROW.match(row)[1] for row in rows}
    assert {path.name for path in folder.glob("*.py")} - {"__init__.py"} <= described
    assert not [
        row for row in rows if len(cells := row.strip("| ").split(" | ")) != 5 or not all(map(str.strip, cells))
    ]
