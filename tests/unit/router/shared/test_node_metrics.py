"""The request series of all routers of a node, each a process of its own."""

import os
import subprocess
import sys

import pytest

ROUTER = """
import asyncio, sys
from prometheus_client import CollectorRegistry, Counter, generate_latest
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.settings import RouterStart
from ridgeline.router.front.metrics_page import NodeMetrics

node, own = NodeMetrics(RouterStart(sys.argv[1], int(sys.argv[2]), "test")), CollectorRegistry()
metrics, probes = RequestMetrics(own), RequestMetrics(None, "uncounted")
node.show(own)
library = Counter("library", "of somebody else", registry=None)
for line in sys.stdin:
    match line.split():
        case ["served", number]:
            for _ in range(int(number)):
                metrics.requests.labels("disaggregated", "finished").inc()
                metrics.ttft.labels("prefill").observe(0.3)
                for other in (probes.requests.labels("colocated", "finished"), probes.in_flight, library):
                    other.inc()
        case ["moved", rate]:
            metrics.link_fastest.labels("shm").set(float(rate))
            metrics.cpu.labels(sys.argv[1]).inc()
        case ["begins"]:
            metrics.in_flight.inc()
        case ["page"]:
            asyncio.run(node.refresh())
            print(generate_latest(node).decode(), flush=True)
        case ["ends"]:
            node.close()
    print("done", flush=True)
"""


class Router:
    """A process that counts as a router does."""

    def __init__(self, name, number=1, *, env):
        self._process = subprocess.Popen(
            [sys.executable, "-c", ROUTER, name, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def tell(self, line):
        """Return what it prints."""
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        printed = []
        while (said := self._process.stdout.readline()) != "done\n":
            assert said, "it has ended"
            printed.append(said)
        return "".join(printed)

    def kill(self):
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def router(tmp_path):
    """Start one; all of a test share a folder for temporary files."""
    started = []

    def start(name, number=1):
        started.append(Router(name, number, env=os.environ | {"TMPDIR": str(tmp_path)}))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def counts(page):
    """The samples of a page that are not zero, without the buckets."""
    samples = (line.rpartition(" ") for line in page.splitlines() if line and line[0] != "#")
    return {name: float(value) for name, _, value in samples if "_bucket" not in name and float(value)}


def of(requests, ttft_sum, in_flight=None):
    found = {
        'ridgeline_requests_total{outcome="finished",path="disaggregated"}': requests,
        'ridgeline_ttft_seconds_count{pool="prefill"}': requests,
        'ridgeline_ttft_seconds_sum{pool="prefill"}': pytest.approx(ttft_sum),
    }
    return found | ({} if in_flight is None else {"ridgeline_requests_in_flight": in_flight})


def test_any_router_shows_the_sum_also_of_one_that_died_and_of_its_next_process(router, tmp_path):
    one, two = router("router-0"), router("router-1")
    one.tell("served 2")
    two.tell("served 3")
    for each in (one, two):
        each.tell("begins")
        assert counts(each.tell("page")) == of(5, 1.5, in_flight=2 if each is two else 1)
    one.kill()
    assert counts(two.tell("page")) == of(5, 1.5, in_flight=2), "until another process has its place"
    again = router("router-0", 2)
    again.tell("served 1")
    assert counts(again.tell("page")) == counts(two.tell("page")) == of(6, 1.8, in_flight=1)
    assert 'ridgeline_ttft_seconds_bucket{le="0.5",pool="prefill"} 6.0' in two.tell("page")
    two.tell("ends")
    again.tell("ends")
    assert not list(tmp_path.iterdir())


def test_the_fastest_hand_off_is_that_of_any_router_and_cpu_time_that_of_each(router):
    one, two = router("router-0"), router("router-1")
    one.tell("moved 7")
    two.tell("moved 5")
    assert counts(two.tell("page")) == {
        'ridgeline_link_fastest_bytes_per_second{transport="shm"}': 7,
        'ridgeline_router_cpu_seconds_total{router="router-0"}': 1,
        'ridgeline_router_cpu_seconds_total{router="router-1"}': 1,
    }
