"""Maps of packages and tables of workarounds name what is there, and folders stay small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PRODUCT = (
    "cluster",
    "contracts",
    "decode_worker",
    "engine",
    "kv_transfer",
    "loadtest",
    "prefill_worker",
    "roofline",
    "router",
    "worker_runtime",
)
MAPPED = (*PRODUCT, "tools")
MOST_MODULES = 12
MAP_LINE = re.compile(r"([\w.-]+/?) {2,}\S")


def modules(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (REPOSITORY / package).rglob("*.py"))


def folders(*packages: str) -> list[Path]:
    return sorted({path.parent for path in modules(*packages)})


def named(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


# Maps


def entries_of_map(docstring: str) -> list[str]:
    """Modules and folders that a package's docstring names, one a line: `module.py  what it is`; sorted."""
    return sorted(match[1] for line in docstring.splitlines() if (match := MAP_LINE.match(line)))


def contents(folder: Path) -> list[str]:
    """What a map must name, once each: modules, and folders with modules in them; sorted."""
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    return sorted(files | {f"{path.name}/" for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))})


@pytest.mark.parametrize("folder", folders(*MAPPED), ids=named)
def test_a_package_says_what_each_of_its_modules_is_and_names_nothing_else(folder):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert entries_of_map(docstring) == contents(folder)


def test_a_map_with_a_wrong_or_a_missing_line_would_be_found():
    wrong = "The KV cache.\n\nblocks.py  the blocks\nnothing.py  is not there\n"
    assert entries_of_map(wrong) == ["blocks.py", "nothing.py"] != contents(REPOSITORY / "kv_transfer" / "memory")


@pytest.mark.parametrize("folder", folders(*PRODUCT), ids=named)
def test_a_folder_holds_a_dozen_modules_at_most(folder):
    assert len(list(folder.glob("*.py"))) - 1 <= MOST_MODULES


# Workarounds


WORKAROUNDS = sorted(folder for folder in folders(*PRODUCT) if folder.name.endswith("_workarounds"))


def rows_of_workarounds(text: str) -> list[list[str]]:
    """The cells of a README's tables, a list a row; heads and rules are none."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    return [row for row in rows if row[0] != "module"]


def problems_of_workarounds(modules: set[str], text: str) -> list[str]:
    """Modules without a row, and rows that do not say everything."""
    rows = rows_of_workarounds(text)
    described = {match[1] for row in rows if (match := re.match(r"\[([^]]+)\]", row[0]))}
    incomplete = [row[0] for row in rows if len(row) != 5 or not all(row)]
    return [f"{name} has no row" for name in sorted(modules - described)] + [
        f"{name} is incomplete" for name in incomplete
    ]


@pytest.mark.parametrize("folder", WORKAROUNDS, ids=named)
def test_every_workaround_is_described_with_its_reason_and_how_to_see_that_it_can_go(folder):
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert not problems_of_workarounds(modules, (folder / "README.md").read_text())


def test_a_workaround_without_a_row_or_a_reason_would_be_found():
    text = "| module | what | why | upstream | until |\n|---|\n| [cores.py](cores.py) | binds |  | x | y |\n"
    assert problems_of_workarounds({"cores.py", "new.py"}, text) == [
        "new.py has no row",
        "[cores.py](cores.py) is incomplete",
    ]
