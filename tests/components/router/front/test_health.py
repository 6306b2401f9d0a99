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


async def test_a_router_that_is_the_bottleneck_says_so_and_stays_ready(deployment):
    deployment.token(deployment.prefill, deployment.decode)
    assert "router" not in (await deployment.get())[1]
    deployment.late = "this router is the bottleneck"
    status, body = await deployment.get()
    assert (status, body["router"]) == (200, "this router is the bottleneck")


async def test_a_probe_through_an_idle_deployment_makes_it_ready(deployment):
    deployment.probe_does = lambda: deployment.token(deployment.prefill, deployment.decode)
    status, body = await deployment.get()
    pool = {"ready": True, "last_token_s_ago": 0.0}
    assert (status, body) == (200, {"ready": True, "pools": {"prefill": pool, "decode": pool}})
    assert (deployment.probes, deployment.count("ok")) == (1, 1)


async def test_tokens_of_real_requests_need_no_probe(deployment):
    deployment.token(deployment.prefill, deployment.decode)
    deployment.clock.now_s += 1.9
    assert (await deployment.get())[0] == 200
    assert deployment.probes == 0
    deployment.clock.now_s += 1.1
    await deployment.get()
    assert deployment.probes == 1


async def test_a_pool_without_a_worker_is_named_at_once(deployment):
    deployment.token(deployment.prefill)
    deployment.decode.usable = False
    status, body = await deployment.get()
    assert (status, body["ready"], deployment.probes) == (503, False, 0)
    assert body["pools"]["prefill"]["ready"] is True
    assert body["pools"]["decode"] == {"ready": False, "why": "no worker is connected and accepting work"}


@pytest.mark.parametrize(("lost", "left"), [("prefill", "decode"), ("decode", "prefill")])
async def test_the_pool_that_is_left_is_tried_and_judged_when_the_other_one_is_lost(deployment, lost, left):
    getattr(deployment, lost).usable = False
    deployment.probe_does = lambda: deployment.token(getattr(deployment, left))
    status, body = await deployment.get()
    assert (status, deployment.probes) == (503, 1)
    assert body["pools"][lost] == {"ready": False, "why": "no worker is connected and accepting work"}
    assert body["pools"][left] == {"ready": True, "last_token_s_ago": 0.0}

    def fail():
        raise EngineFailed("the engine is gone")

    deployment.probe_does = fail
    deployment.clock.now_s += 10
    body = (await deployment.get())[1]
    assert "the health probe failed: the engine is gone" in body["pools"][left]["why"]


async def test_no_probe_is_sent_where_no_pool_has_a_worker(deployment):
    deployment.prefill.usable = deployment.decode.usable = False
    status, body = await deployment.get()
    assert (status, deployment.probes) == (503, 0)
    assert {pool["why"] for pool in body["pools"].values()} == {"no worker is connected and accepting work"}


async def test_a_prefill_pool_that_was_drained_leaves_a_server_that_is_ready_and_says_what_it_lacks(deployment):
    deployment.prefill.usable, deployment.prefill.leaves = False, True
    for prefill in ([deployment.prefill], []):
        deployment.readiness._pools = lambda prefill=prefill: {"prefill": prefill, "decode": [deployment.decode]}
        deployment.probe_does = lambda: deployment.token(deployment.decode)
        status, body = await deployment.get()
        assert (status, body["ready"]) == (200, True)
        assert body["pools"]["prefill"] == {
            "ready": True,
            "why": "all of its workers were drained or have left; those of the other pool serve whole requests",
        }
        deployment.clock.now_s += 10
    assert deployment.probes == 2, "decode is tried all the same"
    deployment.decode.usable = False
    deployment.clock.now_s += 10
    assert (await deployment.get())[0] == 503


async def test_a_decode_pool_that_was_drained_leaves_a_server_that_is_ready_too(deployment):
    deployment.decode.usable, deployment.decode.leaves = False, True
    deployment.token(deployment.prefill)
    status, answer = await deployment.get()
    assert status == 200
    assert "serve whole requests" in answer["pools"]["decode"]["why"]


async def test_a_server_whose_workers_were_all_drained_is_not_ready(deployment):
    for worker in (deployment.prefill, deployment.decode):
        worker.usable, worker.leaves = False, True
    status, answer = await deployment.get()
    assert status == 503
    assert not any(pool["ready"] for pool in answer["pools"].values())


async def test_the_pool_that_made_no_token_is_named_with_how_long_and_the_deadline():
    deployment = Deployment(deadline_s=0.01)
    deployment.token(deployment.decode)
    deployment.clock.now_s += 40
    deployment.blocked = asyncio.Event()
    deployment.probe_does = lambda: deployment.token(deployment.prefill)
    status, body = await deployment.get()
    assert (status, body["pools"]["prefill"]["ready"]) == (503, True)
    assert body["pools"]["decode"] == {
        "ready": False,
        "last_token_s_ago": 40.0,
        "why": "no token for 40 s: the health probe did not end within router.ready_deadline_s (0.01 s)",
    }
    assert deployment.count("late") == 1


async def test_a_probe_that_fails_says_why(deployment):

    def fail():
        raise EngineFailed("the engine of prefill-0 is gone")

    deployment.probe_does = fail
    status, body = await deployment.get()
    assert status == 503
    why = "no token since the start: the health probe failed: the engine of prefill-0 is gone"
    assert body["pools"]["prefill"] == {"ready": False, "why": why}
    assert deployment.count("failed") == 1


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


async def test_a_probe_is_two_tokens_of_a_new_prompt_before_all_that_wait_through_both_pools():
    bench = split()
    probe = HealthProbe(bench.orchestrator, vocabulary_size=100, prompt_tokens=probe_prompt_tokens(32))
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


def test_a_probe_hands_a_block_over_and_is_no_longer_than_that_needs():
    assert probe_prompt_tokens(32) == 40


async def test_a_probe_is_short_and_goes_through_both_pools_also_where_short_prompts_do_not():
    bench = split(min_remote=3000)
    await HealthProbe(bench.orchestrator, vocabulary_size=100, prompt_tokens=probe_prompt_tokens(32))()
    assert [len(task.prompt_token_ids) for task in bench.client("prefill").tasks] == [40]
    assert len(bench.client("decode").tasks) == 1


async def test_a_probe_is_in_no_series_about_requests_and_not_among_those_in_flight():
    bench = split(prefill=[ANNOUNCED, FIRST])
    once(bench.client("decode"), [WorkerLost("killed")], [FOREVER])
    probe = asyncio.create_task(HealthProbe(bench.orchestrator, 100, 40)())
    await eventually(lambda: len(bench.client("decode").tasks) == 2)
    assert bench.orchestrator.in_flight == 0
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    assert bench.orchestrator.in_flight == 0
    counted = {sample for metric in bench.registry.collect() for sample in metric.samples if sample.value}
    assert counted == set()


async def test_a_router_that_drains_is_not_ready_whatever_its_pools_do(deployment):
    deployment.draining = True
    status, told = await deployment.get()
    assert (status, told["ready"], "shutting down" in told["why"]) == (503, False, True)
    assert deployment.probes == 0


async def test_workers_that_are_lost_again_and_again_are_named_whether_it_is_ready_or_not(deployment):
    deployment.token(deployment.prefill, deployment.decode)
    away = {"worker-2": "in restart back-off: lost more than 5 times within 300 s of service"}
    deployment.readiness.away = lambda: away
    status, body = await deployment.get()
    assert (status, body["away"]) == (200, away)
    deployment.readiness.away = dict
    assert "away" not in (await deployment.get())[1]
