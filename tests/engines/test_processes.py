"""`ridgeline serve` as its operator sees it: start, Ctrl-C, and what is left when something is killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

Figure = Callable[[str], None]
pytestmark = pytest.mark.engines

REPOSITORY = Path(__file__).parents[2]
RIDGELINE = Path(sys.executable).parent / "ridgeline"
START_WITHIN_S = 180.0
GONE_WITHIN_S = 15.0
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Small helpers of Ray that look for their raylet only now and then: they end by themselves within about a minute."""
ONE_REPLICA = ("--mode", "colocated", "--set", "pools.colocated.workers=1")


@dataclass(frozen=True)
class Worker:
    """A row of the printed table."""

    pool: str
    actor_pid: int
    engine_pids: tuple[int, ...]

    @property
    def engine_pid(self) -> int:
        """The engine process; its ranks, if it is split, are its children."""
        return next(pid for pid in self.engine_pids if psutil.Process(pid).ppid() == self.actor_pid)


class Serve:
    """One `ridgeline serve` process and what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self) -> str:
        """Returns the URL."""
        deadline_s = time.monotonic() + START_WITHIN_S
        while time.monotonic() < deadline_s:
            found = re.search(r"^ready: (http://\S+)/v1", self.output, re.MULTILINE)
            if found:
                return found[1]
            assert self.process.poll() is None, self.output
            time.sleep(0.1)
        raise AssertionError(f"not ready within {START_WITHIN_S:.0f} s:\n{self.output}")

    def table(self) -> dict[str, Worker]:
        """What runs where, as printed."""
        rows = {}
        for line in self.lines:
            cells = [cell.strip() for cell in line.strip("│ ").split("│")]
            if len(cells) == 9:
                rows[cells[0]] = Worker(cells[1], int(cells[4]), tuple(map(int, cells[5].split(","))))
        return rows

    def wait_exit(self, within_s: float) -> int:
        status = self.process.wait(within_s)
        self._reader.join(5)
        return status


@contextmanager
def serving(*arguments: str) -> Iterator[Serve]:
    """`ridgeline serve` on the shipped configuration; whatever the test did, nothing of it runs afterwards."""
    command = [str(RIDGELINE), "serve", "-c", "deploy/local.yaml", "--port", "0", *arguments]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "250", "NO_COLOR": "1"},
        start_new_session=True,
    )
    serve = Serve(process)
    family: list[psutil.Process] = []
    try:
        yield serve
    finally:
        if process.poll() is None:
            family = descendants(process.pid)
            process.kill()
        process.wait(10)
        for member in family:
            if member.is_running():
                member.kill()
        assert process.stdout is not None
        serve._reader.join(5)
        process.stdout.close()


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def still_there(processes: list[psutil.Process], within_s: float) -> list[str]:
    """Names of those that have not ended by then. A zombie that nobody collects has ended."""
    deadline_s = time.monotonic() + within_s
    while True:
        alive = [process for process in processes if _alive(process)]
        if not alive or time.monotonic() > deadline_s:
            return [f"{process.pid} {_name(process)}" for process in alive]
        time.sleep(0.1)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80]
    except psutil.NoSuchProcess:
        return "gone just now"


def body(num_tokens: int) -> dict[str, object]:
    return {"model": "smollm2-135m", "prompt": "The light of the sun", "max_tokens": num_tokens, "ignore_eos": True}


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


def test_after_sigkill_of_an_engine_serve_names_its_worker_and_leaves_no_process(figure: Figure):
    with serving(*ONE_REPLICA) as serve:
        serve.wait_ready()
        family = descendants(serve.process.pid)
        killed_s = time.monotonic()
        os.kill(serve.table()["colocated-0"].engine_pid, signal.SIGKILL)
        assert serve.wait_exit(GONE_WITHIN_S + 30) != 0
        figure(f"serve ended {time.monotonic() - killed_s:.1f} s after the kill: {serve.lines[-1]}")
        assert re.search(r"error: .*colocated-0.*", serve.output), serve.output
        assert "Traceback" not in serve.output
        assert still_there(family, GONE_WITHIN_S) == []


def test_replicas_serve_and_after_sigkill_of_a_worker_serve_names_it_and_leaves_no_process(figure: Figure):
    with serving("--mode", "colocated") as serve:
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
        assert serve.wait_exit(GONE_WITHIN_S + 30) != 0
        figure(f"serve ended {time.monotonic() - killed_s:.1f} s after the kill: {serve.lines[-1]}")
        assert re.search(r"error: .*colocated-1.*", serve.output), serve.output
        assert "Traceback" not in serve.output
        assert still_there(family, GONE_WITHIN_S) == []


def test_after_sigkill_of_serve_itself_no_process_stays():
    with serving(*ONE_REPLICA) as serve:
        serve.wait_ready()
        family = [process for process in descendants(serve.process.pid) if not _name(process).startswith(RAYS_OWN)]
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
