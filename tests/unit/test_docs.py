"""The documents name only what exists: files, make targets, commands and their options, metrics.

`python tests/unit/test_docs.py` writes the metrics table of docs/architecture.md anew.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from prometheus_client import CollectorRegistry, Counter, Histogram

from cluster.cli import app
from engine.messages import WorkerStatus
from router.loop_lag import LoopLag
from router.metrics import _WORKER_COUNTERS, QueueCollector, RequestMetrics, WorkerCollector
from router.pairing import KvPair
from router.settings import PoolHardware

PAIRS = [KvPair("prefill-0", "decode-0", "shm", "")]
REPOSITORY = Path(__file__).parents[2]
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
DOCUMENTS = sorted([REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *REPOSITORY.glob("docs/**/*.md")])
WRITTEN_BY_COMMANDS = {"summary.json", "records.jsonl", "report.html"}

SUFFIXES = "py|yaml|yml|sh|md|toml|json|jsonl|csv|txt|html|template"
PATH = re.compile(rf"(?:[\w.-]+/)*[\w.-]+\.(?:{SUFFIXES})|(?:[\w.-]+/)+|Makefile|LICENSE")
PATH_IN_FENCE = re.compile(rf"(?<![\w./~:-])(?:[\w.-]+/)+[\w.-]+\.(?:{SUFFIXES})\b")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\.venv/bin/)?(ridgeline|make) (.*)")
METRICS_TABLE = re.compile(r"(?<=<!-- metrics -->\n).*(?=<!-- /metrics -->)", re.DOTALL)


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
        if not words or words[0] not in found.commands:
            return f"no command {' '.join([name, *words[:1]])}"
        name = f"{name} {words[0]}"
        found, words = found.commands[words[0]], words[1:]
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if word.startswith("-") and word.partition("=")[0] not in known | {"--help"}]
    return f"{name} has no {unknown}" if unknown else None


def metric_rows() -> list[tuple[str, str, str, str]]:
    """(name as scraped, type, labels, meaning) of every series that router/metrics.py declares."""
    rows = []
    for series in vars(RequestMetrics(CollectorRegistry(), "disaggregated")).values():
        if isinstance(series, Counter | Histogram):
            suffix = "_total" if isinstance(series, Counter) else ""
            labels = ", ".join(series._labelnames)
            rows.append((series._name + suffix, series._type, labels, series._documentation))
    counters = {".".join([prefix, *labels]): 1.0 for prefix, (_, _, labels) in _WORKER_COUNTERS.items()}
    worker = SimpleNamespace(
        pool="prefill", worker_id="prefill-0", status=WorkerStatus(worker_id="prefill-0", counters=counters)
    )
    hardware = {"prefill": PoolHardware("any", 1.0, 1.0)}
    queue = SimpleNamespace(pool="prefill", waiting=1, waiting_tokens=9, tokens_per_s=9.0)
    restarts = {("decode-0", "stalled"): 1}
    workers = WorkerCollector(lambda: [worker], lambda: hardware, lambda: 0, lambda: PAIRS, lambda: restarts)
    for family in (*workers.collect(), *QueueCollector([queue]).collect(), *LoopLag().collect()):
        sample = family.samples[0]
        rows.append((sample.name, family.type, ", ".join(sample.labels), family.documentation))
    return rows


def metrics_table() -> str:
    lines = [f"| `{name}` | {kind} | {labels} | {text} |\n" for name, kind, labels, text in metric_rows()]
    return "".join(["| series | type | labels | meaning |\n", "|---|---|---|---|\n", *lines])


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def document(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_every_file_a_document_names_exists(document):
    missing = {path for path in named_paths(document.read_text()) if not (REPOSITORY / path).exists()}
    assert not missing


def test_every_link_to_a_file_leads_somewhere(document):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert not [link for link in links if not (document.parent / link).exists()]


def test_every_command_a_document_names_exists(document):
    problems = {" ".join(command): problem_of(command) for command in shell_commands(document.read_text())}
    assert not {command: problem for command, problem in problems.items() if problem}


def test_the_metrics_table_is_what_the_code_declares():
    table = METRICS_TABLE.search(ARCHITECTURE.read_text())
    assert table is not None
    assert table[0] == metrics_table(), "run `python tests/unit/test_docs.py` to write it anew"


def test_decisions_are_numbered_without_gaps_and_fit_one_page():
    pages = sorted((REPOSITORY / "docs" / "decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text()
        assert len(text.splitlines()) <= 60
        for part in ("Context", "Choice", "Consequence", "What would change it"):
            assert f"**{part}.**" in text, f"{page.name} lacks {part}"


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "ridgeline nothing",
        "ridgeline serve --nothing",
        "ridgeline compare --out runs/x --tracee demo",
        "ridgeline bench nothing",
        "ridgeline bench transfer --nothing",
    ],
)
def test_a_wrong_command_would_be_found(command):
    assert [problem_of(words) for words in shell_commands(f"```bash\n{command}\n```\n")] != [None]


def test_a_wrong_path_would_be_found():
    inline = "`engine/nothing.py` and `runs/demo/` and `summary.json`"
    fenced = "```bash\nridgeline serve -c deploy/nothing.yaml\n```\n"
    assert named_paths(f"{inline}\n{fenced}") == {"engine/nothing.py", "deploy/nothing.yaml"}


if __name__ == "__main__":
    ARCHITECTURE.write_text(METRICS_TABLE.sub(lambda _: metrics_table(), ARCHITECTURE.read_text()))
