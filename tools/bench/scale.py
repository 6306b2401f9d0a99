"""Measures what router and dispatcher spend on a large deployment, beside the goal of each figure.

There are no engines and no network: the real parts keep their books over 64 workers of mode adaptive, 8 routers and
5,000 streams of 500 clients. Figures are CPU time of this process, except the longest turn of the event loop.

usage: python -m tools.bench.scale [--workers 64] [--routers 8] [--streams 5000] [--clients 500]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, cast, get_args

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from vllm.sampling_params import SamplingParams

from ridgeline.contracts.vocabulary import Pool
from ridgeline.contracts.workers import WorkerStatus
from ridgeline.router.dispatch.orchestrator import Orchestrator
from ridgeline.router.dispatch.request import Attempt, RequestProgress, SequenceRequest
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.pairing import KvPair
from ridgeline.router.fleet.policy import Demand
from ridgeline.router.fleet.roles import RoleTable
from ridgeline.router.flow.admission import LOOK_EVERY_S, Admission, Held, Holdings
from ridgeline.router.flow.admission_rules import Ask, Refused
from ridgeline.router.front.metrics_page import page_of
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.observe.collectors import WorkerCollector
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.observe.timeline import RequestTimeline
from ridgeline.router.placement.cluster_state import ClusterState, RouterRequests
from ridgeline.router.placement.placement_events import Happened, Wants, Wish
from ridgeline.router.placement.places import Placement
from ridgeline.router.settings import RouterSettings, RouterStart
from ridgeline.router.shared.counts import Counts
from ridgeline.router.shared.dispatcher import SUMS_EVERY_S, Dispatcher
from ridgeline.router.shared.holdings import Changes
from ridgeline.router.shared.joined_router import JoinedRouter
from ridgeline.router.shared.link import give_up_without_a_dispatcher
from ridgeline.router.shared.messages import Counted, CountOthers, Downs, Holds, OthersCounted, Ups
from ridgeline.router.shared.shared_metrics import SharedMetrics
from ridgeline.worker_runtime.client import decoder, encode
from tests.support.samples import router_settings
from tools.bench.decision_cost import a_worker

CHANGES_PER_S: Final = 500
"""Requests that begin or end: 5,000 streams of 20 s each."""
COUNTERS: Final = {
    **{
        f"{kind}.{step}": 1.0
        for kind in ("flops_total", "busy_seconds_total", "steps_total")
        for step in ("prefill", "decode", "mixed")
    },
    **{
        f"bytes_total.{step}.{kind}": 1.0
        for step in ("prefill", "decode", "mixed")
        for kind in ("weights", "kv_read", "kv_written", "activations")
    },
    **dict.fromkeys(
        ("tokens_total.prefill", "tokens_total.decode", "kv_bytes_total.sent", "kv_bytes_total.received"), 1.0
    ),
    **dict.fromkeys(("fetches_total.ok", "open_leases", "pinned_blocks", "active_fetches", "watched_handoffs"), 1.0),
}
"""What an engine reports."""


@dataclass(frozen=True)
class Size:
    """Of the deployment."""

    workers: int = 64
    routers: int = 8
    streams: int = 5_000
    clients: int = 500


@dataclass(frozen=True)
class Figure:
    """One line: what was measured, and what it should be at most."""

    what: str
    measured: float
    goal: float
    unit: str

    def __str__(self) -> str:
        verdict = "" if self.measured <= self.goal else "  <-- above"
        return f"{self.what:<82} {self.measured:9.3f} {self.unit:<4} goal {self.goal:g}{verdict}"


def settings_of(size: Size) -> RouterSettings:
    """Return the router's settings."""
    return router_settings(
        max_model_len_tokens=8_192,
        mode="adaptive",
        request_deadline_s=600.0,
        max_outstanding_requests=100_000,
        prefill_window_tokens=dict.fromkeys(get_args(Pool), 16_384),
        max_prompt_wait_s=60.0,
        recovery_timeout_s=60.0,
        max_client_share=0.9,
        routers=size.routers,
        block_size_tokens=16,
    )


