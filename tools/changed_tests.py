"""Prints the unit tests of what was changed since a commit, for `make check`: python -m tools.changed_tests BASE.

With paths instead of a commit it prints the tests of these files, for `make t`. The tests of a module are its mirror in
tests/unit and those that import it themselves; a test that only reaches it through others is left to `make unit`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "tests" / "unit"
OUTSIDE = ("tests", "tools", "examples")
"""Folders that are no part of the package `ridgeline`."""
STRUCTURE = "tests/unit/test_structure.py"
DOCUMENTS = ("tests/unit/test_docs.py", "tests/unit/test_symptoms.py")


def main() -> None:
    """Print the tests' paths, one a line."""
    arguments = sys.argv[1:]
    paths = arguments if any((ROOT / each).exists() for each in arguments) else changed_since(*arguments)
    print("\n".join(unit_tests_of(paths, with_layout=paths != arguments)))  # noqa: T201


def changed_since(base: str = "main") -> list[str]:
    """Return the files that differ from where this branch left `base`, and those that Git does not know yet."""
    fork = _git("merge-base", "HEAD", base) or ["HEAD"]
    return [*_git("diff", "--name-only", fork[0]), *_git("ls-files", "--others", "--exclude-standard")]


def unit_tests_of(paths: Iterable[str], *, with_layout: bool = True) -> list[str]:
    """Return the unit tests of these files, sorted; `with_layout`, those of the structure and of documents too."""
    found: set[str] = set()
    modules: set[str] = set()
    for path in map(Path, paths):
        if path.suffix == ".md" and with_layout:
            found |= {*DOCUMENTS}
        elif path.suffix != ".py":
            continue
        elif path.parts[:2] == ("tests", "unit") and path.name.startswith("test_"):
            found |= {str(path)}
        elif path.parts[0] != "tests" or path.parts[1] == "support":
            modules |= {module_name(path)}
            found |= {STRUCTURE} if with_layout and path.parts[0] != "tests" else set()
            found |= {str(Path("tests", "unit", *path.parts[:-1], f"test_{path.name}"))}
    found |= {str(test.relative_to(ROOT)) for test in UNIT.rglob("test_*.py") if imported(test) & modules}
    return sorted(test for test in found if (ROOT / test).exists())


def module_name(path: Path) -> str:
    """Return the name by which others import this file."""
    parts = path.with_suffix("").parts
    parts = parts if parts[0] in OUTSIDE else ("ridgeline", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(test: Path) -> set[str]:
    """Return the modules that a test imports by itself."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _git(*arguments: str) -> list[str]:
    ran = subprocess.run(("git", *arguments), cwd=ROOT, text=True, capture_output=True, check=False)
    return ran.stdout.split()


if __name__ == "__main__":
    main()
