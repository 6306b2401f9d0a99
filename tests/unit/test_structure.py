"""What packages and docstrings say about the structure of the code is so: maps, callers, sizes of folders, words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
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
OUTSIDERS = {"vLLM", "Ray", "prometheus-client", "gRPC", "msgspec", "hand"}
"""Who may call without being a module of this repository."""

MAP_LINE = re.compile(r"([\w.-]+/?) {2,}\S")
CLAIM = re.compile(
    r"(?:^|[.;:,)] )(?:and )?"
    r"((?:called|used|made|run|installed|owned|built|read|loaded|asked|set|written|raised|sent|changed|fed|filled|started)"
    r"(?: \w+){0,2} by )((?:[^.;]|\.(?=\S))*)",
    re.IGNORECASE,
)
NAME = re.compile(r"`([^`]+)`")


def modules(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (REPOSITORY / package).rglob("*.py"))


def folders(*packages: str) -> list[Path]:
    return sorted({path.parent for path in modules(*packages)})


def dotted(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


# Callers


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Every docstring of a module in one line, with the name of what it belongs to ("" for the module)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield getattr(node, "name", ""), " ".join(docstring.split())


def claims(docstring: str) -> list[tuple[bool, list[str], str]]:
    """Every "called by ..." of a docstring: whether it says "only", the names in backticks, the words after "by"."""
    return [
        (" only" in match[1] + match[2], NAME.findall(match[2]), match[2].strip())
        for match in CLAIM.finditer(docstring)
    ]


def imported(tree: ast.Module) -> set[str]:
    """Modules, and names of modules, that a file imports or mentions as a dotted string, as vLLM's settings do."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^[a-z_]+(?:\.\w+)+", node.value))
    return found


MODULES = {dotted(path): path for path in modules(*MAPPED)}


@cache
def tree_of(module: str) -> ast.Module:
    """What a module says; read by the first test that asks, for every process collects these tests."""
    return ast.parse(MODULES[module].read_text())


@cache
def imports() -> dict[str, set[str]]:
    return {name: imported(tree_of(name)) for name in MODULES}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def importers(module: str) -> set[str]:
    """Modules of the product and its tools that import this one, or anything in this package."""
    return {
        name
        for name, found in imports().items()
        if not within(name, module) and any(within(other, module) for other in found)
    }


def names_in(tree: ast.Module) -> set[str]:
    """Functions and classes of a module, and `Class.method`."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def problem_of_claim(module: str, owner: str, only: bool, users: list[str], words: str) -> str | None:
    """Why this sentence about `module` is not so, or None."""
    if not users:
        return (
            None if words.split()[0].rstrip(",'s") in OUTSIDERS else f"by whom? {words!r} names no module in backticks"
        )
    real = importers(module)
    for user in users:
        if owner and user in names_in(tree_of(module)):
            continue
        if user not in MODULES:
            return f"{user!r} is no module; write it as `cluster.runtime.actors`"
        if not any(within(name, user) for name in real):
            return f"{user} does not import {module}"
    others = {name for name in real if not any(within(name, user) for user in users)}
    return f"not only: {sorted(others)}" if only and others else None


@pytest.mark.parametrize("module", sorted(MODULES), ids=str)
def test_whoever_is_said_to_use_a_module_imports_it(module):
    problems = [
        f"{module}:{owner}: {problem}"
        for owner, docstring in docstrings(tree_of(module))
        for claim in claims(docstring)
        if (problem := problem_of_claim(module, owner, *claim))
    ]
    assert not problems


@pytest.mark.parametrize(
    ("sentence", "problem"),
    [
        ("Pins blocks. Called by `router.server`.", "router.server does not import"),
        ("Pins blocks. Called by `lease.py`.", "'lease.py' is no module"),
        ("Pins blocks. Made by the planner.", "by whom?"),
        ("Pins blocks. Used only by `kv_transfer.service`.", "not only"),
    ],
)
def test_a_wrong_claim_would_be_found(sentence, problem):
    [claim] = claims(sentence)
    found = problem_of_claim("kv_transfer.source.lease", "", *claim)
    assert found is not None
    assert problem in found


def test_a_true_claim_is_found_and_passes():
    [claim] = claims("Pins blocks. Called by `kv_transfer.service` and by `kv_transfer.source`.")
    assert claim[1] == ["kv_transfer.service", "kv_transfer.source"]
    assert problem_of_claim("kv_transfer.memory.blocks", "", *claim) is None
