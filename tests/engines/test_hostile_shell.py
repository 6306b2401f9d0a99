"""Where people stand when they start it: modules of others' names, a company's proxies, another Ray, long paths."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.deployments.names import Place
from cluster.runtime.service_process.launch import PRELOADED
from tests.engines.serve_process import GONE_WITHIN_S, REPOSITORY, RIDGELINE, body, descendants, serving, still_there
from tests.engines.test_detached import START_WITHIN_S

NAMES = (
    *("router", "cluster", "engine", "contracts", "loadtest", "worker_runtime"),
    *("queue", "types", "random", "logging", "socket", "torch", "vllm", "ray", "numpy", "utils"),
)
SPLIT = ("--set", "supervision.start_timeout_s=120")


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
        "TMPDIR": str(long_folder),
        "PYTHONPATH": f":{os.environ.get('PYTHONPATH', '')}" if os.environ.get("PYTHONPATH") else "",
    }


def test_serve_starts_and_answers_in_such_a_folder_and_shell(folder, shell):
    with serving(*SPLIT, folder=folder, shell=shell) as serve:
        url = serve.wait_ready()
        answer = httpx.post(f"{url}/v1/completions", json=body(5), timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert len(serve.table()) == 2
        serve.process.send_signal(2)
        assert serve.wait_exit(60) == 0, serve.output


def test_it_does_so_without_a_terminal_too(folder, shell):
    name = f"test-{secrets.token_hex(4)}"
    own = {key: value for key, value in os.environ.items() if key != PRELOADED}
    env = own | shell | {"COLUMNS": "250", "NO_COLOR": "1"}
    options = {"cwd": folder, "env": env, "text": True, "capture_output": True, "timeout": START_WITHIN_S}
    command = [
        str(RIDGELINE),
        "serve",
        "-c",
        str(REPOSITORY / "deploy/local.yaml"),
        "--port",
        "0",
        "--name",
        name,
        *SPLIT,
    ]
    try:
        started = subprocess.run([*command, "--detach"], check=False, **options)
        assert started.returncode == 0, started.stdout + started.stderr
        state = Place(name).state()
        assert state is not None
        answer = httpx.post(f"{state.url}/v1/completions", json=body(5), timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 5
        family = descendants(state.pid)
        top = subprocess.run(
            [str(RIDGELINE), "top", "--url", state.url, "--count", "1", "--interval-s", "0.2"], check=False, **options
        )
        assert top.returncode == 0, top.stdout + top.stderr
        subprocess.run([str(RIDGELINE), "stop", "--name", name], check=True, **options)
        assert still_there(family, GONE_WITHIN_S) == []
    finally:
        if (left := Place(name).state()) is not None:
            for process in (psutil.Process(left.pid), *descendants(left.pid)):
                process.kill()
        shutil.rmtree(Place(name).folder, ignore_errors=True)
