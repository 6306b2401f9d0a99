"""The loop that scales pools, with a router's real log of operations and what carries them out; no workers."""

import asyncio
import contextlib
import math
from types import SimpleNamespace

import pytest

from ridgeline.cluster.config.autoscale import AutoscaleConfig
from ridgeline.cluster.runtime.autoscale import loop
from ridgeline.cluster.runtime.autoscale.loop import Autoscaler
from ridgeline.cluster.runtime.fleet_operations import OperationRunner, OperationSteps
from ridgeline.cluster.runtime.handles.actor import ActorGone
from ridgeline.cluster.runtime.services import RouterService
from ridgeline.router.front.operations import Operations, new_operation
from ridgeline.router.scheduler.offline_simulation import Served
from ridgeline.router.scheduler.sizing import LatestLoad
from tests.support.operated_fleet import OperatedFleet, OperatedWorker
from tests.support.patience import PATIENCE_S, eventually
from tests.support.simulated_serving import fleet_model

SETTINGS = {"mode": "act", "interval_s": 10, "decode": {"min_workers": 1, "max_workers": 3}}
PER_DECODE = 14
"""So many answers that come at once are as many as one worker decodes in time."""


class Fleet(OperatedFleet):
    """One prefill and one decode worker, of which the routers know how much they had to do."""

    def __init__(self):
        super().__init__(start=("prefill", "decode"))
        self.at_once = 40

    def load(self, window_s):
        usable = self.pool_of.keys() - self.lost - self.unusable
        pools = tuple(pool for name, pool in self.pool_of.items() if name in usable)
        requests = tuple(Served(0.0, 16, 64, math.inf, 0.08, None, None) for _ in range(self.at_once))
        return LatestLoad(self.mode, pools, fleet_model(len(pools)), requests, is_whole=True)

    @property
    def decode(self):
        return list(self.pool_of.values()).count("decode")


class Router:
    """A router's service, whose process may be away; it also leads."""

    def __init__(self, name, fleet):
        self.name, self.fleet, self.away, self.asked, self.wanted = name, fleet, False, 0, {}
        self.start()

    def start(self):
        self.service = RouterService()
        self.book = Operations()
        self.service._server = SimpleNamespace(
            take_operation=self.book.take,
            report=self._report,
            load=self._load,
            members=self.fleet.members,
            note_wanted=self._note_wanted,
            ended=False,
        )

    async def _load(self, window_s):
        return self.fleet.load(window_s)

    async def _report(self, progress):
        self.book.report(progress)

    async def _note_wanted(self, workers):
        self.wanted = workers

    def __getattr__(self, method):
        async def call(*arguments):
            if self.away:
                raise ActorGone(f"{self.name} ended")
            self.asked += method == "load"
            return await getattr(self.service, method)(*arguments)

        return call


class Deployment:
    """Operations and the loop, side by side; time goes on when a test says so."""

    def __init__(self, routers, **changes):
        self.fleet, self.said = Fleet(), []
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
            settings, self.routers[0], self.routers, self.fleet, self.operations, sleep=self._sleep
        )

    async def _sleep(self, seconds):
        self.waits.set()
        await self.rounds.get()

    async def rounds_of(self, number):
        """Let it decide so often, and let what it orders be carried out as far as that goes at once."""
        for _ in range(number):
            await self.waits.wait()
            self.waits.clear()
            self.rounds.put_nowait(None)
            await self.waits.wait()
            await asyncio.sleep(0.01)

    @property
    def scaled(self):
        return [sentence for sentence in self.said if "would meet their SLOs" in sentence]


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


async def test_a_pool_that_misses_slos_is_ordered_another_worker_as_an_operator_would_and_the_reason_is_on_record():
    async with running() as there:
        there.fleet.may_start.clear()
        await there.rounds_of(1)
        await eventually(lambda: there.routers[0].book.running)
        assert there.said[0] == "autoscale: decode may have 1 to 3 workers"
        assert there.routers[0].book.running.mode == "disaggregated", "it is for the mode in which it was decided"
        assert there.routers[0].wanted == {"decode": 3}, "all that it takes, of pools with bounds"
        await there.rounds_of(30)
        assert len(there.scaled) == 1, "it waits for its own operation as long as that takes"
        there.fleet.may_start.set()
        await eventually(lambda: there.fleet.decode == 2)
        await eventually(lambda: there.routers[0].book.last.state == "done")
        [sentence] = there.scaled
        for part in ("autoscale, decode from 1 to 2 workers", "40 requests", "decode=1", "autoscale.goal is 95%"):
            assert part in sentence
        assert there.routers[0].book.last.sentences[:2] == (sentence.partition(": ")[2], "worker-2: starting")


