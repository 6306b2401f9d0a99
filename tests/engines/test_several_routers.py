"""Three routers behind one port with their dispatcher, real engines: what is lost when one dies, or is cut off.

Pools change size, too.
One `ridgeline serve` with a prefill and a decode worker for all of these tests, which follow one another.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import httpx
import psutil
import pytest

from tests.engines import relayed_serve
from tests.engines.harness import Metrics
from tests.engines.serve_process import GONE_WITHIN_S, REPOSITORY, RIDGELINE, body, name_of, still_there
from tests.engines.served import BACK_WITHIN_S, SMALL_SPLIT, Deployed, Stream, deployed_by_serve
from tests.support.patience import in_the_end

Figure = Callable[[str], None]
pytestmark = pytest.mark.engines

UNREACHABLE_S = 10
SETTINGS = {
    "router.processes": "3",
    "router.slo.tpot_ms": "0.1",
    "supervision.unreachable_timeout_s": str(UNREACHABLE_S),
    **SMALL_SPLIT,
}
TOKENS = 30
STREAM_TOKENS = 200
LOADED = 10
"""On a slow machine an answer beside six others may take so many times as long as alone."""
GREEDY = {**body(TOKENS), "temperature": 0}


@pytest.fixture(scope="module")
def deployed(small_model: dict[str, str]) -> Iterator[Deployed]:
    program, settings = (sys.executable, "-m", relayed_serve.__name__), {**SETTINGS, **small_model}
    with deployed_by_serve("--prefill", "1", "--decode", "1", settings=settings, program=program) as one:
        yield one


def completion(url: str) -> str:
    """An answer over a connection of its own, so that the kernel chooses the router."""
    reply = httpx.post(f"{url}/v1/completions", json=GREEDY, timeout=120)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def finished(deployed: Deployed) -> float:
    return deployed.metrics().sum("ridgeline_requests_total", outcome="finished")


def all_finished(clients: list[httpx.Client]) -> set[float]:
    """The same as each router says, over its client."""
    pages = [client.get("/metrics").text for client in clients]
    return {Metrics(page).sum("ridgeline_requests_total", outcome="finished") for page in pages}


def connections(process: psutil.Process) -> int:
    return sum(one.status == "ESTABLISHED" for one in process.net_connections("tcp"))


def long_streams(deployed: Deployed, number: int) -> tuple[list[Stream], dict[int, int]]:
    """Streams of which several routers have some, and how many connections each router has got with them."""
    before = {router.pid: connections(router) for router in deployed.heads("router")}
    streams: list[Stream] = []
    while True:
        with ThreadPoolExecutor(number) as pool:
            streams += pool.map(lambda _: Stream(deployed.url, STREAM_TOKENS, temperature=0), range(number))
        now = {router.pid: connections(router) - before[router.pid] for router in deployed.heads("router")}
        if sum(number > 0 for number in now.values()) > 1:
            return streams, now


def test_limits_that_nothing_can_keep_are_told_when_it_is_ready(deployed: Deployed):
    told = r"router.slo.tpot_ms is 0.1, .* measured to take \d\S* ms .* Set it to \d\S* or more"
    assert re.search(told, " ".join(deployed.serve.lines)), deployed.serve.output
    status = subprocess.run(
        [str(RIDGELINE), "status"], env={**os.environ, "COLUMNS": "250"}, capture_output=True, text=True, check=True
    )
    assert re.search(told, " ".join(status.stdout.split())), status.stdout


def test_requests_over_all_routers_give_the_same_text_and_are_counted_together(deployed: Deployed):
    assert [len(deployed.heads(title)) for title in ("router", "dispatcher")] == [3, 1]
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(client_of(deployed, router))) for router in deployed.heads("router")]
        # One that is not heard within a second is shown as it was before: on a machine that stands still for a moment.
        in_the_end(lambda: len(all_finished(clients)) == 1)
        (before,) = all_finished(clients)
        with ThreadPoolExecutor(6) as pool:
            texts = list(pool.map(completion, [deployed.url] * 12))
        assert len(set(texts)) == 1
        in_the_end(lambda: all_finished(clients) == {before + 12.0})  # whichever router answers
    assert deployed.metrics().sum("ridgeline_requests_total", path="disaggregated", outcome="finished") > 0
    assert deployed.metrics().sum("ridgeline_kv_pair") == 2, "either way"


def client_of(deployed: Deployed, router: psutil.Process) -> httpx.Client:
    """A client with one connection, which this router has."""
    while True:
        client = httpx.Client(base_url=deployed.url, timeout=120, limits=httpx.Limits(keepalive_expiry=None))
        port = own_port(client.get("/health"))
        if any(one.raddr and one.raddr.port == port for one in router.net_connections("tcp")):
            return client
        client.close()


def own_port(reply: httpx.Response) -> int:
    address: tuple[str, int] = reply.extensions["network_stream"].get_extra_info("client_addr")
    return address[1]


def states(client: httpx.Client) -> dict[str, str]:
    """How its router finds each worker."""
    return {row["worker"]: row["state"] for row in client.get("/ridgeline/workers").json()["workers"]}


def test_a_router_whose_route_to_half_of_the_workers_is_cut_serves_on_and_heals_and_nothing_is_restarted(
    deployed: Deployed, figure: Figure
):
    began_s = time.monotonic()
    whole, before = completion(deployed.url), {name: row["pid"] for name, row in deployed.workers().items()}
    alone_s = time.monotonic() - began_s
    (router,) = (one for one in deployed.heads("router") if relayed_serve.RELAYED in name_of(one))
    streams = [Stream(deployed.url, TOKENS, temperature=0) for _ in range(4)]
    with closing(client_of(deployed, router)) as client:
        port, took_s, refused = own_port(client.get("/health")), [], 0
        deployed.serve.process.send_signal(signal.SIGUSR1)
        cut_s = time.monotonic()
        # Longer than a worker may be unreachable for most routers, and until the supervisor has looked once more.
        while time.monotonic() < cut_s + UNREACHABLE_S + 5.0 or len(took_s) < 3:
            asked_s = time.monotonic()
            reply = client.post("/v1/completions", json=GREEDY)
            took_s.append(time.monotonic() - asked_s)
            assert own_port(reply) == port
            if reply.status_code == 503:
                refused += 1
                time.sleep(0.2)
            else:
                assert reply.json()["choices"][0]["text"] == whole, reply.text
            assert completion(deployed.url) == whole, "whichever router it reaches"
        found = states(client)
        assert sorted(found.values()) == ["lost", "ready"], found
        took = ", ".join(f"{one_s:.1f}" for one_s in took_s)
        figure(f"{len(took_s)} requests of the cut router, {refused} refused, took {took} s")
        deployed.serve.process.send_signal(signal.SIGUSR2)
        mended_s = time.monotonic()
        while set(states(client).values()) != {"ready"}:
            assert time.monotonic() < mended_s + BACK_WITHIN_S
            time.sleep(0.1)
        figure(f"healed {time.monotonic() - mended_s:.1f} s after its route was back")
        reply = client.post("/v1/completions", json=GREEDY)
        assert (reply.json()["choices"][0]["text"], own_port(reply)) == (whole, port)
    assert [stream.text() for stream in streams] == [whole] * 4
    assert {name: row["pid"] for name, row in deployed.workers().items()} == before
    assert deployed.metrics().sum("ridgeline_worker_restarts_total") == 0
    most_s = max(3 * UNREACHABLE_S, UNREACHABLE_S + LOADED * alone_s)
    assert max(took_s) < most_s, "none of them waited for the route"
    assert " is gone " not in deployed.serve.output


def test_a_killed_router_takes_its_own_streams_only_and_comes_back_on_the_port(deployed: Deployed, figure: Figure):
    counted = finished(deployed)
    streams, shared = long_streams(deployed, 3)
    victim = next(router for router in deployed.heads("router") if shared[router.pid])
    victim.kill()
    killed_s = time.monotonic()
    ends = [stream.end()[-1] for stream in streams]
    broken = sum(end.startswith("broken:") for end in ends)
    assert broken == shared[victim.pid], f"{shared}, {ends}"
    assert ends.count("data: [DONE]") == len(streams) - broken
    assert len({stream.text() for stream in streams if stream.lines[-1] == "data: [DONE]"}) == 1
    found = re.search(r"router-\d", deployed.serve.wait_said(r"router-\d is gone ", BACK_WITHIN_S))
    assert found is not None
    figure(deployed.back(found[0]))
    figure(f"back {time.monotonic() - killed_s:.1f} s after it was killed")
    assert len(deployed.heads("router")) == 3
    # What the dead router had counted when it was last asked is not forgotten.
    in_the_end(lambda: finished(deployed) >= counted)
    deployed.completes()


def test_streams_do_not_notice_the_death_of_the_dispatcher_and_new_requests_wait_for_the_next(
    deployed: Deployed, figure: Figure
):
    whole = completion(deployed.url)
    (dispatcher,) = deployed.heads("dispatcher")
    streams = [Stream(deployed.url, TOKENS, temperature=0) for _ in range(2)]
    dispatcher.kill()
    killed_s = time.monotonic()
    assert completion(deployed.url) == whole
    figure(f"a request that came then was answered {time.monotonic() - killed_s:.1f} s after the dispatcher was killed")
    assert [stream.text() for stream in streams] == [whole, whole]
    figure(deployed.back("dispatcher"))
    assert still_there([dispatcher], 0) == []
    deployed.completes()


def ridgeline(deployed: Deployed, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(RIDGELINE), *arguments, "--url", deployed.url],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * BACK_WITHIN_S,
        check=False,
    )
    return done.returncode, done.stdout


class Load:
    """Requests one after the other, in the background, until it is told to stop."""

    def __init__(self, deployed: Deployed) -> None:
        self._deployed = deployed
        self._pool = ThreadPoolExecutor(2)
        self._stop = False
        self._running = [self._pool.submit(self._go_on) for _ in range(2)]

    def _go_on(self) -> list[str]:
        texts = []
        while not self._stop:
            texts.append(completion(self._deployed.url))
        return texts

    def end(self) -> list[str]:
        """All answers; an error of any request is raised here."""
        self._stop = True
        texts = [text for one in self._running for text in one.result(BACK_WITHIN_S)]
        self._pool.shutdown()
        return texts


def test_pools_grow_and_shrink_and_are_restarted_under_load_without_a_failed_request(
    deployed: Deployed, figure: Figure
):
    whole = completion(deployed.url)
    load = Load(deployed)
    for words in (("scale", "decode=2"), ("scale", "decode=1"), ("restart",)):
        began_s = time.monotonic()
        status, output = ridgeline(deployed, *words)
        assert status == 0, output
        figure(f"{' '.join(words)}: {time.monotonic() - began_s:.1f} s; " + "; ".join(output.split("\n  ")))
        pools = sorted(row["pool"] for row in deployed.workers().values())
        assert pools == (["decode", "decode", "prefill"] if words[-1] == "decode=2" else ["decode", "prefill"])
    texts = load.end()
    assert set(texts) == {whole}, "no token is lost or wrong"
    figure(f"{len(texts)} requests meanwhile")
    metrics = deployed.metrics()
    assert metrics.sum("ridgeline_requests_total", outcome="failed") == 0
    assert metrics.sum("ridgeline_worker_restarts_total", reason="ordered") > 0


def test_what_cannot_be_ordered_is_refused_with_a_sentence(deployed: Deployed):
    status, output = ridgeline(deployed, "scale", "colocated=2")
    assert (status, "in mode disaggregated there is no pool colocated" in output) == (1, True), output
    status, output = ridgeline(deployed, "scale", "decode")
    assert (status, "is no pool with its number of workers: say prefill=2" in output) == (2, True), output


def test_a_terminal_that_is_closed_makes_it_drain_and_three_routers_and_a_dispatcher_leave_no_process(
    deployed: Deployed,
):
    family = deployed.serve.family()
    deployed.serve.process.send_signal(signal.SIGHUP)
    assert deployed.serve.wait_exit() == 0, deployed.serve.output
    assert "draining" in deployed.serve.output
    assert still_there(family, GONE_WITHIN_S) == []
