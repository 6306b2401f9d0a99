"""What `ridgeline serve` prints when it is ready, and how it ends: as the operator says, whatever the router does."""

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from ridgeline.cluster.commands.own_variants import own_variants
from ridgeline.cluster.commands.serve import StopSignals, _drain, _run, serve
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.deployments.names import DeploymentFolder, State
from ridgeline.cluster.runtime.deployment import DRAIN_ANSWER_S, Deployment, Row, limits_too_short
from ridgeline.cluster.runtime.handles.actor import ActorGone, DeploymentFailed
from ridgeline.contracts.log_lines import LoggingConfig
from ridgeline.router.fleet.pairing import KvPair
from ridgeline.router.settings import SloConfig
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly
from tests.support.patience import PATIENCE_S


class Router:
    """Answers one call as told."""

    def __init__(self, answer):
        self.answer = answer
        self.calls = []

    async def call(self, method, *args, timeout_s):
        self.calls.append((method, args, timeout_s))
        if isinstance(self.answer, Exception):
            raise self.answer
        return await self.answer if asyncio.isfuture(self.answer) else self.answer


def a_deployment(answer):
    router = Router(answer)
    return Deployment("url", [], [], [router], None, None, None), router


SILENT = DeploymentFailed("router did not finish drain within 35 s")


@pytest.mark.parametrize(
    ("answer", "left", "words"),
    [
        (0, 0, []),
        (3, 3, ["3 requests"]),
        (ActorGone("router ended while it ran drain"), None, ["the router does not answer"]),
        (SILENT, None, ["the router does not answer"]),
    ],
    ids=["all_ended", "some_left", "router_gone", "router_silent"],
)
async def test_a_drain_ends_a_few_seconds_after_its_timeout_and_what_it_left_is_told(answer, left, words):
    deployment, router = a_deployment(answer)
    assert await deployment.drain(30.0) == left
    assert router.calls == [("drain", (30.0,), 30.0 + DRAIN_ANSWER_S)]
    _, *said = await drained(answer, StopSignals())
    assert [line.startswith(word) for line, word in zip(said, words, strict=True)] == [True] * len(words)


async def drained(answer, signals):
    """What is printed."""
    console = Console(file=io.StringIO(), width=200)
    deployment, _ = a_deployment(answer)
    await _drain(deployment, 30.0, console, signals.hurry)
    return console.file.getvalue().splitlines()


async def test_the_second_signal_ends_a_drain_that_the_first_one_began():
    signals, hangs = StopSignals(), asyncio.get_running_loop().create_future()
    signals.received()
    assert (signals.stop.is_set(), signals.hurry.is_set()) == (True, False)
    draining = asyncio.create_task(drained(hangs, signals))
    await asyncio.sleep(0.01)
    assert not draining.done()
    signals.received()
    assert len(await draining) == 2
    assert hangs.cancelled()


