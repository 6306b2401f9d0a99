"""Comparisons of servers that run already, by the command as a shell would call it, and with which ones it refuses."""

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from ridgeline.cluster.commands import own_variants as own_variants_module
from ridgeline.cluster.commands.loadtest import compare_command, resume_command
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.model_store import prepare_model
from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.preparation import prepare
from ridgeline.loadtest.run.machine import serving_processes
from ridgeline.loadtest.run.server import KEY_VARIABLE, ModelCard, Servers
from ridgeline.loadtest.run.server_facts import ServerFacts
from ridgeline.loadtest.running_server import RunningServer, key_variable_of, note_models, running_servers
from ridgeline.loadtest.variants import Devices, Reached
from tests.support.http_server import listening
from tests.support.openai_server import Behaviour, running
from tests.support.patience import PATIENCE_S, eventually, in_the_end
from tests.support.summary_schema import schema_problems

RIDGELINE = Path(sys.executable).parent / "ridgeline"
WITHIN_S = 4 * PATIENCE_S
REQUESTS = 6
OPTIONS = ("--trace", f"poisson:rate=50,input=40,output=6,n={REQUESTS},seed=1", "--rate", "50", "--settle-s", "0.02")
PROBE, WARM_UP = 1, 4
LISTEN = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"


def compared(*options: object, **environment: str) -> str:
    """What the command prints."""
    ran = subprocess.run(
        [str(RIDGELINE), "compare", *map(str, options)],
        env=os.environ | {"COLUMNS": "200"} | environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return str(prepare_model("smollm2-135m"))


@pytest.fixture
def fast(tokenizer):
    def behaviour(**fields) -> Behaviour:
        return Behaviour(**{"ttft_s": 0.01, "tpot_s": 0.001, "has_metrics": False, "tokenizer": tokenizer} | fields)

    return behaviour


def test_two_running_servers_are_compared_without_a_deployment_of_ours(tmp_path, fast):
    one = fast(key="mine", resets_cache=True)
    two = [fast(key="shared", model="llama", max_model_len=4096) for _ in range(2)]
    with running(one) as url, running(two[0]) as first, running(two[1]) as second:
        said = compared(
            *("--server", f"one={url}/v1", "--server", f"two={first},{second}", "--pairs", 2, *OPTIONS),
            *("--devices", "one=2", "--devices", "two=2", "--out", tmp_path / "run"),
            RIDGELINE_API_KEY="shared",
            RIDGELINE_API_KEY_ONE="mine",
        )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert schema_problems(summary) == []
    assert [(each["label"], each["mode"]) for each in summary["variants"].values()] == [("one", "one"), ("two", "two")]
    assert [each["per_device"]["devices"] for each in summary["variants"].values()] == [2, 2]
    assert summary["setup"]["configuration"] is None
    assert [each["completed"] for each in summary["rounds"]] == [REQUESTS] * len(summary["rounds"])

    rounds = {side: sum(each["variant"] == side for each in summary["rounds"]) for side in "ab"}
    assert one.cache_resets == 2 + rounds["a"], "at the check, before the first request, and before each round"
    assert len(one.bodies) == PROBE + WARM_UP + REQUESTS * rounds["a"]
    assert [len(each.bodies) for each in two] == [PROBE + WARM_UP + REQUESTS // 2 * rounds["b"]] * 2
    prompts = [tuple(prompt) for each in (one, *two) for prompt in each.prompts[PROBE:]]
    assert len(set(prompts)) == len(prompts), "no prompt is sent twice"
    assert {slo for each in (one, *two) for slo in each.slos} == {None}

    notes = " ".join(summary["load"]["notes"])
    for told in (
        f"two: model 'llama' at {first}, {second}, which get the requests in turn",
        "the prefix cache of one is emptied before each round",
        "contexts, in tokens: one 8192, two 4096",
    ):
        assert said.replace("\n", " ").count(told) == 1
        assert told in notes
    assert "one against two" in (tmp_path / "run" / "report.html").read_text()


async def test_an_interrupted_comparison_of_running_servers_goes_on_without_a_configuration(
    tmp_path, fast, monkeypatch
):
    monkeypatch.setattr("ridgeline.loadtest.valid_rounds.discard_reasons", lambda *_: ())
    monkeypatch.setattr("ridgeline.cluster.commands.loadtest.busy_note", lambda: "others work here")
    folder, console, servers = tmp_path / "run", Console(file=io.StringIO(), width=1000), (fast(), fast())
    first_round = PROBE + WARM_UP + REQUESTS
    with running(servers[0]) as one, running(servers[1]) as two:
        plan = ComparePlan(server=[f"one={one}", f"two={two}"], trace=OPTIONS[1], rate=50, pairs=2, settle_s=0.02)
        for each in servers:
            each.faults = dict.fromkeys(range(first_round + 2, first_round + REQUESTS), "hang")
        task = asyncio.create_task(compare_command(None, plan, folder, console))
        await eventually(lambda: any(len(each.bodies) > first_round + 3 for each in servers))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert console.file.getvalue().count("others work here") == 1
        for each in servers:
            each.faults = {}
        await resume_command(folder, ComparePlan(), None, console)
    summary = json.loads((folder / "summary.json").read_text())
    assert [each["round"] for each in summary["rounds"]] == [0, 1, 3, 4], "round 2 was cut, and is run again"
    assert {each["label"] for each in summary["rounds"]} == {"one", "two"}
    assert len(summary["interruptions"]) == 1


def running_server(*urls: str, **fields) -> tuple[RunningServer, ComparePlan]:
    plan = ComparePlan(server=[f"vllm={','.join(urls)}", "other=http://127.0.0.1:9"], **fields)
    return running_servers(plan)[0], plan


async def test_a_server_that_cannot_be_compared_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    async def refused(*urls: str, **fields) -> str:
        server, plan = running_server(*urls, **fields)
        with pytest.raises(ServerError) as caught:
            await server.check(plan)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no OpenAI-compatible server answers at http://127.0.0.1:9" in await refused("http://127.0.0.1:9")
    async with listening(Starlette(routes=[]), log_level="critical") as url:
        assert "GET /v1/models gets HTTP 404" in await refused(url)
    page = Starlette(routes=[Route("/{path:path}", lambda _: HTMLResponse("<h1>It works</h1>"))])
    async with listening(page, log_level="critical") as url:
        assert "GET /v1/models gets no list of models" in await refused(url)
    with running(Behaviour(key="secret")) as url:
        every = f"asks for an API key: set RIDGELINE_API_KEY_VLLM, or {KEY_VARIABLE} for all servers, to one that"
        assert every in await refused(url)
        monkeypatch.setenv("RIDGELINE_API_KEY_VLLM", "another")
        assert "asks for an API key: set RIDGELINE_API_KEY_VLLM to one that" in await refused(url)
    with running(Behaviour()) as url:
        assert "does not serve 'big'; it serves fake" in await refused(url, served_model_name="big")
    with running(Behaviour(faults={0: "refuse"})) as url:
        assert "does not answer as a comparison needs it (completions): HTTP 503" in await refused(url)
    with running(Behaviour(model="llama")) as url, running(Behaviour(model="qwen")) as other:
        assert "the servers of vllm are one variant and must have one model; they serve llama and qwen" in (
            await refused(url, other)
        )


async def test_a_cache_that_is_not_emptied_any_more_ends_the_comparison():
    behaviour = Behaviour(resets_cache=True)
    with running(behaviour) as url:
        server, plan = running_server(url)
        await server.check(plan)
        assert (await server.ready()).is_fresh
        assert not (await server.ready()).is_fresh
        behaviour.resets_cache = False
        with pytest.raises(ServerError, match="vllm has not emptied its prefix cache"):
            await server.ready()


def test_a_key_may_be_a_servers_own(monkeypatch):
    monkeypatch.delenv("RIDGELINE_API_KEY_VLLM_1", raising=False)
    assert key_variable_of("vllm 1") == KEY_VARIABLE
    monkeypatch.setenv("RIDGELINE_API_KEY_VLLM_1", "own")
    assert key_variable_of("vllm 1") == "RIDGELINE_API_KEY_VLLM_1"


async def test_the_first_server_is_measured_with_its_own_key(fast, monkeypatch):
    monkeypatch.setenv("RIDGELINE_API_KEY_VLLM", "own")
    with running(fast(key="own")) as url:
        server, plan = running_server(url, trace=OPTIONS[1], settle_s=0.02)
        settled = await prepare(server, plan, Console(quiet=True), None, (), time.monotonic())
    assert settled.load.unloaded is not None


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (ModelCard("served", "/models/Llama-3"), 0),
        (ModelCard("llama-3", None), 0),
        (ModelCard("meta/llama-3", None), 0),
        (ModelCard("qwen", "/models/qwen"), 1),
        (ModelCard("llama-3", None, 4096), 1),
        (ModelCard("qwen", None, 4096), 2),
    ],
)
def test_another_model_or_context_is_told(other, told):
    notes = note_models({"one": ModelCard("llama", "meta/llama-3", 8192), "two": other})
    assert len(notes) == told


