"""The state that the live page shows, of workers over real gRPC whose counters the test sets."""

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec
import pytest

from ridgeline.contracts.workers import StepModel
from ridgeline.router.live.samples import Text, bucket_quantile
from ridgeline.router.live.view import HELD_S, LiveView, Sources, slo_point
from ridgeline.router.observe.ended_requests import EndedRequests
from ridgeline.router.observe.loop_lag import LoopLag
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.observe.timeline import RequestTimeline
from ridgeline.router.settings import PoolHardware
from tests.support.clock import FakeClock
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT, router_settings
from tests.support.small_fleet import a_fleet, hosts

HARDWARE = {pool: PoolHardware("core", 1e12, 1e10, "measured") for pool in ("prefill", "decode")}


@dataclass
class Watched:
    """A view, and what it looks at."""

    view: LiveView
    clock: FakeClock
    engines: list
    fleet: object
    metrics: RequestMetrics
    text: Text

    async def after(self, seconds, **counters):
        """Have the worker of each pool count so much more, and take a sample so much later."""
        for engine in self.engines:
            for name, value in counters.get(engine.config.pool, {}).items():
                engine.stats.counters = engine.stats.counters | {name: engine.stats.counters.get(name, 0.0) + value}
        await self.fleet.refresh()
        self.clock.now_s += seconds
        self.view.sample()

    def ended(self, ttft_s, outcome="finished", limit_s=0.5):
        """Note a sequence of two tokens."""
        timeline = RequestTimeline(self.clock, "r", 10, "colocated", observe=self.metrics.observe, ttft_limit_s=limit_s)
        before_s = self.clock.now_s
        for gap_s in (ttft_s, 0.009):
            self.clock.now_s += gap_s
            timeline.tokens(1, "decode")
        self.clock.now_s = before_s
        self.metrics.close(timeline, outcome)


@contextlib.asynccontextmanager
async def watched(**settings):
    clock = FakeClock()
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT) as started,
        a_fleet([host.address for host in started]) as fleet,
    ):
        metrics, lag = RequestMetrics(None, ended=EndedRequests(clock)), LoopLag()
        one = Watched(None, clock, [host._engine for host in started], fleet, metrics, Text(0, 0))
        one.view = LiveView(
            Sources(
                settings=router_settings(**settings),
                fleet=fleet,
                metrics=metrics,
                lag=lag,
                text=lambda: one.text,
                queues=dict,
                hardware=lambda: HARDWARE,
                operation=lambda: None,
            ),
            clock,
        )
        yield one


DECODED = {
    "busy_seconds_total.decode": 5.0,
    "steps_total.decode": 500.0,
    "tokens_total.decode": 1000.0,
    "flops_total.decode": 4e11,
    "bytes_total.decode.weights": 3e10,
    "bytes_total.decode.kv_read": 1e10,
}


async def test_a_workers_point_in_the_roofline_is_that_of_its_last_steps():
    async with watched() as one:
        one.view.sample()
        await one.after(50.0, decode={name: value * 9 for name, value in DECODED.items()})
        await one.after(10.0, decode=DECODED)
        prefill, decode = one.view.state().pools
        (steps,) = decode.workers[0].steps
        assert (steps.step, steps.seconds, steps.busy_ratio) == ("decode", 0.01, 0.5)
        assert steps.intensity == pytest.approx(10.0)
        assert (steps.flops_per_s, steps.bytes_per_s) == pytest.approx((8e10, 8e9))
        assert (decode.mfu_ratio, decode.mbu_ratio, decode.bound) == pytest.approx((0.08, 0.8, "memory"))
        assert decode.tokens_per_s == 100.0
        assert steps.trail == [pytest.approx((10.0, 8e10))]
        assert prefill.workers[0].steps == []
        assert prefill.busy_ratio == 0.0


async def test_what_a_restarted_worker_counts_is_its_own():
    async with watched() as one:
        one.view.sample()
        await one.after(5.0, decode=DECODED)
        one.engines[1].stats.counters = {}
        one.fleet.get("decode-0").description = msgspec.structs.replace(
            one.fleet.get("decode-0").description, incarnation="other"
        )
        await one.after(5.0)
        assert all(rate >= 0 for rate in (one.view.state().pools[1].tokens_per_s, one.view.state().flow.kv_bytes_per_s))


async def test_a_worker_that_returns_to_a_pool_brings_none_of_its_former_counts(monkeypatch):
    async with watched() as one:
        one.view.sample()
        await one.after(10.0, decode={name: value * 60 for name, value in DECODED.items()})
        worker = one.fleet.get("decode-0")
        for pool in ("colocated", "decode"):
            worker.pool = pool
            await one.after(10.0, decode=DECODED)
        steps = one.view.state().pools[1].workers[0].steps[0]
        assert steps.busy_ratio == pytest.approx(0.5)


async def test_a_worker_that_was_missed_once_counts_for_the_time_that_it_was_seen():
    async with watched() as one:
        worker = one.fleet.get("decode-0")
        await one.fleet.refresh()
        status, worker.status = worker.status, None
        one.view.sample()
        worker.status = status
        await one.after(5.0)
        await one.after(5.0, decode=DECODED)
        assert one.view.state().pools[1].workers[0].steps[0].busy_ratio == pytest.approx(1.0)


async def test_one_that_leaves_or_comes_is_no_fault():
    async with watched() as one:
        worker = one.fleet.get("decode-0")
        for reason, state in (("held_back", "starting"), ("leaves", "draining")):
            setattr(worker, reason, True)
            await one.after(2.0)
            (row,) = one.view.state().pools[1].workers
            assert (row.state, one.view.state().history.events) == (state, [])


