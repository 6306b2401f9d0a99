"""The loop that scales pools, with a router's real log of operations and what carries them out; no workers."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from ridgeline.cluster.config.autoscale import AutoscaleConfig
from ridgeline.cluster.runtime.autoscale.loop import Autoscaler
from ridgeline.cluster.runtime.fleet_operations import OperationRunner, OperationSteps
from ridgeline.cluster.runtime.handles.actor import ActorGone
from ridgeline.cluster.runtime.services import RouterService
from ridgeline.router.front.operations import Operations, new_operation
from ridgeline.router.observe.fleet_use import FleetUse, WorkerUse
from ridgeline.router.observe.metrics import Within
from tests.support.clock import FakeClock
from tests.support.operated_fleet import OperatedFleet, OperatedWorker
from tests.support.patience import PATIENCE_S, eventually

SETTINGS = {
    "mode": "act",
    "interval_s": 10,
    "up_after_s": 20,
    "down_after_s": 40,
    "cooldown_s": 30,
    "drain_timeout_s": 7,
    "decode": {"min_workers": 1, "max_workers": 3},
}


class Fleet(OperatedFleet):
    """One prefill and one decode worker, of which the routers know how much they have to do."""

    def __init__(self):
        super().__init__(start=("prefill", "decode"))
        self.taken = 0.9
        self.hidden = set()

    def use(self):
        return FleetUse(
            tuple(
                WorkerUse(name, "1", pool, usable=True, running=round(self.taken * 100), places=100)
                for name, pool in self.pool_of.items()
                if name not in self.hidden
            ),
            mode=self.mode,
        )

    @property
    def decode(self):
        return list(self.pool_of.values()).count("decode")


class Router:
    """A router's service, whose process may be away; it also leads."""

    def __init__(self, name, fleet):
        self.name, self.fleet, self.away, self.asked = name, fleet, False, 0
        self.kept, self.counted = 0, 0
        self.start()

    def start(self):
        self.service = RouterService()
        self.book = Operations()
        self.service._server = SimpleNamespace(
            take_operation=self.book.take, report=self._report, use=self._use, within=self._within, ended=False
        )

    async def _use(self):
        return self.fleet.use()

    async def _report(self, progress):
        self.book.report(progress)

    async def _within(self, limits_s):
        return {latency: Within(limit_s, self.kept, self.counted) for latency, limit_s in limits_s.items()}

    def __getattr__(self, method):
        async def call(*arguments):
            if self.away:
                raise ActorGone(f"{self.name} ended")
            self.asked += method == "use"
            return await getattr(self.service, method)(*arguments)

        return call


class Deployment:
    """Operations and the loop, side by side; time goes on when a test says so."""

    def __init__(self, routers, **changes):
        self.fleet, self.said, self.clock = Fleet(), [], FakeClock()
        self.routers = [Router(f"router-{number}", self.fleet) for number in range(routers)]
        steps = OperationSteps(
            self.fleet,
            self.fleet,
            lambda name, pool: OperatedWorker(self.fleet, name, pool),
            start_within_s=PATIENCE_S,
            lease_s=30.0,
        )
        self.operations = OperationRunner(self.routers, steps.carry_out)
        self.rounds, self.waits = asyncio.Queue(), asyncio.Event()
        settings = AutoscaleConfig.model_validate(SETTINGS | changes)
        self.autoscaler = Autoscaler(
            settings, self.routers[0], self.routers, self.fleet, self.operations, clock=self.clock, sleep=self._sleep
        )

    async def _sleep(self, seconds):
        self.waits.set()
        await self.rounds.get()
        self.clock.now_s += seconds

    async def rounds_of(self, number):
        """Let it read so often, and let what it operations be carried out as far as that goes at once."""
        for _ in range(number):
            await self.waits.wait()
            self.waits.clear()
            self.rounds.put_nowait(None)
            await self.waits.wait()
            await asyncio.sleep(0.01)

    @property
    def scaled(self):
        return [sentence for sentence in self.said if "it has needed" in sentence]


