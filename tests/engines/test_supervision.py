"""Workers and the router are killed, stopped and sent away; what should come back does, and the server goes on.

One `ridgeline serve` with a prefill worker and two decode workers for all of these tests, which follow one another.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from statistics import median

import httpx
import psutil
import pytest
from rich.console import Console

from ridgeline.cluster.commands.operators import drain
from ridgeline.cluster.config.models import SupervisionConfig
from tests.engines.serve_process import GONE_WITHIN_S, REPOSITORY, RIDGELINE, body, still_there
from tests.engines.served import SMALL_SPLIT, Deployed, Stream, deployed_by_serve
from tests.support.patience import in_the_end
from tests.support.symptoms import is_quoted

Figure = Callable[[str], None]
pytestmark = pytest.mark.engines


DRAIN_S = 120
"""On a busy machine the last stream takes longer than the shipped 30 s."""


@pytest.fixture(scope="module")
def deployed(small_model: dict[str, str]) -> Iterator[Deployed]:
    settings = {**SMALL_SPLIT, **small_model, "server.drain_timeout_s": str(DRAIN_S)}
    with deployed_by_serve("--prefill", "1", "--decode", "2", settings=settings) as one:
        yield one


@pytest.mark.core
def test_a_killed_actor_and_a_killed_engine_of_two_pools_come_back_and_pair_again(deployed: Deployed, figure: Figure):
    before = deployed.workers()
    old_engine = deployed.engine("worker-1")
    psutil.Process(before["worker-1"]["pid"]).kill()
    deployed.engine("worker-0").kill()
    figure(deployed.back("worker-1"))
    figure(deployed.back("worker-0"))
    printed = " ".join(deployed.serve.output.split())
    assert is_quoted(printed)
    assert "worker-1 is gone (its process ended); restarting" in printed
    assert re.search(
        r"worker-0 is gone \(its engine process was ended by SIGKILL .*; its output is in (\S+)\)", printed
    )
    assert still_there([old_engine], 0) == []
    after = deployed.workers()
    assert after.keys() == before.keys()
    assert all(after[name]["incarnation"] != before[name]["incarnation"] for name in ("worker-1", "worker-0"))
    assert after["worker-2"] | {"stalled_s": 0} == before["worker-2"] | {"stalled_s": 0}
    metrics = deployed.metrics()
    assert metrics.sum("ridgeline_worker_restarts_total", worker="worker-1", reason="actor_died") == 1
    assert metrics.sum("ridgeline_worker_restarts_total", worker="worker-0", reason="engine_died") == 1
    assert metrics.sum("ridgeline_kv_pair") == 4, "either way"
    deployed.completes()


PAUSE_S = 2.0
LOADED_STEPS = 30
"""On a slow or busy machine: the pause may last this many of the stream's own steps."""
MOVED_TOKENS = 100
"""On a fast machine a third of a second, in which two processes that are known by then are killed."""


@pytest.mark.proves("greedy answers, whole and streamed", "after a lost worker")
def test_without_any_decode_worker_a_stream_goes_on_at_once_on_the_prefill_worker(deployed: Deployed, figure: Figure):
    greedy = {**body(MOVED_TOKENS), "temperature": 0}
    whole = httpx.post(f"{deployed.url}/v1/completions", json=greedy, timeout=120).json()["choices"][0]["text"]
    engines = [deployed.engine(worker) for worker in ("worker-1", "worker-2")]
    stream = Stream(deployed.url, MOVED_TOKENS, temperature=0)
    for engine in engines:
        engine.kill()
    killed_s = time.monotonic()
    text, gaps_s = stream.text(), stream.gaps_s(killed_s)
    figure(f"longest gap after the last decode worker was killed {max(gaps_s):.2f} s, median {median(gaps_s):.3f} s")
    for worker in ("worker-1", "worker-2"):
        figure(deployed.back(worker))
    assert text == whole
    assert max(gaps_s) <= max(PAUSE_S, LOADED_STEPS * median(gaps_s))
    deployed.completes()


STALL_TIMEOUT_S = SupervisionConfig().stall_timeout_s
"""An engine that does nothing is found by its own steps, long before."""
STALLED_TOKENS = 150
"""Half a second of them on a fast machine: the engine that makes them is found and stopped some milliseconds later."""


