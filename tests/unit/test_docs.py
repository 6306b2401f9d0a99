"""The documents name only what exists: files, make targets, commands and their options, metrics."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from ridgeline.cluster.cli import app
from tests.support.series_table import METRICS_PAGE, METRICS_TABLE, metrics_table
from tools.docs import reference

REPOSITORY = Path(__file__).parents[2]
PACKAGES = [init.parent for init in REPOSITORY.glob("*/__init__.py")]
GENERATED = {REPOSITORY / "docs" / "reference" / name: page for name, page in reference.PAGES.items()}
PAGES = set(REPOSITORY.glob("docs/**/*.md"))
DOCUMENTS = sorted(
    [
        REPOSITORY / "README.md",
        *(REPOSITORY / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")),
        *(PAGES - GENERATED.keys()),
        *(document for package in PACKAGES for document in package.glob("**/*.md")),
    ]
)
MEASUREMENTS = REPOSITORY / "docs" / "measurements.md"
"""Names the commands of earlier commits, and says so."""
WRITTEN_BY_COMMANDS = {"summary.json", "records.jsonl", "report.html", "site/index.html"}

SUFFIXES = "py|yaml|yml|sh|md|toml|json|jsonl|csv|txt|html|template"
PATH = re.compile(rf"(?:[\w.-]+/)*[\w.-]+\.(?:{SUFFIXES})|(?:[\w.-]+/)+|Makefile|LICENSE")
PATH_IN_FENCE = re.compile(rf"(?<![\w./~:-])(?:[\w.-]+/)+[\w.-]+\.(?:{SUFFIXES})\b")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\.venv/bin/)?(ridgeline|make) (.*)")


def inline_code(text: str) -> list[str]:
    """What stands in single backticks, outside fences."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def named_paths(text: str) -> set[str]:
    """Files and folders of the repository that a document names; results of commands and `runs/` are none."""
    inline = {code for code in inline_code(text) if PATH.fullmatch(code)}
    fenced = {path for _, body in FENCE.findall(text) for path in PATH_IN_FENCE.findall(body)}
    return {path for path in inline | fenced if not path.startswith("runs/")} - WRITTEN_BY_COMMANDS


def shell_commands(text: str) -> list[list[str]]:
    """`make` and `ridgeline` commands, in fences and inline, as words; comments and what follows `&&` are cut off."""
    lines = [line for language, body in FENCE.findall(text) if language == "bash" for line in body.splitlines()]
    found = [match for line in [*lines, *inline_code(text)] if (match := COMMAND.match(line))]
    found += [match for line in lines if (match := re.search(r"&& (ridgeline) ([^'\"]*)", line))]
    return [[match[1], *shlex.split(match[2], comments=True)] for match in found]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def problem_of(command: list[str]) -> str | None:
    """What in this command does not exist, or None."""
    program, *words = command
    if program == "make":
        unknown = [word for word in words if "=" not in word and word not in make_targets()]
        return f"no make target {unknown}" if unknown else None
    found: Any = typer.main.get_command(app)
    name = "ridgeline"
    while hasattr(found, "commands"):  # a group, such as `ridgeline bench`
        if words and words[0] in {option for parameter in found.params for option in parameter.opts}:
            break  # an option of all commands
        if words and words[0] not in found.commands and hasattr(found, "unnamed"):  # `ridgeline trace ID`
            words = [found.unnamed, *words]
        if not words or words[0] not in found.commands:
            return f"no command {' '.join([name, *words[:1]])}"
        name = f"{name} {words[0]}"
        found, words = found.commands[words[0]], words[1:]
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if word.startswith("-") and word.partition("=")[0] not in known | {"--help"}]
    return f"{name} has no {unknown}" if unknown else None


def named(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_file_a_document_names_exists(document):
    missing = {path for path in named_paths(document.read_text()) if not (REPOSITORY / path).exists()}
    assert not missing or document == MEASUREMENTS


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path not in PAGES], ids=named)
def test_every_link_to_a_file_leads_somewhere(document):
    """In documents beside the site, whose own links its strict build checks (`test_site`)."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert not [link for link in links if not (document.parent / link).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_command_a_document_names_exists(document):
    problems = {" ".join(command): problem_of(command) for command in shell_commands(document.read_text())}
    assert document == MEASUREMENTS or not {command: problem for command, problem in problems.items() if problem}


def test_the_metrics_table_is_what_the_code_declares():
    table = METRICS_TABLE.search(METRICS_PAGE.read_text())
    assert table is not None
    assert table[0] == metrics_table(), "run `python -m tests.support.series_table` to write it anew"


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_the_reference_is_what_the_code_declares(path):
    assert path.read_text() == GENERATED[path](), "run `python -m tools.docs.reference` to write it anew"


def test_decisions_are_numbered_without_gaps_and_short():
    pages = sorted((REPOSITORY / "docs" / "decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text()
        assert len(text.split()) <= 300, page.name
        for part in ("**Decision.**", "**Reasons.**", "**Price.**", "**Reconsider when**"):
            assert part in text, f"{page.name} lacks {part}"


def test_wrong_commands_and_paths_would_be_found():
    for command in ("make nothing", "ridgeline nothing", "ridgeline serve --nothing", "ridgeline bench nothing"):
        assert [problem_of(words) for words in shell_commands(f"```bash\n{command}\n```\n")] != [None]
    inline = "`engine/nothing.py` and `runs/demo/` and `summary.json`"
    fenced = "```bash\nridgeline serve -c deploy/nothing.yaml\n```\n"
    assert named_paths(f"{inline}\n{fenced}") == {"engine/nothing.py", "deploy/nothing.yaml"}
