"""A service in a process of its own: real processes and sockets, without Ray and without vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import psutil
import pytest

from ridgeline.cluster.runtime.processes import this_process
from ridgeline.cluster.runtime.service_process import launch
from ridgeline.cluster.runtime.service_process.calls import CallServer, ServiceClient, ServiceError, ServiceGone
from ridgeline.cluster.runtime.service_process.launch import PRELOADED, preloaded_parent, start_service
from ridgeline.contracts.log_lines import ProcessLogging
from tests.support.example_service import Example
from tests.support.patience import PATIENCE_S

SERVICE = "tests.support.example_service:Example"
BROKEN = "tests.support.example_service:Broken"


async def nothing() -> None:
    pass


@pytest.fixture
def children() -> Iterator[psutil.Process]:
    """This process; what a test has started below it ends with the test."""
    me = psutil.Process()
    before = set(me.children(recursive=True))
    yield me
    for left in set(me.children(recursive=True)) - before:
        left.kill()


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def ended(process: psutil.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while runs(process):  # noqa: ASYNC110 - there is no event for the end of somebody else's child
            await asyncio.sleep(0.01)


async def test_a_fresh_process_answers_with_the_environment_of_its_actor_and_ends_with_it(children, monkeypatch):
    monkeypatch.setenv("OF_THE_ACTOR", "here")
    client = await start_service(SERVICE, "ridgeline::example", on_gone=lambda: None)
    process = psutil.Process(client.process.pid)
    assert process.pid != os.getpid()
    assert await client.call("add", 2, 3) == 5
    assert await client.call("environment", "OF_THE_ACTOR") == "here"
    assert process.cmdline()[0].startswith("ridgeline::example")
    await client.close()
    await ended(process)


async def test_a_call_that_fails_raises_what_the_service_raised_and_the_service_goes_on(children):
    client = await start_service(SERVICE, "t", on_gone=lambda: None)
    with pytest.raises(ValueError, match="no such thing"):
        await client.call("fail", "plainly")
    with pytest.raises(ServiceError, match="CannotBeRead: 1 and 2"):
        await client.call("fail", "cannot be read")
    with pytest.raises(AttributeError, match="lambda"):
        await client.call("lambda_of", 1)
    with pytest.raises(AttributeError, match="no_such_method"):
        await client.call("no_such_method")
    with pytest.raises(TypeError, match="argument"):
        await client.call("add", 1)
    assert await client.call("add", 1, 1) == 2
    await client.close()


@pytest.mark.parametrize(
    ("service", "error"), [(BROKEN, RuntimeError), ("no.such.module:Thing", ModuleNotFoundError)], ids=["made", "found"]
)
async def test_a_service_that_cannot_be_made_says_why(children, service, error):
    with pytest.raises(error):
        await start_service(service, "t", on_gone=lambda: None)
    assert not [child for child in children.children() if runs(child)]


async def test_the_end_of_the_process_is_seen_at_once_also_if_it_has_forked_and_ends_every_call(children):
    gone = asyncio.Event()
    client = await start_service(SERVICE, "t", on_gone=gone.set)
    waiting = asyncio.create_task(client.call("block"))
    await asyncio.sleep(0)
    os.kill(client.process.pid, signal.SIGKILL)
    with pytest.raises(ServiceGone):
        await waiting
    await asyncio.wait_for(gone.wait(), PATIENCE_S)
    with pytest.raises(ServiceGone):
        await client.call("add", 1, 1)
    await client.close()

    gone.clear()
    client = await start_service(SERVICE, "t", on_gone=gone.set)
    child = psutil.Process(await client.call("fork"))
    with pytest.raises(ServiceGone):
        await client.call("end")
    await asyncio.wait_for(gone.wait(), PATIENCE_S)
    await ended(child)
    await client.close()


async def test_a_service_whose_loop_is_blocked_still_answers_what_is_off_the_loop():
    ours, theirs = socket.socketpair()
    has_gone = threading.Event()
    theirs = Connection(theirs.detach())
    server, loop = CallServer(theirs, Example(), on_gone=has_gone.set), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server.start(loop, this_process())
        client = await ServiceClient.open(ours, on_gone=lambda: None, collect=nothing)
        blocked = asyncio.create_task(client.call("block"))
        await asyncio.sleep(0)
        assert await client.call("pulse") == "alive"
        assert await blocked == "freed"
        await client.close()
        # The server's thread reads until the client has gone; a socket that is closed under it would be an error there.
        assert await asyncio.to_thread(has_gone.wait, PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        theirs.close()


async def test_a_preloaded_parent_forks_any_number_of_services_and_ends_with_its_block(children, monkeypatch, tmp_path):
    with preloaded_parent(["tests.support.example_service"], {}, tmp_path / "messages") as path:
        monkeypatch.setenv(PRELOADED, path)
        clients = [await start_service(SERVICE, f"ridgeline::{n}", on_gone=lambda: None) for n in range(3)]
        parents = {psutil.Process(client.process.pid).ppid() for client in clients}
        assert len(parents) == 1, "all are forked from one"
        assert await asyncio.gather(*(client.call("add", n, n) for n, client in enumerate(clients))) == [0, 2, 4]
        assert await clients[0].call("environment", PRELOADED) is None
        (parent,) = (psutil.Process(pid) for pid in parents)
        forked = psutil.Process(clients[0].process.pid)
        await clients[0].close()
        await ended(forked)
        assert not [child for child in parent.children() if child.status() == psutil.STATUS_ZOMBIE]
    await ended(parent)
    assert await clients[1].call("add", 4, 4) == 8, "what was forked goes on"
    for client in clients[1:]:
        await client.close()


async def test_without_its_preloaded_parent_a_service_is_started_afresh_and_that_is_told(
    children, monkeypatch, caplog, tmp_path
):
    with preloaded_parent(["tests.support.example_service"], {}, tmp_path / "messages") as path:
        pass
    monkeypatch.setenv(PRELOADED, path)
    client = await start_service(SERVICE, "t", on_gone=lambda: None)
    assert await client.call("add", 1, 2) == 3
    assert "forks nothing" in caplog.text
    await client.close()


async def test_of_a_module_that_fails_in_another_way_the_second_time_the_first_cause_is_told(
    children, monkeypatch, tmp_path
):
    messages = tmp_path / "messages"
    with preloaded_parent(["tests.support.example_service", "tests.support.fails_anew"], {}, messages) as path:
        monkeypatch.setenv(PRELOADED, path)
        with pytest.raises(LookupError, match="the first cause"):
            await start_service("tests.support.fails_anew:Service", "t", on_gone=lambda: None)
    assert "the first cause" in messages.read_text()


async def test_a_preloaded_parent_that_is_killed_or_hangs_costs_what_it_forked_nothing_and_the_next_start_only_time(
    children, monkeypatch, caplog, tmp_path
):
    with preloaded_parent(["tests.support.example_service"], {}, tmp_path / "messages") as path:
        monkeypatch.setenv(PRELOADED, path)
        first = await start_service(SERVICE, "t", on_gone=lambda: None)
        monkeypatch.setattr(launch, "PRELOADED_WITHIN_S", 1.0)
        parent = psutil.Process(first.process.pid).parent()
        assert parent is not None
        assert parent.pid != os.getpid()
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            parent.send_signal(signal_number)
            caplog.clear()
            client = await start_service(SERVICE, "t", on_gone=lambda: None)
            assert psutil.Process(client.process.pid).ppid() == os.getpid(), "started afresh"
            assert await client.call("add", 1, 2) == 3
            assert "forks nothing" in caplog.text
            await client.close()
        assert await first.call("add", 4, 4) == 8
    await first.close()


@pytest.mark.parametrize("preloaded", [True, False])
async def test_a_service_ends_with_the_actor_that_was_killed_and_what_it_has_forked_with_it(preloaded):
    with caller(preloaded=preloaded) as (actor, pids):
        service, child = (psutil.Process(pid) for pid in pids)
        assert (runs(service), runs(child)) == (True, True)
        actor.kill()
        await ended(service)
        await ended(child)


async def test_a_killed_driver_leaves_neither_the_parent_nor_its_folder():
    # Not pytest's own folder: its path is long, and that of a socket may have no more than 107 characters.
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        caller(preloaded=True, tmpdir=Path(folder)) as (driver, pids),
    ):
        service = psutil.Process(pids[0])
        parent = service.parent()
        assert parent is not None
        assert len(os.listdir(folder)) == 3, "the socket's folder, the service's own, and the messages"
        driver.kill()
        await ended(parent)
        await ended(service)
        assert os.listdir(folder) == ["messages"]


@pytest.mark.parametrize("preloaded", [True, False])
def test_what_a_service_and_its_libraries_say_is_in_its_log_beside_its_actors_also_the_second_time(tmp_path, preloaded):
    told = ProcessLogging(format="json", process="worker-0").variables()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, (tmp_path / "actor.err").open("w") as errors:
        for _ in range(2):
            with caller("worker-0.log", preloaded=preloaded, tmpdir=Path(folder), stderr=errors, **told):
                pass
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert lines[1::2] == ["a library says"] * 2
    assert [(line["process"], line["worker"], line["message"]) for line in map(json.loads, lines[::2])] == [
        ("worker-0", "worker-0", "begins")
    ] * 2


@contextmanager
def caller(
    *arguments: str, preloaded: bool, tmpdir: Path = Path("/tmp"), stderr: IO[str] | None = None, **environment: str
) -> Iterator[tuple[psutil.Popen, list[int]]]:
    """Start a process that has a service with a child, as a driver and an actor in one; yields their pids too."""
    command = [
        sys.executable,
        "-m",
        "tests.unit.cluster.runtime.service_process.service_caller",
        *(["preloaded"] if preloaded else []),
        *arguments,
    ]
    variables = {**os.environ, "TMPDIR": str(tmpdir), **environment}
    with psutil.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=stderr) as process:
        try:
            yield process, [int(pid) for pid in process.stdout.readline().split()]
        finally:
            process.kill()
