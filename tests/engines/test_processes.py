"""`ridgeline serve` as its operator sees it: start, Ctrl-C, and what is left when something is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engines.serve_process import (
    GONE_WITHIN_S,
    RAYS_OWN,
    REPOSITORY,
    RIDGELINE,
    START_WITHIN_S,
    body,
    name_of,
    serving,
    still_there,
    words_of,
)

Figure = Callable[[str], None]
pytestmark = pytest.mark.engines

COLOCATED = ("--mode", "colocated", "--set", "pools.colocated.max_num_batched_tokens=128")
"""An engine warms up with a full step, which takes seconds with the shipped size."""
ONE_REPLICA = (*COLOCATED, "--set", "pools.colocated.workers=1")
NO_RESTARTS = ("--set", "supervision.max_restarts=0")
"""Then the first one comes after 30 s."""
AWAY_S = 30.0


def completes(url: str) -> None:
    reply = httpx.post(f"{url}/v1/completions", json=body(5), timeout=120)
    assert reply.json()["usage"]["completion_tokens"] == 5


def test_while_one_replica_is_away_the_other_goes_on_and_says_so_and_none_outlives_serve(
    small_model: dict[str, str], figure: Figure
):
    with serving(*COLOCATED, *NO_RESTARTS, *words_of(small_model), shares_parent=False) as serve:
        url = serve.wait_ready()
        table = serve.table()
        pools = {name: worker.pool for name, worker in table.items()}
        assert pools == {"worker-0": "colocated", "worker-1": "colocated"}
        completes(url)
        completes(url)
        metrics = httpx.get(f"{url}/metrics").text
        assert 'ridgeline_requests_total{outcome="finished",path="colocated"} 2.0' in metrics
        family = [process for process in serve.family() if not name_of(process).startswith(RAYS_OWN)]
        assert {table["worker-0"].actor_pid, table["worker-0"].engine_pid} <= {process.pid for process in family}
        engine = psutil.Process(table["worker-1"].engine_pid)
        killed_s = time.monotonic()
        os.kill(table["worker-1"].actor_pid, signal.SIGKILL)
        assert still_there([engine], GONE_WITHIN_S) == []
        figure(f"its engine ended {time.monotonic() - killed_s:.1f} s after the kill")
        serve.wait_said("worker-1 was lost more than 0 times .* and is tried again in 30 s", GONE_WITHIN_S + 30)
        away_s = time.monotonic() + AWAY_S
        while "away" not in (told := httpx.get(f"{url}/ready", timeout=30).json()):
            assert time.monotonic() < away_s, told
        assert told["away"]["worker-1"].startswith("in restart back-off: lost more than 0 times")
        completes(url)
        assert "Traceback" not in serve.output
        serve.process.kill()
        assert still_there(family, GONE_WITHIN_S) == []


def test_ctrl_c_while_it_starts_leaves_no_process():
    with serving(*ONE_REPLICA) as serve:
        serve.wait_said("loading the engine", START_WITHIN_S)
        time.sleep(1)
        family = serve.family()
        os.kill(serve.process.pid, signal.SIGINT)
        assert serve.wait_exit() == 0, serve.output
        assert "Traceback" not in serve.output
        assert still_there(family, GONE_WITHIN_S) == []


# --- what is refused before anything starts


def refused(*arguments: str) -> tuple[int, str]:
    command = [str(RIDGELINE), "serve", *arguments]
    env = {**os.environ, "COLUMNS": "250", "NO_COLOR": "1"}
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, env=env, check=False)
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