async def test_steps_longer_than_the_slo_miss_it_before_their_long_answers_have_ended():
    async with watched(tpot_ms=5.0) as one:
        one.engines[1].stats.running = 8
        one.view.sample()
        await one.after(10.0, decode={name: value * 2 for name, value in DECODED.items()})
        verdict = one.view.state().verdict
        assert (verdict.kind, verdict.resource, verdict.action.args) == ("bandwidth", "bandwidth", {"decode": 2})


async def test_what_nobody_looked_at_is_judged_anew():
    async with watched() as one:
        one.view.sample()
        one.text = Text(60_000, 30_000)
        one.ended(0.1)
        await one.after(10.0)
        assert one.view.state().verdict.kind == "router"
        one.ended(0.1)
        await one.after(3600.0)
        one.ended(0.1)
        await one.after(2.0)
        verdict = one.view.state().verdict
        assert (verdict.kind, verdict.since_s) == ("none", 0.0)


async def test_the_promise_is_of_what_clients_saw():
    async with watched(ttft_ms=500.0) as one:
        one.view.sample()
        for ttft_s in (0.1, 0.2, 0.7, 0.3):
            one.ended(ttft_s)
        one.ended(0.1, "failed")
        await one.after(10.0)
        promise = one.view.state().promise
        assert promise.slo.ttft_s == 0.5
        assert promise.ttft_s.p50 == pytest.approx(0.2)
        assert promise.ttft_attainment_ratio == pytest.approx(3 / 5)
        assert (promise.finished_per_s, promise.failed_per_s) == pytest.approx((0.4, 0.1))
        assert promise.itl_s.p90 <= 0.01
        assert promise.sequences == 5


async def test_a_stream_begins_with_all_and_goes_on_with_what_is_new():
    async with watched() as one:
        for _ in range(4):
            await one.after(6.0)
        states = one.view.stream()
        first = await anext(states)
        assert len(first.history.arrivals_per_s) == 4
        following = asyncio.ensure_future(anext(states))
        await asyncio.sleep(0)
        await one.after(2.0)
        second = await following
        assert (second.history, second.requests) == (None, None)
        following = asyncio.ensure_future(anext(states))
        await asyncio.sleep(0)
        await one.after(6.0)
        assert len((await following).history.arrivals_per_s) == 1
        await states.aclose()


async def test_a_lost_worker_and_the_first_request_are_told_at_once_and_nothing_else_before_it_holds():
    async with watched() as one:
        one.view.sample()
        await one.after(2.0)
        assert one.view.state().verdict.kind == "empty"
        one.ended(0.1)
        await one.after(2.0)
        assert one.view.state().verdict.kind == "none"
        one.text = Text(10_000, 5_000)
        one.ended(0.1)
        await one.after(2.0)
        assert one.view.state().verdict.kind == "none"
        one.text = Text(60_000, 30_000)
        one.ended(0.1)
        await one.after(HELD_S)
        assert one.view.state().verdict.kind == "router"
        one.engines[1].failed = True
        await eventually(lambda: one.fleet.get("decode-0").status.engine_failed)
        await one.after(1.0)
        verdict = one.view.state().verdict
        assert (verdict.kind, verdict.worker, verdict.since_s) == ("worker_lost", "decode-0", 0.0)
        await one.after(3.0)
        assert one.view.state().verdict.since_s == 3.0
        one.fleet.away = {"decode-0": "in restart back-off."}
        await one.after(2.0)
        (row,) = one.view.state().pools[1].workers
        assert (row.state, row.why) == ("away", "in restart back-off.")
        assert [mark.text for mark in one.view.state().history.events] == ["decode-0 lost"]


async def test_what_a_mode_is_for_is_forgotten_once_another_router_has_changed_the_mode():
    async with watched() as one:
        one.view.mode_is_for = "disaggregated", "compare: pair 2"
        for mode, told in (("disaggregated", "compare: pair 2"), ("colocated", ""), ("disaggregated", "")):
            one.fleet.mode = mode
            await one.after(2.0)
            assert one.view.state().deployment.mode_is_for == told


def test_the_point_of_the_slo_is_the_largest_batch_whose_step_is_short_enough():
    model = StepModel(
        base_s=0.01,
        per_prefill_token_s=0.0,
        per_sequence_s=0.001,
        per_context_token_s=1e-5,
        per_attended_token_s=0.0,
        steps=1000,
    )
    point = slo_point(model, 0.03, 100.0, 64, DECODED)
    assert point.batch == 10
    assert point.intensity == pytest.approx(10 * 4e8 / (6e7 + 10 * 1e7))
    assert slo_point(model, 0.03, 100.0, 4, DECODED).batch == 4
    assert slo_point(model, 0.001, 100.0, 64, DECODED) is None


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"0.1": 5.0, "0.2": 10.0, "+Inf": 10.0}, 0.1),
        ({"0.1": 0.0, "0.2": 10.0, "+Inf": 10.0}, 0.15),
        ({"0.1": 1.0, "0.2": 1.0, "+Inf": 10.0}, 0.2),
        ({"0.1": 0.0, "+Inf": 0.0}, None),
        ({}, None),
    ],
)
def test_a_quantile_of_buckets_is_prometheus_one(rates, expected):
    assert bucket_quantile(rates, 0.5) == (None if expected is None else pytest.approx(expected))