def test_an_engine_that_stands_still_with_a_request_is_replaced(deployed: Deployed, figure: Figure):
    stream = Stream(deployed.url, STALLED_TOKENS)
    busy = deployed.busy_decode()
    engine = deployed.engine(busy)
    engine.suspend()
    stopped_s = time.monotonic()
    deployed.serve.wait_said(f"{busy} is gone .its engine has work and makes no step", STALL_TIMEOUT_S / 2)
    figure(f"found {time.monotonic() - stopped_s:.1f} s after the stop")
    figure(deployed.back(busy))
    assert still_there([engine], 0) == []
    assert stream.end()[-1] == "data: [DONE]"
    assert any(f'"completion_tokens":{STALLED_TOKENS}' in line for line in stream.lines[-3:]), stream.lines[-3:]
    assert deployed.metrics().sum("ridgeline_worker_restarts_total", worker=busy, reason="stalled") == 1
    deployed.completes()


def engine_pids(deployed: Deployed) -> list[int]:
    return [deployed.engine(name).pid for name in deployed.workers()]


def test_a_killed_router_is_back_on_its_port_and_the_engines_have_not_moved(deployed: Deployed, figure: Figure):
    stream = Stream(deployed.url)
    before, engines = deployed.workers(), engine_pids(deployed)
    deployed.router().kill()
    killed_s = time.monotonic()
    assert stream.end()[-1].startswith("broken")
    deployed.serve.wait_said("router is gone .its process ended", 30)
    line = deployed.back("router")
    figure(f"{line}; {time.monotonic() - killed_s:.1f} s after the kill")
    after = deployed.workers()
    identity = ("worker", "incarnation", "pid")
    assert [[row[key] for key in identity] for row in after.values()] == [
        [row[key] for key in identity] for row in before.values()
    ]
    assert engine_pids(deployed) == engines
    deployed.completes()
    metrics = deployed.metrics()
    assert metrics.sum("ridgeline_tasks") == 0, "what the dead router had asked for is aborted"
    assert metrics.sum("ridgeline_kv_pair") == 4, "either way"


def test_a_router_told_to_end_tells_its_clients_why_and_comes_back(deployed: Deployed, figure: Figure):
    stream = Stream(deployed.url)
    deployed.router().terminate()
    lines = stream.end()
    assert any("the router is shutting down" in line for line in lines[-2:]), lines[-3:]
    figure(deployed.back("router"))
    deployed.completes()


PAUSED_TOKENS = 40
PAUSED_STREAMS = 2
PAUSED_S = 120.0
AFTER_S = 45.0
"""As long as a judgement of what was asked before the pause, and one of what is asked right after it, could take."""


def processes(deployed: Deployed) -> set[tuple[int, float]]:
    """The router, the workers and their engines, each by pid and start time."""
    workers = [psutil.Process(row["pid"]) for row in deployed.workers().values()]
    engines = [deployed.engine(name) for name in deployed.workers()]
    return {(one.pid, one.create_time()) for one in (deployed.router(), *workers, *engines)}


@pytest.mark.long
def test_while_the_driver_stands_still_and_when_it_goes_on_no_worker_and_no_stream_ends(
    deployed: Deployed, figure: Figure
):
    """As under `docker pause`, Ctrl-Z or swap: it must blame nobody else for that."""
    greedy = {**body(PAUSED_TOKENS), "temperature": 0}
    whole = httpx.post(f"{deployed.url}/v1/completions", json=greedy, timeout=120).json()["choices"][0]["text"]
    before, said = processes(deployed), len(deployed.serve.lines)
    over_s = time.monotonic() + PAUSED_S + AFTER_S

    def one_after_the_other(_: int) -> list[Stream]:
        streams: list[Stream] = []
        while time.monotonic() < over_s:
            streams.append(Stream(deployed.url, PAUSED_TOKENS, temperature=0))
            streams[-1].end()
        return streams

    with ThreadPoolExecutor(PAUSED_STREAMS) as pool:
        load = [pool.submit(one_after_the_other, number) for number in range(PAUSED_STREAMS)]
        deployed.serve.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(PAUSED_S)
        finally:
            deployed.serve.process.send_signal(signal.SIGCONT)
        streams = [stream for one in load for stream in one.result()]
    assert [line for line in deployed.serve.lines[said:] if "gone" in line] == []
    assert processes(deployed) == before
    assert {stream.end()[-1] for stream in streams} == {"data: [DONE]"}
    assert {stream.text() for stream in streams} == {whole}, "no token is lost or wrong"
    figure(
        f"{len(streams)} streams of {PAUSED_TOKENS} tokens while the driver stood still for {PAUSED_S:.0f} s, and after"
    )
    deployed.completes()


