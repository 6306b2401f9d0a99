"""A deployment that outlives the terminal it was started in: served, listed, refused a second time, ended.

It is started where people stand: among modules of others' names, a company's proxies, another Ray, long paths, with a
home that cannot be written, in a locale of ASCII.
"""

from __future__ import annotations

import os
import pty
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from ridgeline.cluster.deployments.names import DeploymentFolder
from ridgeline.cluster.folders import cache_folder, state_folder
from tests.engines.serve_process import (
    GONE_WITHIN_S,
    REPOSITORY,
    RIDGELINE,
    START_WITHIN_S,
    body,
    descendants,
    still_there,
    without_parent,
    words_of,
)

pytestmark = pytest.mark.engines

NAMES = (
    *("router", "cluster", "engine", "contracts", "loadtest", "worker_runtime"),
    *("queue", "types", "random", "logging", "socket", "torch", "vllm", "ray", "numpy", "utils"),
)
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def name():
    """A deployment's name; nothing of it is left, whatever the test did."""
    chosen = f"test-{secrets.token_hex(4)}"
    yield chosen
    if (state := DeploymentFolder(chosen).state()) is not None:
        family = descendants(state.pid)
        for process in (psutil.Process(state.pid), *family):
            process.kill()
    shutil.rmtree(DeploymentFolder(chosen).folder, ignore_errors=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder whose files break whoever imports them."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported the wrong {name}')\n")
    return tmp_path


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    long_folder = tmp_path / ("x" * 90)
    long_folder.mkdir()
    nobody = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"), nobody)
    return {
        **proxies,
        **{name.upper(): nobody for name in proxies},
        "RAY_ADDRESS": "127.0.0.1:6399",
        "RAY_RUNTIME_ENV_HOOK": "no.such.hook",
        "TMPDIR": str(long_folder),
        "HOME": "/proc/none",
        "XDG_STATE_HOME": str(state_folder().parent),
        "XDG_CACHE_HOME": str(cache_folder().parent),
    }


@pytest.fixture
def ridgeline(folder: Path, shell: dict[str, str]) -> Run:
    """Run a command there."""
    in_ascii = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    environment = without_parent() | shell | in_ascii | {"COLUMNS": "250", "NO_COLOR": "1"}

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        common = {"cwd": folder, "env": environment, "text": True, "capture_output": True, "timeout": START_WITHIN_S}
        return subprocess.run([str(RIDGELINE), *arguments], check=False, **common, **options)

    return run


def test_a_detached_deployment_serves_after_its_terminal_is_gone_and_is_ended_by_name(
    name: str, ridgeline: Run, small_model: dict[str, str]
):
    config = ("-c", str(REPOSITORY / "deploy/local.yaml"))
    serve = ("serve", *config, "--port", "0", "--name", name, *words_of(small_model))
    ours, terminal = pty.openpty()
    detached = ridgeline(*serve, "--detach", stdin=terminal, start_new_session=True)
    os.close(ours)
    os.close(terminal)
    assert detached.returncode == 0, detached.stdout + detached.stderr
    assert "ready: http://" in detached.stdout

    state = DeploymentFolder(name).state()
    assert state is not None
    answer = httpx.post(f"{state.url}/v1/completions", json=body(5), timeout=120)
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert len(httpx.get(f"{state.url}/ridgeline/workers", timeout=30).json()["workers"]) == 2
    assert state.url in ridgeline("status").stdout
    top = ridgeline("top", "--url", state.url, "--count", "1", "--interval-s", "0.2")
    assert top.returncode == 0, top.stdout + top.stderr
    second = ridgeline(*serve)
    assert second.returncode == 1
    assert f"a deployment named {name!r} runs on this machine already (process {state.pid}" in second.stderr

    family = descendants(state.pid)
    ended = ridgeline("stop", "--name", name)
    assert ended.stdout.splitlines()[-1] == f"{name} has ended"
    assert still_there(family, GONE_WITHIN_S) == []
    assert "stopped" in ridgeline("logs", "--name", name).stdout
