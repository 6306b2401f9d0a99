"""Requests that are cancelled at every moment of their lives, through real hosts, gRPC and leases: none stays open."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count

from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.router.dispatch.orchestrator import HandoffReleaser, Orchestrator
from ridgeline.router.dispatch.request import SequenceRequest
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.placement_events import Reuse
from ridgeline.router.placement.places import own_placement
from ridgeline.worker_runtime.host import WorkerHost
from tests.components.router.dispatch.lease_engines import STEP_TOKENS, LeaseEngine
from tests.support.samples import router_settings

NUM_REQUESTS = 300
MOST_REQUESTS = 5 * NUM_REQUESTS
"""On a busy machine, until somebody has left while a prompt was computed."""
SEED = 1
CONCURRENCY = 24
LONGEST_DELAY_S = 0.06
HELD_WITHIN_S = 15.0
"""Half a lease: what is released at all is released much sooner, but for a machine that is very busy."""


class Done(Exception):
    """Ends the task group that the router lives in."""


@contextlib.asynccontextmanager
async def engines(seed: int) -> AsyncIterator[tuple[LeaseEngine, LeaseEngine]]:
    rng = random.Random(seed)
    prefill, decode = (LeaseEngine(pool, rng, LONGEST_DELAY_S) for pool in ("prefill", "decode"))
    stepping = [asyncio.create_task(engine.step_for_ever()) for engine in (prefill, decode)]
    try:
        yield prefill, decode
    finally:
        for task in stepping:
            task.cancel()
        await asyncio.gather(*stepping, return_exceptions=True)
        decode.close()
        prefill.close()


@contextlib.asynccontextmanager
async def orchestrator(prefill: LeaseEngine, decode: LeaseEngine) -> AsyncIterator[Orchestrator]:
    hosts = [WorkerHost(prefill, HANDLERS), WorkerHost(decode, HANDLERS)]
    settings, releaser = router_settings(max_concurrent_requests=1000), HandoffReleaser()
    try:
        addresses = [await host.start() for host in hosts]
        fleet = Fleet("router", releaser.release, reuses_decode_kv=True)
        async with asyncio.TaskGroup() as group:
            group.create_task(releaser.run())
            await fleet.connect(addresses, group)
            state = ClusterState(fleet, settings)
            placement = own_placement(state, fleet, settings)
            yield Orchestrator(placement, settings, RequestMetrics(CollectorRegistry()), releaser.release)
            raise Done
    except* Done:
        pass
    finally:
        await asyncio.gather(*(host.stop() for host in hosts))


async def one(serving: Orchestrator, number: int, rng: random.Random) -> str:
    """One request, or two that share a client; the client leaves at a random moment, or by what it sees."""
    prompt = [3] * rng.choice([5, 40, STEP_TOKENS, STEP_TOKENS + 1, 2 * STEP_TOKENS])
    seeded = {"seed": 1, "temperature": 1.0} if rng.random() < 0.3 else {}
    params = SamplingParams(max_tokens=rng.choice([1, 2, 3, 8]), **{"temperature": 0.0, **seeded})
    leaves_after_s = rng.choice([None, None, rng.uniform(0.0, 10 * LONGEST_DELAY_S)])
    leaves_at_token = rng.choice([None, 1, 1, rng.randint(1, 5)])
    stops_at_token = rng.choice([None, None, 1, 2])
    seen, left = Counter[int](), asyncio.Event()

    def emit(sequence: int, num_tokens: int) -> bool:
        seen[sequence] += num_tokens
        if leaves_at_token is not None and seen.total() >= leaves_at_token:
            left.set()
        return stops_at_token is not None and seen[sequence] >= stops_at_token

    async def run(sequence: int) -> None:
        request = SequenceRequest(f"r{number}-{sequence}", prompt, sampling_of(params))
        await serving.run(request, lambda delta: emit(sequence, len(delta.token_ids)))

    sequences = [asyncio.create_task(run(sequence)) for sequence in range(rng.choice([1, 1, 2, 4]))]
    leaving = asyncio.create_task(left.wait())
    everything = asyncio.gather(*sequences, return_exceptions=True)
    await asyncio.wait((everything, leaving), timeout=leaves_after_s, return_when=asyncio.FIRST_COMPLETED)
    ended = "finished" if everything.done() else "left"
    for task in (leaving, *sequences):
        task.cancel()
    await asyncio.gather(leaving, *sequences, return_exceptions=True)
    return ended


async def held(prefill: LeaseEngine, decode: LeaseEngine) -> list[str]:
    """What is open after a while, in sentences."""
    for _ in range(round(HELD_WITHIN_S / 0.05)):
        stats = [engine.service.stats() for engine in (prefill, decode)]
        open_now = any(one.open_leases or one.active_fetches or one.watched_handoffs for one in stats)
        if not (open_now or prefill.unsent or decode.unsent):
            return []
        await asyncio.sleep(0.05)
    lives = [life for engine in (prefill, decode) for life in engine.service.leases.stale_handoffs()]
    return [f"{stats}, kept {prefill.unsent} and {decode.unsent}", *lives]


async def test_requests_that_are_left_at_every_moment_leave_no_lease_no_fetch_and_no_heartbeat(monkeypatch):
    rng = random.Random(f"requests/{SEED}")
    numbers = count()

    def asks(demand, sink, cached_tokens, sources, learned):
        """Half of the prompts are later turns; some of their questions are given up."""
        source = sources[0].description
        return Reuse(source.worker_id, source.incarnation, 32, rng.choice([0.01, 5.0])) if rng.random() < 0.5 else None

    monkeypatch.setattr("ridgeline.router.placement.cluster_state.best_source", asks)
    ends: Counter[str] = Counter()
    async with engines(SEED) as (prefill, decode), orchestrator(prefill, decode) as serving:

        async def one_after_the_other() -> None:
            while (number := next(numbers)) < NUM_REQUESTS or (not prefill.given_up and number < MOST_REQUESTS):
                ends[await one(serving, number, rng)] += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(CONCURRENCY)))
        assert await held(prefill, decode) == []
        assert {engine.service.stats().expired_leases_total for engine in (prefill, decode)} == {0}
        assert prefill.service.stats().fetches_total["ok"] > NUM_REQUESTS / 20
    assert prefill.given_up > 0, "nobody left while a prompt was computed: this test shows nothing"
    assert min(ends["finished"], ends["left"]) > NUM_REQUESTS / 10, ends