class _Ours:
    """A mode of an own deployment on two cores, whose server runs already."""

    mode, start_s, devices, context_tokens = "colocated", 0.0, Devices("core", 2, {}), None
    facts = ServerFacts()

    def __init__(self, url: str) -> None:
        self._url = url

    async def ready(self, why: str = "") -> Reached:
        return Reached(self._url, is_fresh=False)


async def test_a_mode_is_told_the_slos_and_a_running_server_beside_it_has_the_same_kind_of_devices(
    tmp_path, fast, monkeypatch
):
    ours, theirs = fast(mode="colocated", has_metrics=True, tokenizer=None), fast()
    with running(ours) as url, running(theirs) as other:

        @asynccontextmanager
        async def own_variants(*_):
            yield url, (_Ours(url),)

        monkeypatch.setattr(own_variants_module, "own_variants", own_variants)
        plan = ComparePlan(
            variants="colocated",
            server=[f"vllm={other}"],
            devices=["vllm=2"],
            trace=OPTIONS[1],
            rate=50,
            pairs=1,
            settle_s=0.02,
            slo_ttft_ms=200_000,
        )
        await compare_command(RidgelineConfig(), plan, tmp_path, Console(quiet=True))
    assert set(ours.slos[-REQUESTS:]) == {"200000"}, "mode adaptive goes by what came before its turn"
    assert set(theirs.slos) == {None}
    variants = json.loads((tmp_path / "summary.json").read_text())["variants"].values()
    assert [(each["per_device"]["unit"], each["per_device"]["devices"]) for each in variants] == [
        ("core", 2),
        ("core", 2),
    ]


