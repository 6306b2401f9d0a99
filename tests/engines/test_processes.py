"""`ridgeline serve` as its operator sees it: start, Ctrl-C, and what is left when something is killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from serve_process import (
    GONE_WITHIN_S,
    RAYS_OWN,
    REPOSITORY,
    RIDGELINE,
    START_WITHIN_S,
    body,
    descendants,
    name_of,
    serving,
    still_there,
)

Figure = Callable[[str], None]
pytestmark = pytest.mark.engines

ONE_REPLICA = ("--mode", "colocated", "--set", "pools.colocated.workers=1")
NO_RESTARTS = ("--set", "supervision.max_restarts=0")


def wait_refused(url: str) -> str:
    """What a new request is told once the server drains."""
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        response = httpx.post(f"{url}/v1/completions", json=body(1), timeout=30)
        if response.status_code == 503:
            return response.text
    raise AssertionError("still accepted 5 s after Ctrl-C")


def test_ctrl_c_lets_a_running_stream_end_and_leaves_no_process():
    with serving() as serve:
        url = serve.wait_ready()
        table = serve.table()
        assert {name: worker.pool for name, worker in table.items()} == {"prefill-0": "prefill", "decode-0": "decode"}
        family = descendants(serve.process.pid)
        pids = {process.pid for process in family}
        for worker in table.values():
            assert {worker.actor_pid, worker.engine_pid} <= pids
        lines = []
        with httpx.stream("POST", f"{url}/v1/completions", json={**body(60), "stream": True}, timeout=60) as response:
            for line in filter(None, response.iter_lines()):
                lines.append(line)
                if len(lines) == 3:
                    os.kill(serve.process.pid, signal.SIGINT)
                    refusal = wait_refused(url)
        assert len(lines) == 61
        assert lines[-1] == "data: [DONE]", "the stream was cut off"
        assert "shutting down" in refusal
        assert serve.wait_exit(30) == 0, serve.output
        assert serve.lines[-1] == "stopped"
        assert not re.search("Traceback|cut off", serve.output), serve.output
        assert still_there(family, 5) == []


def test_when_the_last_worker_is_lost_too_often_serve_names_it_and_leaves_no_process(figure: Figure):
    with serving(*ONE_REPLICA, *NO_RESTARTS) as serve:
        serve.wait_ready()
        family = descendants(serve.process.pid)
        killed_s = time.monotonic()
        os.kill(serve.table()["colocated-0"].engine_pid, signal.SIGKILL)
        assert serve.wait_exit(GONE_WITHIN_S + 30) != 0
        figure(f"serve ended {time.monotonic() - killed_s:.1f} s after the kill: {serve.lines[-1]}")
        assert re.search(r"error: colocated-0 .*it was the last colocated worker", serve.output), serve.output
        assert "Traceback" not in serve.output
        assert still_there(family, GONE_WITHIN_S) == []


def test_replicas_serve_and_when_one_is_lost_for_good_the_other_goes_on(figure: Figure):
    with serving("--mode", "colocated", *NO_RESTARTS) as serve:
        url = serve.wait_ready()
        table = serve.table()
        assert {name: worker.pool for name, worker in table.items()} == {
            "colocated-0": "colocated",
            "colocated-1": "colocated",
        }
        for _ in range(2):
            reply = httpx.post(f"{url}/v1/completions", json=body(5), timeout=60).json()
            assert reply["usage"]["completion_tokens"] == 5
        metrics = httpx.get(f"{url}/metrics").text
        assert 'ridgeline_requests_total{outcome="finished",path="local"} 2.0' in metrics
        family = descendants(serve.process.pid)
        engine = psutil.Process(table["colocated-1"].engine_pid)
        killed_s = time.monotonic()
        os.kill(table["colocated-1"].actor_pid, signal.SIGKILL)
        assert still_there([engine], GONE_WITHIN_S) == []
        figure(f"its engine ended {time.monotonic() - killed_s:.1f} s after the kill")
        serve.wait_said("colocated-1 .*stays away", GONE_WITHIN_S + 30)
        reply = httpx.post(f"{url}/v1/completions", json=body(5), timeout=60).json()
        assert reply["usage"]["completion_tokens"] == 5
        os.kill(serve.process.pid, signal.SIGINT)
        assert serve.wait_exit(30) == 0, serve.output
        assert "Traceback" not in serve.output
        assert still_there(family, GONE_WITHIN_S) == []


def test_after_sigkill_of_serve_itself_no_process_stays():
    with serving(*ONE_REPLICA) as serve:
        serve.wait_ready()
        family = [process for process in descendants(serve.process.pid) if not name_of(process).startswith(RAYS_OWN)]
        (worker,) = serve.table().values()
        assert {worker.actor_pid, worker.engine_pid} <= {process.pid for process in family}
        serve.process.kill()
        assert still_there(family, GONE_WITHIN_S) == []


def test_ctrl_c_while_it_starts_leaves_no_process():
    with serving(*ONE_REPLICA) as serve:
        deadline_s = time.monotonic() + START_WITHIN_S
        while "loading the engine" not in serve.output:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        time.sleep(3)
        family = descendants(serve.process.pid)
        os.kill(serve.process.pid, signal.SIGINT)
        assert serve.wait_exit(60) == 0, serve.output
        assert "Traceback" not in serve.output
        assert still_there(family, GONE_WITHIN_S) == []


# --- what is refused before anything starts


def refused(*arguments: str) -> tuple[int, str]:
    command = [str(RIDGELINE), "serve", *arguments]
    env = {**os.environ, "COLUMNS": "250", "NO_COLOR": "1"}
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, env=env, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_port_in_use_is_one_sentence_and_nothing_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, output = refused("-c", "deploy/local.yaml", "--port", str(port))
    assert status != 0
    assert len(output.strip().splitlines()) == 1, output
    assert str(port) in output
    assert "starting" not in output


def test_an_unknown_key_names_its_line_and_nothing_starts(tmp_path: Path):
    file = tmp_path / "wrong.yaml"
    file.write_text("pools:\n  decode:\n    worker: 2\n")
    status, output = refused("-c", str(file))
    assert status != 0
    assert output.startswith("error: ")
    assert "wrong.yaml:3" in output.replace("\n", "")
    assert "pools.decode.workers" in output