async def test_a_change_that_failed_is_begun_again_only_after_a_window_and_that_is_said_once():
    async with running() as there:
        there.fleet.room = 0
        await there.rounds_of(1)
        await eventually(lambda: there.routers[0].book.last and there.routers[0].book.last.state == "failed")
        await there.rounds_of(10)
        assert len([one for one in there.said if "autoscale, decode from 1 to 2" in one]) == 1
        assert len([one for one in there.said if "the last change failed" in one]) == 1
        there.fleet.room = 9
        await there.rounds_of(1)
        await eventually(lambda: there.fleet.decode == 2)


async def test_a_pool_with_too_many_loses_its_newest_worker():
    async with running() as there:
        there.fleet.pool_of["worker-2"] = "decode"
        there.fleet.at_once = PER_DECODE // 2
        await there.rounds_of(1)
        await eventually(lambda: there.fleet.log == ["drain worker-2 30"])
        await there.rounds_of(5)
        assert there.fleet.decode == 1


@pytest.mark.parametrize(("state", "decode"), [("lost", 2), ("unusable", 1), ("draining", 1)])
async def test_a_pool_grows_beside_a_worker_that_is_lost_and_not_while_one_comes_or_goes(state, decode):
    async with running() as there:
        there.fleet.pool_of["worker-2"] = "prefill"
        getattr(there.fleet, state).add("worker-2")
        await there.rounds_of(1)
        await eventually(lambda: there.fleet.decode == decode)
        assert len(there.scaled) == decode - 1


async def test_who_only_wants_advice_gets_the_sentence_once_and_no_operation():
    async with running(mode="advise") as there:
        await there.rounds_of(3)
        assert [one.startswith("autoscale: advises decode from 1 to 2 workers") for one in there.scaled] == [True]
        assert not there.operations.under_way
        assert there.fleet.decode == 1


async def test_why_nothing_can_be_done_is_said_once():
    async with running(decode={"min_workers": 1, "max_workers": 1}) as there:
        await there.rounds_of(3)
        assert len([sentence for sentence in there.said if "autoscale.decode.max_workers" in sentence]) == 1


async def test_simulations_that_take_too_long_are_given_up_and_that_is_said(monkeypatch):
    monkeypatch.setattr(loop, "FOUND_WITHIN_S", 0.0)
    async with running() as there:
        await there.rounds_of(3)
        assert len([sentence for sentence in there.said if "the simulation took more than 0 s" in sentence]) == 1
        assert there.routers[0].wanted == {"decode": 1}
        assert there.fleet.log == []


async def test_a_simulation_that_fails_decides_nothing_and_ends_nothing(monkeypatch):
    def failing(*_):
        raise ZeroDivisionError("an installed policy")
        yield

    monkeypatch.setattr(loop, "wanted", failing)
    async with running() as there:
        await there.rounds_of(3)
        assert len([sentence for sentence in there.said if "ZeroDivisionError: an installed policy" in sentence]) == 1
        assert there.fleet.log == []


async def test_by_default_nobody_is_asked_and_the_others_go_on():
    async with running(mode="none") as there:
        await asyncio.sleep(0.02)
        assert there.routers[0].asked == 0


async def test_nothing_is_ordered_while_an_operators_operation_is_under_way():
    async with running() as there:
        there.fleet.may_start.clear()
        await there.routers[0].book.begin(new_operation("scale", 30.0, {"decode": 2}))
        assert there.operations.under_way
        await there.rounds_of(5)
        assert there.scaled == []
        there.fleet.may_start.set()
        await eventually(lambda: not there.operations.under_way)
        await there.rounds_of(1)
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
        there.routers[0].away = True
        await there.rounds_of(5)
        assert there.said == []
        there.routers[0].start()
        there.routers[0].away = False
        await there.rounds_of(1)
        await eventually(lambda: len(there.scaled) == 1)


async def test_all_routers_are_told_how_many_are_wanted_but_for_one_that_is_away():
    async with running(routers=3, mode="advise") as there:
        there.routers[1].away = True
        await there.rounds_of(1)
        assert [router.wanted for router in there.routers] == [{"decode": 3}, {}, {"decode": 3}]


@pytest.mark.parametrize("bounds", [{}, {"adaptive": {"min_workers": 1, "max_workers": 4}}])
async def test_after_a_change_of_mode_it_is_said_what_is_scaled_or_that_nothing_is(bounds):
    async with running(**bounds, mode="advise") as there:
        await there.rounds_of(1)
        there.fleet.mode, there.said[:] = "adaptive", []
        there.fleet.pool_of = dict.fromkeys(there.fleet.pool_of, "adaptive")
        await there.rounds_of(1)
        told = there.said[0]
        assert ("adaptive may have 1 to 4 workers" if bounds else "set autoscale.adaptive.min_workers") in told
        assert len(there.scaled) == bool(bounds)


async def test_it_ends_when_it_is_cancelled():
    there = Deployment(1)
    task = asyncio.create_task(there.autoscaler.run(there.said.append))
    await there.waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