@contextlib.asynccontextmanager
async def running(routers=1, **changes):
    there = Deployment(routers, **changes)
    tasks = [asyncio.create_task(one.run(there.said.append)) for one in (there.operations, there.autoscaler)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield there
        assert not any(task.done() for task in tasks) or there.autoscaler._settings.mode == "none"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_full_pool_is_ordered_another_worker_as_an_operator_would_and_the_reason_is_on_record():
    async with running() as there:
        await there.rounds_of(2)
        assert there.said == ["autoscale: decode has 1 to 3 workers"]
        there.fleet.may_start.clear()
        await there.rounds_of(1)
        await eventually(lambda: there.routers[0].book.running)
        assert there.routers[0].book.running.mode == "disaggregated", "it is for the mode in which it was decided"
        await there.rounds_of(30)
        assert len(there.scaled) == 1, "it waits for its own operation as long as that takes"
        there.fleet.may_start.set()
        await eventually(lambda: there.fleet.decode == 2)
        await eventually(lambda: there.routers[0].book.last.state == "done")
        [sentence] = there.scaled
        for part in (
            "autoscale, decode from 1 to 2 workers",
            "for 20 s",
            "90% of its places",
            "autoscale.up_use is 80%",
        ):
            assert part in sentence
        assert there.routers[0].book.last.sentences[:2] == (sentence.partition(": ")[2], "worker-2: starting")


async def test_an_idle_pool_loses_its_newest_worker_with_the_configured_time():
    async with running() as there:
        there.fleet.pool_of["worker-2"] = "decode"
        there.fleet.taken = 0.1
        await there.rounds_of(4)
        assert there.fleet.log == []
        await there.rounds_of(1)
        await eventually(lambda: there.fleet.log == ["drain worker-2 7"])
        await there.rounds_of(20)
        assert there.fleet.decode == 1


@pytest.mark.parametrize(
    ("pool", "hidden", "lost", "decode"),
    [
        pytest.param({"worker-2": "prefill"}, {"worker-2"}, {"worker-2"}, 2, id="tried_again_for_long"),
        pytest.param({}, {"worker-0"}, set(), 1, id="not_known_yet"),
    ],
)
async def test_a_pool_grows_although_routers_miss_workers_that_are_lost_and_not_if_they_miss_others(
    pool, hidden, lost, decode
):
    async with running() as there:
        there.fleet.pool_of |= pool
        there.fleet.hidden, there.fleet.lost = hidden, lost
        await there.rounds_of(3)
        await eventually(lambda: there.fleet.decode == decode)
        assert len(there.scaled) == decode - 1


async def test_who_only_wants_advice_gets_the_sentence_and_no_operation():
    async with running(mode="advise") as there:
        await there.rounds_of(3)
        assert [one.startswith("autoscale advises decode from 1 to 2 workers") for one in there.scaled] == [True]
        await there.rounds_of(3)
        assert len(there.scaled) == 2, "again after the cooldown"
        assert not there.operations.under_way
        assert there.fleet.decode == 1


async def test_by_default_nobody_is_asked_and_the_others_go_on():
    async with running(mode="none") as there:
        await asyncio.sleep(0.02)
        assert there.routers[0].asked == 0


async def test_nothing_is_ordered_while_an_operators_operation_is_under_way_which_counts_as_a_change():
    async with running() as there:
        there.fleet.may_start.clear()
        await there.routers[0].book.begin(new_operation("scale", 30.0, {"decode": 2}))
        assert there.operations.under_way
        await there.rounds_of(20)
        assert there.scaled == []
        there.fleet.may_start.set()
        await eventually(lambda: not there.operations.under_way)
        await there.rounds_of(2)
        assert there.scaled == [], "the cooldown"
        await there.rounds_of(3)
        await eventually(lambda: there.fleet.decode == 3)


async def test_an_operation_that_was_decided_before_another_change_is_void():
    async with running() as there:
        late = new_operation("scale", 30.0, {"decode": 2}, decided_at={"decode": 3})
        assert there.operations.begin(late)
        await eventually(lambda: not there.operations.under_way)
        assert "decode has 1 workers" in there.said[-1]
        assert there.fleet.decode == 1


async def test_a_router_that_is_started_again_is_asked_again_and_nothing_is_said_meanwhile():
    async with running() as there:
        await there.rounds_of(2)
        there.routers[0].away = True
        await there.rounds_of(10)
        assert there.scaled == []
        there.routers[0].start()
        there.routers[0].away = False
        await there.rounds_of(2)
        assert there.scaled == [], "it is not known whether the pool was full meanwhile"
        await there.rounds_of(1)
        assert len(there.scaled) == 1


@pytest.mark.parametrize("bounds", [{}, {"adaptive": {"min_workers": 1, "max_workers": 4}}])
async def test_after_a_change_of_mode_it_is_said_what_is_scaled_or_that_nothing_is(bounds):
    async with running(**bounds) as there:
        await there.rounds_of(2)
        there.fleet.mode = "adaptive"
        there.fleet.pool_of = dict.fromkeys(there.fleet.pool_of, "adaptive")
        await there.rounds_of(2)
        [told] = there.said[1:]
        assert ("adaptive has 1 to 4 workers" if bounds else "set autoscale.adaptive.min_workers") in told
        await there.rounds_of(5)  # the cooldown after a change of pools, and the time for which more is needed
        assert len(there.scaled) == bool(bounds)


@pytest.mark.parametrize("away", [False, True])
async def test_limits_are_judged_by_all_routers_that_answer(away):
    async with running(routers=2, tpot_slo_ms=50) as there:
        there.fleet.taken = 0.5
        for _ in range(4):
            for router in there.routers:
                router.counted += 20
            there.routers[0].kept += 20
            there.routers[1].away = away
            await there.rounds_of(1)
        if away:  # all of those that are known were in time
            assert there.scaled == []
        else:
            assert "now 50% of 40 sequences took at most 50 ms per token" in there.scaled[0]


async def test_it_ends_when_it_is_cancelled():
    there = Deployment(1)
    task = asyncio.create_task(there.autoscaler.run(there.said.append))
    await there.waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
