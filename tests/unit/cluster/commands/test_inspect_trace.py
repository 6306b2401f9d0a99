"""`ridgeline trace inspect`: what it prints."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ridgeline.cluster.cli import app
from ridgeline.cluster.commands.inspect_trace import inspect_file

BURST = "Timestamp,Model,Request tokens,Response tokens\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace <1>.csv"
    path.write_text(f"{BURST}1,m,3,0\n5,m,10,5\n7,m,0,5\n9,m,30,6\n")
    return str(path)


def printed(name, **options) -> str:
    console = Console(file=io.StringIO(), width=140)
    inspect_file(name, options.get("tokenizer"), options.get("limit"), console)
    return console.file.getvalue()


def test_it_says_what_a_trace_is_in_a_screen(trace):
    said = printed(trace)
    assert f"{trace}: BurstGPT CSV, 2 requests" in said
    assert "arrivals: over 4 s, mean 0.25 requests/s, peak 1 in a second" in said
    assert "note: 1 of 4 requests dropped: 0 output tokens" in said
    assert "note: 1 of 4 requests dropped: 0 prompt tokens" in said
    assert len(said.splitlines()) <= 25


def test_the_command_ends_with_a_sentence_for_what_it_cannot_read(tmp_path):
    path = tmp_path / "trace"
    path.write_text(f"{BURST}1,m,x,5\n")
    result = CliRunner().invoke(app, ["trace", "inspect", str(path)])
    assert result.exit_code == 1
    assert CliRunner().invoke(app, ["trace", "inspect", "demo", "--limit", "5"]).exit_code == 0
