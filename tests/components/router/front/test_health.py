"""/ready tells the truth: tokens that were made, or which pool made none and for how long."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from ridgeline.contracts.errors import EngineFailed, WorkerLost
from ridgeline.contracts.workers import WorkerStatus
from ridgeline.router.front.health import HealthProbe, PoolVerdict, Readiness, probe_prompt_tokens, ready_endpoint
from ridgeline.router.observe.metrics import RequestMetrics
from tests.components.router.dispatch.test_orchestrator import ANNOUNCED, FIRST, FOREVER, once, split
from tests.support.clock import FakeClock
from tests.support.patience import eventually


class Worker:
    """One worker as readiness sees it."""

    def __init__(self, last_token_s=None):
        self.client = SimpleNamespace(last_token_s=last_token_s)
        self.status = None
        self.usable = True
        self.leaves = False

    def load(self):
        return SimpleNamespace(usable=self.usable)


class Deployment:
    """Two pools, a clock that stands still, and a health probe that does what it is told."""

    def __init__(self, deadline_s=5.0):
        self.clock = FakeClock()
        self.prefill, self.decode = Worker(), Worker()
        self.probes, self.refreshed = 0, 0
        self.probe_does = lambda: None
        self.blocked = None
        self.draining = False
        self.late = ""
        self.registry = CollectorRegistry()
        self.readiness = Readiness(
            pools=lambda: {"prefill": [self.prefill], "decode": [self.decode]},
            probe=self.probe,
            refresh=self.refresh,
            deadline_s=deadline_s,
            metrics=RequestMetrics(self.registry),
            clock=self.clock,
            late=lambda: self.late,
        )

    async def probe(self):
        self.probes += 1
        self.probe_does()
        if self.blocked is not None:
            await self.blocked.wait()

    async def refresh(self):
        self.refreshed += 1

    def token(self, *workers):
        for worker in workers:
            worker.client.last_token_s = self.clock.now_s

    def count(self, result):
        return self.registry.get_sample_value("ridgeline_canaries_total", {"result": result})

    async def get(self):
        app = Starlette()
        app.add_route("/ready", ready_endpoint(self.readiness, lambda: self.draining), methods=["GET"])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            response = await client.get("/ready")
        return response.status_code, response.json()


@pytest.fixture
def deployment():
    return Deployment()


def fail():
    raise EngineFailed("the engine is gone")


async def test_a_probe_through_an_idle_deployment_makes_it_ready(deployment):
    deployment.probe_does = lambda: deployment.token(deployment.prefill, deployment.decode)
    pool = {"ready": True, "last_token_s_ago": 0.0}
    assert await deployment.get() == (200, {"ready": True, "pools": {"prefill": pool, "decode": pool}})
    assert (deployment.probes, deployment.count("ok")) == (1, 1)


async def test_tokens_of_real_requests_need_no_probe(deployment):
    deployment.token(deployment.prefill, deployment.decode)
    for after_s, probes in ((1.9, 0), (1.1, 1)):
        deployment.clock.now_s += after_s
        await deployment.get()
        assert deployment.probes == probes


LOST, DRAINED, GONE = {"usable": False}, {"usable": False, "leaves": True}, None


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "probes"),
    [
        pytest.param({}, LOST, 503, 1, id="decode is lost"),
        pytest.param(LOST, {}, 503, 1, id="prefill is lost"),
        pytest.param(LOST, LOST, 503, 0, id="both are lost"),
        pytest.param(DRAINED, {}, 200, 1, id="prefill was drained"),
        pytest.param(GONE, {}, 200, 1, id="prefill has left"),
        pytest.param({}, DRAINED, 200, 1, id="decode was drained"),
        pytest.param(DRAINED, DRAINED, 503, 0, id="both were drained"),
        pytest.param(DRAINED, LOST, 503, 0, id="one was drained and the other is lost"),
    ],
)
async def test_a_pool_without_workers_is_named_and_the_other_one_is_tried(deployment, prefill, decode, status, probes):
    states = {"prefill": prefill, "decode": decode}
    for pool, state in states.items():
        vars(getattr(deployment, pool)).update(state or {})
    there = {pool: [] if state is GONE else [getattr(deployment, pool)] for pool, state in states.items()}
    deployment.readiness._pools = lambda: there
    served = [getattr(deployment, pool) for pool, state in states.items() if state == {}]
    deployment.probe_does = lambda: deployment.token(*served)
    found, body = await deployment.get()
    assert (found, body["ready"], deployment.probes) == (status, status == 200, probes)
    for pool, state in states.items():
        told = body["pools"][pool]
        left_alone = [prefill, decode] != [DRAINED, DRAINED]  # else nobody serves what it does not
        assert told["ready"] is (state == {} or (state != LOST and left_alone))
        assert (told == {"ready": True, "last_token_s_ago": 0.0}) is (state == {})
    deployment.probe_does = fail
    deployment.clock.now_s += 10
    told = (await deployment.get())[1]["pools"]
    assert all("the engine is gone" in told[pool]["why"] for pool, state in states.items() if state == {})


async def test_the_pool_that_made_no_token_is_named_with_how_long_and_the_deadline():
    deployment = Deployment(deadline_s=0.01)
    deployment.token(deployment.decode)
    deployment.clock.now_s += 40
    deployment.blocked = asyncio.Event()
    deployment.probe_does = lambda: deployment.token(deployment.prefill)
    status, body = await deployment.get()
    assert (status, body["pools"]["prefill"]["ready"]) == (503, True)
    told = body["pools"]["decode"]
    assert (told["ready"], told["last_token_s_ago"]) == (False, 40.0)
    assert "router.ready_deadline_s" in told["why"]
    assert deployment.count("late") == 1


async def test_a_probe_that_fails_says_why(deployment):
    deployment.probe_does = fail
    status, body = await deployment.get()
    assert (status, deployment.count("failed")) == (503, 1)
    assert body["pools"]["prefill"]["why"].endswith("the engine is gone")


async def test_a_pool_busy_with_a_prompt_longer_than_the_deadline_is_ready():
    deployment = Deployment(deadline_s=0.01)
    deployment.token(deployment.decode)
    deployment.clock.now_s += 3
    deployment.blocked = asyncio.Event()
    deployment.prefill.status = WorkerStatus(worker_id="p", counters={"tokens_total.prefill": 512.0})

    def compute():
        deployment.token(deployment.decode)
        deployment.prefill.status = WorkerStatus(worker_id="p", counters={"tokens_total.prefill": 1024.0})

    deployment.probe_does = compute
    status, body = await deployment.get()
    assert (status, body["pools"]["prefill"]) == (200, {"ready": True})
    assert deployment.refreshed == 1


async def test_a_mode_that_changes_during_the_probe_is_judged_by_the_pools_of_the_new_one(deployment):
    def change():
        deployment.token(deployment.prefill, deployment.decode)
        deployment.readiness._pools = lambda: {"colocated": [deployment.prefill, deployment.decode]}

    deployment.probe_does = change
    assert await deployment.get() == (
        200,
        {"ready": True, "pools": {"colocated": {"ready": True, "last_token_s_ago": 0.0}}},
    )


async def test_many_askers_at_a_time_share_one_probe_and_its_verdict_for_a_second(deployment):
    deployment.blocked = asyncio.Event()
    asking = [asyncio.ensure_future(deployment.readiness.check()) for _ in range(20)]
    await asyncio.sleep(0)
    asking[0].cancel()
    await asyncio.sleep(0)
    deployment.blocked.set()
    verdicts = await asyncio.gather(*asking[1:])
    assert all(verdict["decode"] == PoolVerdict(True, None) for verdict in verdicts)
    deployment.clock.now_s += 0.9
    await deployment.readiness.check()
    assert deployment.probes == 1
    deployment.clock.now_s += 0.2
    await deployment.readiness.check()
    assert deployment.probes == 2


async def test_closing_it_ends_a_look_in_progress(deployment):
    deployment.blocked = asyncio.Event()
    asking = asyncio.ensure_future(deployment.readiness.check())
    await asyncio.sleep(0)
    deployment.readiness.check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


def test_a_probe_fits_where_a_block_is_as_wide_as_a_state():
    assert [probe_prompt_tokens(block, 1024) for block in (32, 544, 1024)] == [40, 680, 768]


@pytest.mark.parametrize("min_remote", [0, 3000], ids=["", "also where short prompts are not split"])
async def test_a_probe_is_a_block_of_a_new_prompt_through_both_pools(min_remote):
    bench = split(min_remote=min_remote)
    probe = HealthProbe(bench.orchestrator, vocabulary_size=100, prompt_tokens=probe_prompt_tokens(32, 4096))
    await probe()
    await probe()
    first, second = bench.client("prefill").tasks
    assert len(first.prompt_token_ids) == 40
    assert first.prompt_token_ids != second.prompt_token_ids
    assert first.request_id != second.request_id
    assert len(bench.client("decode").tasks) == 2
    bench.assert_idle()


async def test_a_probe_passes_prompts_that_wait():
    bench = split(prefill=[FOREVER])
    queue = bench.queues["prefill"]
    running = [asyncio.create_task(bench.run()) for _ in range(400)]  # each after the first one has its beginning
    await eventually(lambda: queue.waiting > 0)
    probe = asyncio.create_task(HealthProbe(bench.orchestrator, 100, 40)())
    await asyncio.sleep(0.01)
    assert queue._queue.pop().tokens == 40
    for task in (probe, *running):
        task.cancel()
    await asyncio.gather(probe, *running, return_exceptions=True)
    bench.assert_idle()


async def test_a_probe_is_in_no_series_about_requests_and_not_among_those_in_flight():
    bench = split(prefill=[ANNOUNCED, FIRST])
    once(bench.client("decode"), [WorkerLost("killed")], [FOREVER])
    probe = asyncio.create_task(HealthProbe(bench.orchestrator, 100, 40)())
    await eventually(lambda: len(bench.client("decode").tasks) == 2)
    assert bench.registry.get_sample_value("ridgeline_requests_in_flight") == 0
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    assert bench.registry.get_sample_value("ridgeline_requests_in_flight") == 0
    counted = {sample for metric in bench.registry.collect() for sample in metric.samples if sample.value}
    assert counted == set()


async def test_a_router_that_drains_is_not_ready_whatever_its_pools_do(deployment):
    deployment.draining = True
    status, told = await deployment.get()
    assert (status, told["ready"], deployment.probes) == (503, False, 0)


async def test_lost_workers_and_a_router_that_is_the_bottleneck_are_named_where_all_is_ready(deployment):
    deployment.token(deployment.prefill, deployment.decode)
    assert (await deployment.get())[1].keys() == {"ready", "pools"}
    deployment.late, deployment.readiness.away = "the bottleneck", lambda: {"worker-2": "lost"}
    status, body = await deployment.get()
    assert (status, body["router"], body["away"]) == (200, "the bottleneck", {"worker-2": "lost"})