DRAINED_TOKENS = 150
"""Half a second of them on a fast machine: the drain is asked for some milliseconds after the first ones."""


def drained(url: str, worker: str) -> str:
    """What `ridgeline drain` says of a worker that is to leave at once; without the seconds its process takes to start,
    in which a fast machine would end the stream."""
    said = StringIO()
    console = Console(file=said, width=200)
    asyncio.run(drain(url, worker, 0.0, force=False, admin_key_file=None, console=console))
    return said.getvalue()


def ridgeline_drain(url: str, worker: str, *arguments: str) -> tuple[int, str]:
    command = [str(RIDGELINE), "drain", worker, "--url", url, *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.core
def test_a_worker_that_is_drained_gives_its_request_to_another_and_leaves_for_good(deployed: Deployed, figure: Figure):
    stream = Stream(deployed.url, DRAINED_TOKENS)
    busy = deployed.busy_decode()
    other = {"worker-1": "worker-2", "worker-2": "worker-1"}[busy]
    processes = [deployed.engine(busy), psutil.Process(deployed.workers()[busy]["pid"])]
    began_s = time.monotonic()
    said = drained(deployed.url, busy)
    figure(f"drained in {time.monotonic() - began_s:.1f} s")
    assert said.splitlines()[-1] == f"{busy} (decode) is gone", said
    assert stream.end()[-1] == "data: [DONE]"
    assert [event for event in stream.events() if "error" in event] == []  # a sampled text may well hold the word
    assert any(f'"completion_tokens":{DRAINED_TOKENS}' in line for line in stream.lines[-3:]), stream.lines[-3:]
    assert deployed.metrics().sum("ridgeline_retries_total", state="decoding", cause="draining") == 1
    assert still_there(processes, GONE_WITHIN_S) == []
    deployed.serve.wait_said(f"{busy} has drained and is gone", GONE_WITHIN_S)
    in_the_end(lambda: busy not in deployed.workers())
    status, said = ridgeline_drain(deployed.url, other)
    assert status != 0
    assert f"{other} is the last decode worker" in said
    status, said = ridgeline_drain(deployed.url, "decode-1")
    assert status != 0
    assert re.search(r"no worker decode-1; there are: worker-0 .prefill., ", said.replace("\n", " "))
    deployed.completes()


def test_sigterm_to_a_worker_drains_it(deployed: Deployed):
    processes = [deployed.engine("worker-0"), psutil.Process(deployed.workers()["worker-0"]["pid"])]
    losses = deployed.serve.output.count("worker-0 is gone (")
    processes[1].terminate()
    deployed.serve.wait_said("worker-0 has drained and is gone", 30)
    assert still_there(processes, GONE_WITHIN_S) == []
    in_the_end(lambda: "worker-0" not in deployed.workers())
    assert deployed.serve.output.count("worker-0 is gone (") == losses, "it was taken for lost"
    deployed.completes()


LAST_TOKENS = 200
"""On a fast machine a third of a second, in which a new request is refused; on a slow one less than a drain's time."""


def refusal(url: str) -> str:
    """What a new request is told once the server drains."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        response = httpx.post(f"{url}/v1/completions", json=body(1), timeout=30)
        if response.status_code == 503:
            return response.text
    raise AssertionError("still accepted 30 s after Ctrl-C")


def test_ctrl_c_lets_a_running_stream_end_and_leaves_no_process(deployed: Deployed):
    serve = deployed.serve
    family = serve.family()
    stream = Stream(deployed.url, LAST_TOKENS)
    os.kill(serve.process.pid, signal.SIGINT)
    assert "shutting down" in refusal(deployed.url)
    lines = stream.end()
    assert lines[-1] == "data: [DONE]", "the stream was cut off"
    assert any(f'"completion_tokens":{LAST_TOKENS}' in line for line in lines[-3:]), lines[-3:]
    assert serve.wait_exit(DRAIN_S) == 0, serve.output
    assert serve.lines[-1] == "stopped"
    assert not re.search("Traceback|cut off", serve.output), serve.output
    assert still_there(family, GONE_WITHIN_S) == []