def fleet_of(size: Size) -> Fleet:
    """Return a fleet of workers that report, all of which can exchange KV."""
    fleet = Fleet("bench", roles=RoleTable("adaptive"))
    for number in range(size.workers):
        worker = a_worker(number)
        worker.status = replace(cast(WorkerStatus, worker.status), counters=COUNTERS)
        worker._count(COUNTERS)
        fleet._workers[worker.worker_id] = worker
    names = list(fleet._workers)
    fleet.kv_pairs = [
        KvPair(one, other, "grpc", "not shm: another host") for one in names for other in names if one != other
    ]
    return fleet


def median_ms(call: Callable[[], object], times: int = 100) -> float:
    """Return the median of the CPU time of a call in milliseconds."""
    took = []
    for _ in range(times):
        began_s = time.process_time()
        call()
        took.append(time.process_time() - began_s)
    return statistics.median(took) * 1e3


class Crowd:
    """The clients' streams at each router, which begin and end."""

    def __init__(self, size: Size) -> None:
        self._draw = random.Random(1)
        self._clients = [f"{number:032x}" for number in range(size.clients)]
        self.held: list[dict[str, Held]] = [{} for _ in range(size.routers)]
        for number in range(size.streams):
            self._change(number % size.routers, self._clients[number % size.clients], 1)

    def _change(self, router: int, client: str, number: int) -> None:
        before = self.held[router].get(client, Held())
        self.held[router][client] = Held(max(0, before.sequences + number), max(0, before.blocks + 100 * number))

    def change(self) -> None:
        """Let begin and end what does so between two sums."""
        for _ in range(round(CHANGES_PER_S * SUMS_EVERY_S)):
            router = self._draw.randrange(len(self.held))
            self._change(router, self._draw.choice(self._clients), self._draw.choice((1, -1)))


async def sums(size: Size) -> list[Figure]:
    """Measure what the dispatcher spends on telling each router of the others, ten times a second."""
    dispatcher = Dispatcher(settings_of(size))
    fleet, queue = dispatcher._fleet, dispatcher._state.queues["adaptive"]
    fleet._workers, fleet.kv_pairs = fleet_of(size)._workers, fleet_of(size).kv_pairs
    crowd, changes, read = Crowd(size), [Changes() for _ in range(size.routers)], decoder(Ups)
    for number in range(size.clients):
        queue._queue.push(f"{number:032x}", 1_000, cast(Any, None))
    joined = [JoinedRouter(dispatcher._state, dispatcher._parts, dispatcher._counts) for _ in changes]
    dispatcher._routers.update(joined)
    took_s, bytes_sent, router_s, ticks = 0.0, 0, 0.0, 50
    for tick in range(ticks + 1):
        crowd.change()
        ups = [
            change.since_told(Holdings(of_client=dict(held))) for change, held in zip(changes, crowd.held, strict=True)
        ]
        told = [encode(Ups([one])) for one in ups if one is not None]
        fleet.workers[tick % size.workers].outstanding.running += 1
        began_s = time.process_time()
        for router, data in zip(joined, told, strict=True):
            for message in read(data).messages:
                router.take(message)
        dispatcher._look()
        batches = [encode(await router.next_batch()) for router in joined]
        if tick:  # the first one tells everything
            took_s += time.process_time() - began_s
            bytes_sent += sum(map(len, batches))
        began_s = time.process_time()
        decoder(Downs)(batches[0])
        router_s += time.process_time() - began_s
    for _ in range(round(20 / SUMS_EVERY_S)):  # router 0 does not read for 20 s
        crowd.change()
        for router, change, held in zip(joined, changes, crowd.held, strict=True):
            router.take(change.since_told(Holdings(of_client=dict(held))) or Holds({}))
        dispatcher._look()
    late = len(encode(await joined[0].next_batch()))
    return [
        Figure("sums: the dispatcher's core", took_s / ticks / SUMS_EVERY_S * 100, 10, "%"),
        Figure("sums: a router's core for reading them", router_s / ticks / SUMS_EVERY_S * 100, 2, "%"),
        Figure("sums: sent to all routers", bytes_sent / ticks / SUMS_EVERY_S / 1e6, 10, "MB/s"),
        Figure("sums: what a router is sent that did not read for 20 s", late / 2**20, 1, "MiB"),
    ]


