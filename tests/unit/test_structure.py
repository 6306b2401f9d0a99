"""Maps of packages and tables of workarounds name what is there, folders stay small, and names are used once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PRODUCT = (
    *("cluster", "contracts", "decode_worker", "engine", "kv_transfer", "loadtest", "prefill_worker", "roofline"),
    *("router", "worker_runtime"),
)
MOST_MODULES = 12
MAP_LINE = re.compile(r"([\w.-]+/?) {2,}\S")
ROW = re.compile(r"\| \[([^]]+)\]")
SHARED_MODULES = {
    *(
        "calibration",
        "choice",
        "client",
        "decisions",
        "errors",
        "grid",
        "handler",
        "heads",
        "host",
        "messages",
        "names",
    ),
    *("orders", "plan", "policy", "puller", "rates", "replay", "roles", "sampling", "server", "shape", "source"),
    *("stream", "worker"),
}
SHARED_CLASSES = {
    *("Asked", "Bounds", "Decision", "Ended", "Grid", "Held", "LeadingHead", "Limits", "Load", "Place", "Refused"),
    *("Round", "Start", "Workers"),
}
"""Those that still do: no new ones."""


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


@pytest.mark.parametrize("folder", [folder for folder in folders() if folder.name.endswith("_workarounds")], ids=str)
def test_every_workaround_is_described_with_its_reason_and_how_to_see_that_it_can_go(folder):
    rows = [line for line in (folder / "README.md").read_text().splitlines() if ROW.match(line)]
    described = {ROW.match(row)[1] for row in rows}
    assert {path.name for path in folder.glob("*.py")} - {"__init__.py"} <= described
    assert not [
        row for row in rows if len(cells := row.strip("| ").split(" | ")) != 5 or not all(map(str.strip, cells))
    ]


def test_no_two_modules_and_no_two_classes_of_the_product_share_a_name():
    names, classes = defaultdict(list), defaultdict(list)
    for path in modules():
        names[path.stem].append(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(path)
    del names["__init__"]
    assert {name for name, paths in names.items() if len(paths) > 1} <= SHARED_MODULES
    assert {name for name, paths in classes.items() if len(paths) > 1} <= SHARED_CLASSES
