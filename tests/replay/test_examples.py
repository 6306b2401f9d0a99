"""The scripts in examples/ run; those that start engines are in `tests/engines/test_examples.py`."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from ridgeline.loadtest.compare import compare
from ridgeline.loadtest.plan import ComparePlan
from tests.support.openai_server import Behaviour, Ready, running

REPOSITORY = Path(__file__).parents[2]
WITHIN_S = 120


def example(name, *arguments):
    """What the script prints."""
    command = [sys.executable, REPOSITORY / "examples" / name, *arguments]
    ran = subprocess.run(
        command, env=os.environ | {"COLUMNS": "200"}, text=True, capture_output=True, check=False, timeout=WITHIN_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_an_answer_streams_to_the_openai_client(url):
    said = example("stream_openai.py", "--url", url, "--max-tokens", "5", "w1 w2 w3")
    words, times = said.splitlines()
    assert set(words.split()) <= {f"w{number}" for number in range(200)}
    assert re.fullmatch(r"TTFT \d+ ms, then \d+\.\d ms", times)


def test_a_trace_is_replayed_and_its_figures_are_used(url):
    said = example("replay_trace.py", "--url", url, "--trace", "poisson:rate=10,input=40,output=4,n=6,seed=1")
    assert "6 of 6 requests completed" in said
    assert re.search(r"attainment of TTFT <= 2000 ms and TPOT <= 100 ms: [1-9]\d*%, goodput \d+\.\d\d requests/s", said)
    assert re.search(r"slowest TTFT: request \d, 40 tokens in", said)


async def test_a_comparison_is_read_as_a_table(tmp_path, plain_tokens):
    plan = ComparePlan(
        trace="poisson:rate=50,input=40,output=6,n=6,seed=1",
        variants="colocated,colocated",
        rate=50,
        settle_s=0.02,
        tokenizer="unused",
        slo_ttft_ms=200_000,
        pairs=1,
    )
    with running(Behaviour(ttft_s=0.01, tpot_s=0.001, mode="colocated")) as server:
        await compare((Ready(server), Ready(server)), plan, tmp_path, Console(quiet=True), is_alone=False)
    said = example("compare_modes.py", "--read", tmp_path)
    assert len(re.findall(r"┆ 6 +┆ 0 +┆ 1\.000 +┆ 0\.\d+ +┆ \d+\.\d+ +┆ \d+\.\d+", said)) == 2
    assert "Nothing is concluded from 1 pair" in said


def test_a_policy_is_tried_before_any_engine_runs():
    theirs, ours = (
        float(found) for found in re.findall(r"P95 TTFT of short prompts (\d+) ms", example("routing_policy.py"))
    )
    assert ours < theirs / 2


def test_every_example_is_run_by_a_test():
    tests = (Path(__file__).read_text(), (REPOSITORY / "tests" / "engines" / "test_examples.py").read_text())
    names = [path.name for path in (REPOSITORY / "examples").glob("*.py")]
    assert len(names) == 5
    assert [name for name in names if not any(f'"{name}"' in text for text in tests)] == []
