"""What `pip install .` has without an extra runs where nothing else is, and says what the rest needs."""

import json
import subprocess
import sys

import pytest

from tests.support.openai_server import Behaviour, running
from tests.support.patience import PATIENCE_S

WITHOUT = """
import runpy
import sys
from importlib.machinery import PathFinder

absent = sys.argv[1].split(",")
find_spec = PathFinder.find_spec


def found(name, *where):
    return None if name.partition(".")[0] in absent else find_spec(name, *where)


PathFinder.find_spec = found
command, module, *sys.argv[1:] = sys.argv[2:]
if command == "import":
    __import__(module)
else:
    sys.argv[0] = command
    runpy.run_module(module, run_name="__main__")
"""
SERVING_PART = "ray,grpc,vllm,torch,transformers,uvicorn,uvloop,setproctitle,jsonschema,xxhash,fastapi,starlette,scipy"
CLI = "ridgeline.cluster.cli"


def without_serving(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WITHOUT, SERVING_PART, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("ridgeline", CLI, "--help"),
        ("ridgeline", CLI, "roofline", "--model", "llama-3.1-8b", "--hardware", "h100-sxm"),
        ("ridgeline", CLI, "trace", "inspect", "demo"),
        ("import", "ridgeline.loadtest.compare"),
        ("import", "ridgeline.loadtest.saved"),
        ("import", "ridgeline.cluster.commands.loadtest"),
    ],
    ids=str,
)
def test_it_runs_without_what_serves(arguments):
    ended = without_serving(*arguments)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_running_servers_are_compared_and_the_run_is_reported(tmp_path):
    folder = tmp_path / "run"
    options = ("--trace", "poisson:rate=50,input=40,output=2,n=4,seed=1", "--settle-s", "0.02", "--text-prompts")
    slos = ("--rate", "50", "--pairs", "1", "--slo-ttft-ms", "200000")
    with running(Behaviour(ttft_s=0.01, tpot_s=0.001)) as one, running(Behaviour(ttft_s=0.01, tpot_s=0.001)) as two:
        servers = ("--server", f"one={one}", "--server", f"two={two}")
        ended = without_serving("ridgeline", CLI, "compare", *servers, *options, *slos, "--out", folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Nothing is concluded from" in ended.stdout
    (folder / "report.html").unlink()
    ended = without_serving("ridgeline", CLI, "report", folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "one against two" in (folder / "report.html").read_text()
    ended = without_serving("ridgeline", CLI, "report", folder, "--export", "vllm-bench")
    assert (ended.returncode, len(list((folder / "vllm-bench").iterdir()))) == (0, 2)


def test_a_replay_of_texts_needs_no_tokenizer(tmp_path):
    behaviour = Behaviour(ttft_s=0.01, tpot_s=0.001)
    with running(behaviour) as url:
        options = ("--trace", "poisson:rate=50,input=40,output=2,n=4,seed=1", "--settle-s", "0.02", "--text-prompts")
        ended = without_serving("ridgeline", CLI, "replay", "--url", url, *options, "--out", tmp_path / "run")
    assert (ended.returncode, ended.stderr) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["completed"] == 4
    assert any("approximate" in change for change in summary["trace"]["changes"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve",),
        ("compare", "--out", "never-made"),
        ("bench", "transfer"),
    ],
    ids=str,
)
def test_what_serves_is_named_with_its_extra(arguments):
    ended = without_serving("ridgeline", CLI, *arguments)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert "pip install '.[cpu]'" in ended.stderr
