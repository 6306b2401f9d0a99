"""Deployments without a terminal: what is said of one that ends early, of none, and of one that was not detached."""

import contextlib
import http.server
import io
import os
import subprocess
import sys
import threading
import time

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from ridgeline.cluster.cli import app
from ridgeline.cluster.deployments import background
from ridgeline.cluster.deployments.names import DeploymentFolder

SERVES = """
import signal, sys, time
from ridgeline.cluster.deployments.names import DeploymentFolder
name, detached = sys.argv[1], sys.argv[2] == "detached"
signals = []  # an Event's lock may be held by the very wait that the handler interrupts
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
url = sys.argv[4]
with DeploymentFolder(name).held(detached=detached, mode="adaptive", ready_deadline_s=0.1) as held:
    if name == "begins":
        print("ready", flush=True)
        while not signals: time.sleep(0.02)
    away = {"worker-2": "in restart back-off: next try after 30 s"} if name == "limping" else {}
    warnings = ["router.slo.tpot_ms is 1, which nothing can keep here"] if name == "limping" else []
    kv = ["KV goes by grpc for 1 pair of workers (not cuda-ipc: no)"] if name == "limping" else []
    held.tell(phase="ready", url=url, warnings=warnings, kv=kv)
    held.tell(phase="ready", away=away)
    print("ready", flush=True)
    while not signals: time.sleep(0.02)
    held.tell(phase="draining")
    print("draining", flush=True)
    if sys.argv[3] == "slow":
        while len(signals) < 2: time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _a_home_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def ridgeline():
    def run(*args):
        result = CliRunner().invoke(app, list(args))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, " ".join(result.stderr.split())

    return run


@pytest.fixture
def serves():
    """Start a process that behaves like `ridgeline serve`, with its output in the log."""
    started = []

    def start(name, detached="detached", end="quick", url="http://127.0.0.1:1"):
        place = DeploymentFolder(name)
        place.folder.mkdir(parents=True)
        with place.log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVES, name, detached, end, url], stdout=log, env=os.environ.copy()
            )
        started.append(process)
        while "ready" not in place.log.read_text():
            assert process.poll() is None
        threading.Thread(target=process.wait, daemon=True).start()
        return process

    yield start
    for process in started:
        process.kill()


def test_one_that_ends_before_it_is_ready_shows_its_own_words_and_is_an_error(ridgeline, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["ridgeline", "serve", "--detach", "--set", "pools.prefill.workers=500"])
    status, output, error = ridgeline("serve", "--detach", "--set", "pools.prefill.workers=500")
    assert status == 1
    assert "error: " in output
    assert "pools.prefill" in " ".join(output.split())
    assert f"before it was ready; see {DeploymentFolder('ridgeline').log}".replace(" ", "") in error.replace(" ", "")


@pytest.mark.parametrize("option", [(), ("--detach",)])
def test_a_second_one_of_the_same_name_is_refused(ridgeline, serves, option):
    process = serves("ridgeline")
    status, _, error = ridgeline("serve", *option)
    assert status == 1
    assert f"process {process.pid}" in error
    assert "'ridgeline'" in error


def test_a_second_one_is_refused_while_the_first_does_not_hold_the_name_yet_and_leaves_its_log(ridgeline):
    place = DeploymentFolder("ridgeline")
    with place.being_detached():
        place.log.write_text("of the first\n")
        status, _, error = ridgeline("serve", "--detach")
    assert status == 1
    assert "a deployment named 'ridgeline' is being started on this machine" in error
    assert place.log.read_text() == "of the first\n"


@pytest.mark.parametrize("option", [(), ("--detach",)])
def test_a_home_that_cannot_be_written_is_one_sentence_that_names_the_fix(ridgeline, monkeypatch, tmp_path, option):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    status, _, error = ridgeline("serve", *option)
    assert status == 1
    assert "set XDG_STATE_HOME to a directory that can be written" in error


def test_status_lists_what_runs_and_says_so_if_nothing_does(ridgeline, serves):
    assert ridgeline("status")[1] == "no deployment runs on this machine\n"
    serves("one")
    serves("two", "terminal")
    _, output, _ = ridgeline("status")
    assert "its terminal" in output
    assert output.index("one") < output.index("two")


@contextlib.contextmanager
def router(status, answer, wait_s=0.0):
    """A server with this answer to GET /ready, after so long; yields its URL."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            time.sleep(wait_s)
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


READY = b'{"ready": true, "mode": "colocated", "pools": {"colocated": {"ready": true, "last_token_s_ago": 0.1}}}'
STUCK = b'{"ready": false, "mode": "disaggregated", "pools": {"decode": {"ready": false, "why": "no token for 9 s"}}}'
LEAVES = b'{"ready": false, "mode": "adaptive", "why": "the server is shutting down"}'


@pytest.mark.parametrize(
    ("status", "answer", "wait_s", "columns", "sentence"),
    [
        (200, READY, 0.0, ["ready", "colocated"], None),
        (200, READY, 1.2, ["ready", "colocated"], None),
        (503, STUCK, 0.0, ["not ready", "disaggregated"], "one: decode is not ready: no token for 9 s"),
        (503, LEAVES, 0.0, ["not ready", "adaptive"], "one: the server is shutting down"),
        (502, b"<html>", 0.0, ["no answer", "?"], None),
    ],
    ids=["ready", "slowly", "stuck", "leaves", "a proxy"],
)
def test_status_tells_mode_and_readiness_as_the_router_does_now(
    ridgeline, serves, status, answer, wait_s, columns, sentence
):
    with router(status, answer, wait_s) as url:
        serves("one", url=url)
        output = ridgeline("status")[1]
    row = next(line for line in output.splitlines() if url in line)
    assert [cell.strip() for cell in row.split("\u2502")[1:4]] == ["one", *columns]
    assert [line for line in output.splitlines() if line.startswith("one: ")] == ([sentence] if sentence else [])