async def test_limits_that_cannot_be_kept_are_printed_before_ready_and_kept_for_status(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    console, warning = Console(file=io.StringIO(), width=200), "router.slo.tpot_ms is 1, which nothing can keep here"
    pairs = [KvPair(prefill, "decode-0", "grpc", "not cuda-ipc: no") for prefill in ("prefill-0", "prefill-1")]
    deployment = Deployment("url", [], pairs, [Router(0)], None, None, None, [warning])
    deployment.watch = lambda say, on_away: asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def started(*_):
        yield deployment

    monkeypatch.setattr("ridgeline.cluster.commands.serve.started", started)
    signals, ready, config = StopSignals(), asyncio.Event(), RidgelineConfig()
    place = DeploymentFolder("told")
    with place.held() as held:
        running = asyncio.create_task(_run(config, console, ready, signals, held))
        await ready.wait()
        signals.received()
        await running
        state = msgspec.json.decode((place.folder / "state.json").read_bytes(), type=State)
        assert (state.phase, state.warnings) == ("draining", [warning])
        assert state.kv == ["KV goes by grpc for 2 pairs of workers (not cuda-ipc: no)"]
    lines = console.file.getvalue().splitlines()
    assert lines.index(warning) == next(number for number, line in enumerate(lines) if line.startswith("ready")) - 1


def a_full_disk():
    return Path("/dev/full").open("w")


def a_pipe_that_nobody_reads():
    """As of `ridgeline serve | tee log`, after Ctrl-C has ended tee."""
    reads, writes = os.pipe()
    os.close(reads)
    return os.fdopen(writes, "w")


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """A deployment that is none, in a home of its own; `watch` says that a worker is gone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    deployment, _ = a_deployment(0)
    deployment.url, deployment.says_on = "http://127.0.0.1:1", asyncio.Event()
    deployment.rows = [Row("worker-0", "decode", "10.0.0.1", "0", "1", "2", "10.0.0.1:5", "9", "1 s")]

    async def watch(say, on_away):
        say("worker-0 is gone (its process ended); restarting")
        deployment.says_on.set()
        await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def there(*args):
        yield deployment

    deployment.watch = watch
    for module in ("serve", "own_variants"):
        monkeypatch.setattr(f"ridgeline.cluster.commands.{module}.refuse_unfit_machine", lambda config: None)
        monkeypatch.setattr(f"ridgeline.cluster.commands.{module}.ray_runtime", there)
        monkeypatch.setattr(f"ridgeline.cluster.commands.{module}.started", there)
    return deployment


@pytest.mark.parametrize("output", [a_full_disk, a_pipe_that_nobody_reads])
async def test_what_cannot_be_printed_ends_no_deployment_and_no_drain(nothing_starts, output):
    says_on, (router,) = nothing_starts.says_on, nothing_starts.routers
    file = output()
    try:
        serving = asyncio.create_task(serve(RidgelineConfig(name="quiet"), Console(file=file)))
        watching = asyncio.create_task(says_on.wait())
        await asyncio.wait({serving, watching}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():  # else nobody would handle the signal
            os.kill(os.getpid(), signal.SIGTERM)
        await serving
    finally:
        with contextlib.suppress(OSError):
            file.close()
    assert [call[0] for call in router.calls] == ["drain"]


@pytest.mark.parametrize(
    ("limits", "answer", "warnings", "said"),
    [
        ({}, ["never asked"], [], []),
        ({"tpot_ms": 1}, ["too short"], ["too short"], ["router.slo"]),
        ({"ttft_ms": 1}, ActorGone("router ended"), [], ["router.slo", "router ended"]),
    ],
    ids=["no_limits", "too_short", "router_ends"],
)
async def test_an_idle_server_is_measured_only_for_limits_and_that_it_fails_ends_no_start(
    limits, answer, warnings, said
):
    heard = []
    assert await limits_too_short(SloConfig(**limits), Router(answer), heard.append) == warnings
    assert [part in sentence for part, sentence in zip(said, heard, strict=True)] == [True] * len(said)


async def test_as_json_every_line_that_serve_prints_is_an_object(nothing_starts, capsys):
    config = RidgelineConfig(name="machine-read", logging=LoggingConfig(format="json"))
    serving = asyncio.create_task(serve(config, Console(file=io.StringIO())))
    await asyncio.wait_for(nothing_starts.says_on.wait(), PATIENCE_S)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {(line["process"], line["level"]) for line in told} == {("serve", "info")}
    assert any(line["message"].endswith("worker-0 is gone (its process ended); restarting") for line in told)
    assert [line["message"] for line in told if line.get("worker") == "worker-0"] == ["serves"]
    assert told[-1]["message"] == "stopped"


async def test_status_lists_what_compare_has_started_while_it_runs_and_nothing_is_left_of_it(nothing_starts, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    async with own_variants(RidgelineConfig(), ("colocated",), console) as (url, _):
        command = [sys.executable, "-P", "-m", "ridgeline.cluster.cli", "status"]
        status = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        row = next(line for line in status.stdout.splitlines() if url in line)
        (name,) = os.listdir(tmp_path / "ridgeline")
        assert name.startswith("compare-")
        assert f"no answer \u2502 ?    \u2502 {url}" in row
        assert name in row
    assert os.listdir(tmp_path / "ridgeline") == []
