"""`ridgeline bench transfer`: what it prints, writes and refuses; `tests/conformance/test_kv_measure.py` measures."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

import ridgeline.cluster.commands.bench
from ridgeline.cluster.cli import app
from ridgeline.cluster.commands.bench import render
from ridgeline.kv_transfer.measure import MeasureError, MeasureReport, MeasureSettings, TransferFigures


def some_report(settings=None, **changes):
    rows = [TransferFigures(name, 39_813_120, [0.04, 0.05, 0.06], [0.08, 0.08, 0.08]) for name in ("shm", "grpc")]
    memcpy = TransferFigures("memcpy", 39_813_120, [0.005], [0.005])
    fields = {"settings": settings or MeasureSettings(), "cores": (0, 1), "figures": (*rows, memcpy)}
    return MeasureReport(**(fields | {"refused": {}} | changes))


@pytest.fixture
def bench(monkeypatch):
    """Run the command with a measurement that takes no time; (exit status, stdout, stderr in one line, settings)."""
    asked = []

    def measured(settings, on_progress):
        on_progress("starting the source process")
        asked.append(settings)
        return some_report(settings)

    monkeypatch.setattr(ridgeline.cluster.commands.bench, "measure", measured)

    def run(*args):
        asked.clear()
        result = CliRunner().invoke(app, ["bench", "transfer", *map(str, args)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, " ".join(result.stderr.split()), list(asked)

    return run


def test_the_table_has_a_row_for_each_transport_and_one_for_memcpy():
    out = io.StringIO()
    Console(file=out, width=100).print(render(some_report()))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["shm", "grpc", "memcpy"]
    assert rows[0] == ["shm", "0.80", "10%", "50.0", "58.0", "2.01"]
    assert rows[-1][1] == "7.96"
    title = " ".join(out.getvalue().partition("┏")[0].split())
    assert title.startswith("39.8 MB per hand-off: 54 scattered blocks of 32 tokens, 30 layers of 24576 bytes")
    assert title.endswith("20 rounds, cores 0 and 1")


def test_options_become_settings_and_json_is_written(bench, tmp_path):
    file = tmp_path / "new" / "figures.json"
    status, shown, _, (settings,) = bench(
        *("--tokens", 100, "--layers", 12, "--block-bytes", 49152, "--rounds", 4, "--json", file),
        *("--transport", "grpc", "--transport", "shm", "--transport", "grpc"),
    )
    assert status == 0
    assert settings == MeasureSettings(
        tokens=100,
        layers=12,
        block_bytes=49152,
        rounds=4,
        transports=("grpc", "shm"),
    )
    assert "starting the source process" in shown
    assert "figures.json" in "".join(shown.split())
    told = json.loads(file.read_text(encoding="utf-8"))
    assert [row["transport"] for row in told["figures"]] == ["shm", "grpc", "memcpy"]
    assert told["settings"]["block_bytes"] == 49152


def test_every_problem_is_told_before_anything_starts(bench):
    status, _, error, asked = bench("--tokens", 0, "--transport", "tcp", "--json", "/proc/none/x.json")
    assert (status, error.count("error:"), asked) == (2, 3, [])
    assert all(part in error for part in ("tokens", "'tcp'", "/proc/none/x.json"))


def test_a_measurement_that_fails_ends_with_a_sentence(bench, monkeypatch):
    def failed(settings, on_progress):
        raise MeasureError("the source process ended [exit status 1]")

    monkeypatch.setattr(ridgeline.cluster.commands.bench, "measure", failed)
    assert bench()[::2] == (1, "error: the source process ended [exit status 1]")


def test_a_transport_that_does_not_work_here_is_named_beside_the_figures_of_the_others(bench, monkeypatch):
    report = some_report(refused={"shm": "it is on another host [x]"})
    monkeypatch.setattr(ridgeline.cluster.commands.bench, "measure", lambda settings, on_progress: report)
    status, shown, _, _ = bench()
    assert status == 0
    assert "shm: it is on another host [x]" in " ".join(shown.split())