def test_status_of_one_that_starts_has_the_mode_it_is_to_have(ridgeline, serves):
    serves("begins")
    (row,) = (line for line in ridgeline("status")[1].splitlines() if "starting" in line)
    assert [cell.strip() for cell in row.split("\u2502")[1:4]] == ["begins", "starting", "adaptive"]


ANSWERS = [b'["a"]', b'"ready"', b"null", b'{"router": "busy"}', b"[]", b'"\xff"', b'{"router": 1}', b"<html>"]


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_status_takes_no_other_programs_answer_at_the_port_for_a_routers(ridgeline, serves, monkeypatch, answer):
    monkeypatch.setattr(background.httpx, "get", lambda *_, **__: httpx.Response(200, content=answer))
    serves("one")
    status, output, _ = ridgeline("status")
    assert (status, "one: busy" in output, "one: " in output) == (0, b"busy" in answer, b"busy" in answer)


def test_status_shows_a_whole_url_in_a_narrow_terminal(serves):
    serves("one")
    console = Console(width=70, file=io.StringIO())
    background.status(console)
    assert "http://127.0.0.1:1 " in console.file.getvalue()


@pytest.mark.parametrize(("end", "options"), [("quick", ()), ("slow", ("--now",))])
def test_stop_returns_when_the_deployment_has_ended(ridgeline, serves, end, options):
    process = serves("ridgeline", end=end)
    status, output, _ = ridgeline("stop", *options)
    assert (status, process.wait()) == (0, 0)
    assert output.splitlines()[-1] == "ridgeline has ended"


def test_logs_prints_what_was_printed_and_follows_to_the_end(ridgeline, serves):
    process = serves("ridgeline")
    assert ridgeline("logs")[1] == "ready\n"
    stopping = threading.Timer(0.3, process.terminate)
    stopping.start()
    assert ridgeline("logs", "--follow")[1] == "ready\ndraining\n"
    stopping.join()


def test_logs_prints_also_what_is_no_text(ridgeline, serves):
    serves("ridgeline")
    with DeploymentFolder("ridgeline").log.open("ab") as log:
        log.write(b"a library says \xff\n" + "\u250f".encode()[:2])
    assert ridgeline("logs")[:2] == (0, "ready\na library says \ufffd\n\ufffd")


@pytest.mark.parametrize("detached", ["detached", "terminal"])
def test_logs_of_a_worker_are_those_beside_rays_own_and_followed_to_the_end(ridgeline, serves, tmp_path, detached):
    process, place = serves("ridgeline", detached), DeploymentFolder("ridgeline")
    (rays := tmp_path / "session" / "logs").mkdir(parents=True)
    for name in ("ridgeline-ridgeline-worker-0", "ridgeline-ridgeline-router", "ridgeline-mine-worker-1", "raylet"):
        (rays / f"{name}.log").write_text(f"{name} began\n")
    place.logs_are_in(tmp_path)
    place.logs_are_in(rays)
    assert ridgeline("logs", "--worker", "worker-0")[1] == "ridgeline-ridgeline-worker-0 began\n"
    status, _, error = ridgeline("logs", "--worker", "worker-1")
    assert (status, "but of router, worker-0" in error) == (1, True)
    assert "ray logs ridgeline-ridgeline-worker-1.log --node-ip" in error
    stopping = threading.Timer(0.3, process.terminate)
    stopping.start()
    assert ridgeline("logs", "--worker", "router", "--follow")[1] == "ridgeline-ridgeline-router began\n"
    stopping.join()
    assert ridgeline("logs", "--worker", "router")[1] == "ridgeline-ridgeline-router began\n", "also after its end"


def test_logs_of_a_worker_of_no_deployment_say_what_there_is(ridgeline, serves):
    serves("one")
    status, _, error = ridgeline("logs", "--name", "two", "--worker", "worker-0")
    assert (status, "but of nobody; these do: one" in error) == (1, True)


@pytest.mark.parametrize("command", [("logs",), ("serve", "--detach")])
def test_a_log_that_cannot_be_used_is_named(ridgeline, command):
    DeploymentFolder("ridgeline").log.mkdir(parents=True)
    status, _, error = ridgeline(*command)
    assert status == 1
    assert "serve.log" in error
    assert "XDG_STATE_HOME" in error


@pytest.mark.parametrize(
    ("detached", "command", "parts"),
    [
        ("terminal", ("logs",), ["ridgeline was not detached"]),
        ("detached", ("logs", "--name", "yours"), ["'yours'", "these do: ridgeline"]),
        ("detached", ("stop", "--name", "yours"), ["'yours'", "these do: ridgeline"]),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_is(ridgeline, serves, detached, command, parts):
    serves("ridgeline", detached)
    status, _, error = ridgeline(*command)
    assert status == 1
    assert all(part in error for part in parts)


def test_status_names_workers_that_are_lost_again_and_again_and_how_they_are_tried_again(ridgeline, serves):
    serves("one")
    serves("limping")
    status = ridgeline("status")[1]
    assert "\nlimping: worker-2 is in restart back-off: next try after 30 s\n" in status
    assert "\nlimping: KV goes by grpc for 1 pair of workers (not cuda-ipc: no)\n" in status
    assert "\nlimping: router.slo.tpot_ms is 1, which nothing can keep here\n" in status
    assert "one: " not in ridgeline("status")[1]