@contextmanager
def listener(also: str = "pass") -> Iterator[tuple[int, int]]:
    """A process that listens on a port of this machine; yield its id and the port."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{LISTEN}; {also}; time.sleep(999)"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def test_processes_behind_a_proxy_serve_its_url_too_and_others_do_not():
    assert serving_processes(["http://192.0.2.1:8000"]) == frozenset(), "another machine's"
    with (
        listener() as (backend, behind),
        listener(),
        listener(f"c = socket.create_connection(('127.0.0.1', {behind}))") as (proxy, port),
        socket.create_connection(("127.0.0.1", port)),  # whoever asks the proxy does not serve
    ):
        url = f"http://127.0.0.1:{port}"
        in_the_end(lambda: serving_processes([url]) == {proxy, backend})
        assert serving_processes([f"http://localhost:{behind}"]) == {backend}


async def test_the_engines_that_are_named_serve_also_while_their_router_has_no_connection_to_them():
    with listener() as (router, port), listener() as (engine, behind):
        servers = Servers((f"http://127.0.0.1:{port}",), "KEY", engines=(f"http://127.0.0.1:{behind}",))
        assert (await RunningServer("vllm", servers, None).ready()).processes == {router, engine}


@pytest.mark.parametrize("command", ["compare", "replay"])
@pytest.mark.parametrize("out", ["a file", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_load(tmp_path, fast, command, out):
    (tmp_path / "a file").touch()
    with running(behaviour := fast()) as url:
        servers = ("--server", f"a={url}", "--server", f"b={url}") if command == "compare" else ("--url", url)
        ran = subprocess.run(
            [str(RIDGELINE), command, *servers, *OPTIONS, "--out", tmp_path / out],
            text=True,
            capture_output=True,
            check=False,
            timeout=WITHIN_S,
        )
    assert (ran.returncode, "--out" in ran.stderr + ran.stdout, "Traceback" in ran.stderr) == (1, True, False)
    assert len(behaviour.slos) <= 2 * PROBE, "those that ask whether a server answers"