async def bookkeeping(size: Size) -> list[Figure]:
    """Measure what a request costs beside the choice of its workers: admission, and looks at the queue."""
    fleet, settings = fleet_of(size), settings_of(size)
    state, requests, numbers = ClusterState(fleet, settings), RouterRequests(lambda _: None), count()
    queue = state.queues["adaptive"]

    def ask(client: str, prompt_tokens: int) -> int:
        number = next(numbers)
        state.apply(requests, Wants(number, Wish(Demand(prompt_tokens, 400, client=client))))
        return number

    for number in range(size.streams):
        state.apply(requests, Happened(ask(f"c{number % size.clients}", 2_000), "prompt_done"))
    full = [ask("f", 20_000) for _ in fleet.workers]
    for number in range(50):
        ask(f"c{number}", 2_000)
    without_room_ms = median_ms(state.look)
    queue._chooser = cast(Any, _Holds())
    state.apply(requests, Happened(full[0], "prompt_done"))
    queue._window_tokens = 10**9  # room, but the first prompt may not go
    held_back_ms = median_ms(state.look)
    metrics = RequestMetrics(CollectorRegistry())
    admission = Admission(settings, {"adaptive": queue}, fleet, metrics, look_every_s=LOOK_EVERY_S)
    admission.state = "open"
    tickets = [admission.admit(f"c{number}", Ask(1, 20, 4)) for number in range(size.clients)]

    def a_request() -> None:
        with suppress(Refused):
            admission.check_share("c1", 1)
            admission.check("c1", 1)
            admission.admit("c1", Ask(1, 2_000, 400)).release()

    admission_ms = median_ms(a_request)
    del tickets
    return [
        Figure("a look at the queue without room", without_room_ms, 0.2, "ms"),
        Figure("a look at the queue while its first prompt is held back", held_back_ms, 0.2, "ms"),
        Figure("admission of a request: share, check, admit", admission_ms, 0.2, "ms"),
    ]


class _Holds:
    """Holds back every prompt."""

    def choose(self, *_args: object, **_options: object) -> None:
        return None

    def least_s(self, _demand: Demand) -> None:
        return None


async def hashing(size: Size) -> list[Figure]:
    """Measure what a prompt of 32k tokens costs until it asks for a place, in a pure mode and in mode adaptive."""
    found = []
    for mode, goal in (("colocated", 0.5), ("adaptive", 5.0)):
        fleet, settings = fleet_of(size), settings_of(size)
        fleet.mode = cast(Any, mode)
        orchestrator = Orchestrator(fleet, cast(Any, None), settings, RequestMetrics(None), lambda *_: None)
        sampling = sampling_of(SamplingParams(max_tokens=300))
        request = SequenceRequest("r", list(range(32_000)), sampling, reasoning_ended=True)
        timeline = RequestTimeline(time.monotonic, "r", 32_000, "colocated")
        progress = RequestProgress(lambda _: False, timeline, RequestMetrics(None))
        took_ms = median_ms(partial(Attempt, request, progress, 0, orchestrator.hashed_block_tokens), 20)
        found.append(Figure(f"a prompt of 32k tokens until it asks for a place, mode {mode}", took_ms, goal, "ms"))
    return found


async def page(size: Size) -> list[Figure]:
    """Measure a page of /metrics: the longest turn of the loop, and the others' part in it."""
    fleet, registry, requests = fleet_of(size), CollectorRegistry(), CollectorRegistry()
    _count_everything(RequestMetrics(requests))
    counts, link = Counts(), _CountingLink()
    shared = SharedMetrics(requests, cast(Any, link))
    samples = shared.samples_at_once()
    for number in range(size.routers):
        counts.told(RouterStart(f"router-{number}"), samples)
    link.reply = encode(OthersCounted(await counts.without(RouterStart("router-0"))))
    registry.register(shared)
    registry.register(WorkerCollector(lambda: fleet.workers, dict, lambda: "adaptive", lambda: fleet.kv_pairs, dict))
    asked, read = encode(CountOthers(RouterStart("router-1"), samples)), decoder(CountOthers)
    lines = len((await page_of(registry)).splitlines())

    async def a_page() -> None:
        await shared.refresh()
        await page_of(registry)

    async def of_another_router() -> None:
        encode(Counted(await shared.samples()))

    async def of_the_dispatcher() -> None:
        counts.told(RouterStart("router-1"), read(asked).samples)
        await asyncio.sleep(0)
        encode(OthersCounted(await counts.without(RouterStart("router-0"))))

    began_s = time.process_time()
    for _ in range(5):
        generate_latest(registry)
    cpu_ms = (time.process_time() - began_s) / 5 * 1e3
    return [
        Figure(f"a page of /metrics ({lines} lines): CPU in all", cpu_ms, 100, "ms"),
        Figure("a page of /metrics: the longest turn of its router's loop", await _longest_turn_ms(a_page), 5, "ms"),
        Figure("the longest turn of each other router's", await _longest_turn_ms(of_another_router), 5, "ms"),
        Figure("the longest turn of the dispatcher's", await _longest_turn_ms(of_the_dispatcher), 5, "ms"),
    ]


