"""A deployment that outlives the terminal it was started in: served, listed, refused a second time, ended."""

from __future__ import annotations

import os
import pty
import secrets
import shutil
import signal
import subprocess

import httpx
import psutil
import pytest

from cluster.deployments.names import Place
from cluster.runtime.service_process.launch import PRELOADED
from tests.engines.serve_process import GONE_WITHIN_S, REPOSITORY, RIDGELINE, body, descendants, serving, still_there
from tests.engines.test_processes import ONE_REPLICA

START_WITHIN_S = 180.0


@pytest.fixture
def name():
    """A deployment's name; nothing of it is left, whatever the test did."""
    chosen = f"test-{secrets.token_hex(4)}"
    yield chosen
    if (state := Place(chosen).state()) is not None:
        family = descendants(state.pid)
        for process in (psutil.Process(state.pid), *family):
            process.kill()
    shutil.rmtree(Place(chosen).folder, ignore_errors=True)


def ridgeline(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != PRELOADED} | {"COLUMNS": "250", "NO_COLOR": "1"}
    command = [str(RIDGELINE), *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=env, text=True, check=False, capture_output=True, timeout=START_WITHIN_S, **options
    )


def test_a_detached_deployment_serves_after_its_terminal_is_gone_and_is_ended_by_name(name: str):
    serve = ("serve", "-c", "deploy/local.yaml", "--port", "0", "--name", name, *ONE_REPLICA)
    ours, terminal = pty.openpty()
    detached = ridgeline(*serve, "--detach", stdin=terminal, start_new_session=True)
    os.close(ours)
    os.close(terminal)
    assert detached.returncode == 0, detached.stdout + detached.stderr
    assert "ready: http://" in detached.stdout

    state = Place(name).state()
    assert state is not None
    answer = httpx.post(f"{state.url}/v1/completions", json=body(5), timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert state.url in ridgeline("status").stdout
    second = ridgeline(*serve)
    assert second.returncode == 1
    assert f"a deployment named {name!r} runs on this machine already (process {state.pid}" in second.stderr

    family = descendants(state.pid)
    ended = ridgeline("stop", "--name", name)
    assert ended.stdout.splitlines()[-1] == f"{name} has ended"
    assert still_there(family, GONE_WITHIN_S) == []
    assert "stopped" in ridgeline("logs", "--name", name).stdout


def test_a_terminal_that_is_closed_makes_serve_drain_and_end_without_an_error():
    with serving(*ONE_REPLICA) as serve:
        serve.wait_ready()
        family = descendants(serve.process.pid)
        os.kill(serve.process.pid, signal.SIGHUP)
        assert serve.wait_exit(60) == 0, serve.output
        assert "draining" in serve.output
        assert still_there(family, GONE_WITHIN_S) == []