class _CountingLink:
    """Stands in for the connection to a dispatcher that counts what the others have."""

    router, reply = RouterStart("router-0"), b""

    async def call(self, _name: str, _message: object, kind: type[Any], _deadline_s: float) -> object:
        return decoder(kind)(self.reply)


async def _longest_turn_ms(work: Callable[[], Awaitable[None]]) -> float:
    """Return the CPU time of the longest turn of the event loop during this work, the median of nine times."""
    longest_ms = []
    for _ in range(9):
        turns: list[float] = []
        watching = asyncio.create_task(_watch_turns(turns))
        await work()
        await asyncio.sleep(0)
        watching.cancel()
        longest_ms.append(max(turns) * 1e3)
    return statistics.median(longest_ms)


async def _watch_turns(turns: list[float]) -> None:
    """Note the CPU time of each turn of the event loop; what other processes take does not count."""
    while True:
        began_s = time.process_time()
        await asyncio.sleep(0)
        turns.append(time.process_time() - began_s)


def _count_everything(metrics: RequestMetrics) -> None:
    """Give each series of a router all labels that it can have."""
    pools, stages = (
        ("prefill", "decode", "colocated", "adaptive"),
        ("preprocess", "queue", "prefill", "handoff_wait", "wire", "decode_queue", "decode"),
    )
    for pool in pools:
        for histogram in (metrics.ttft, metrics.tpot, metrics.itl, metrics.second_token):
            histogram.labels(pool).observe(0.1)
        for outcome in ("finished", "failed", "cancelled"):
            metrics.requests.labels(pool, outcome).inc()
    for name in stages:
        metrics.stage.labels(name).observe(0.1)
        metrics.pause.labels(name).observe(0.1)
        metrics.link_rate.labels(name).observe(1e9)


async def waiting(size: Size) -> list[Figure]:
    """Measure what prompts cost that wait for the dispatcher's answer."""
    link = cast(Any, _NoLink())
    placement = Placement(fleet_of(size), settings_of(size), link.send)
    tasks = [asyncio.create_task(_place(placement)) for _ in range(size.streams)]
    looking = asyncio.create_task(give_up_without_a_dispatcher(link, placement, 60.0))
    await asyncio.sleep(0.1)
    began_s, began = time.process_time(), time.perf_counter()
    await asyncio.sleep(2.0)
    share = (time.process_time() - began_s) / (time.perf_counter() - began)
    for task in (looking, *tasks):
        task.cancel()
    await asyncio.wait((looking, *tasks))
    return [Figure(f"{size.streams} prompts that wait for the dispatcher: the router's core", share * 100, 1, "%")]


class _NoLink:
    """Stands in for a connection that is there and says nothing."""

    address, away_s = "nowhere", 0.0

    def send(self, _message: object) -> None:
        pass


async def _place(placement: Placement) -> None:
    async with placement.place(Wish(Demand(2_000))):
        pass


async def measure(size: Size) -> list[Figure]:
    """Return all figures."""
    parts = (sums, bookkeeping, hashing, page, waiting)
    return [figure for part in parts for figure in await part(size)]


def main() -> int:
    """Print all figures; 1 if one is above its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    figures = asyncio.run(measure(Size(**vars(parser.parse_args()))))
    for figure in figures:
        print(figure)  # noqa: T201
    return int(any(figure.measured > figure.goal for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
