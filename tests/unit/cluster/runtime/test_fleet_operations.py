"""Operators' operations: who is started, who leaves and when, and what is told about it; with workers that are none."""

import asyncio
import contextlib
import dataclasses

import pytest

from ridgeline.cluster.commands.operators import wanted_workers
from ridgeline.cluster.runtime.fleet_operations import LEAD_BACK_WITHIN_S, OperationRunner, OperationSteps
from ridgeline.cluster.runtime.handles.actor import ActorGone, DeploymentFailed
from ridgeline.router.front.operations import NotTaken, OperationRuns, Operations, Progress, new_operation
from tests.support.clock import FakeClock
from tests.support.operated_fleet import OperatedFleet, OperatedWorker
from tests.support.patience import PATIENCE_S, eventually

START_WITHIN_S = 2 * PATIENCE_S


class Router:
    """A router behind calls that fail while its process is away, or whose answers get lost."""

    def __init__(self):
        self.book = Operations()
        self.away = False
        self.mode, self.told = "disaggregated", None
        self._ends = asyncio.Event()
        self.lost_answers = 0
        """So many answers to `take_operation` that have something, and to reports of an end, do not arrive."""

    async def take_operation(self, within_s, cancelling):
        self._refuse()
        ends = asyncio.ensure_future(self._ends.wait())
        taking = asyncio.ensure_future(self.book.take(within_s, cancelling))
        try:
            await asyncio.wait((ends, taking), return_when=asyncio.FIRST_COMPLETED)
            if ends.done():
                raise ActorGone("router ended")
            self._lose(taking.result().operation is not None or taking.result().cancels not in ("", cancelling))
            self.told = self.mode
            return dataclasses.replace(taking.result(), mode=self.told)
        finally:
            ends.cancel()
            taking.cancel()

    def start_again(self):
        """End, with all that it knows, and be there again at once."""
        self._ends.set()
        self.book, self._ends = Operations(), asyncio.Event()

    async def report(self, progress):
        self._refuse()
        self.book.report(progress)
        self._lose(not progress.is_open)

    def _refuse(self):
        if self.away:
            raise ActorGone("router ended")

    def _lose(self, matters):
        if matters and self.lost_answers:
            self.lost_answers -= 1
            raise DeploymentFailed("router did not finish within 25 s")


def desk_of(routers, fleet, start_within_s=START_WITHIN_S, lease_s=30.0, **options):
    steps = OperationSteps(
        fleet, fleet, lambda name, pool: OperatedWorker(fleet, name, pool), start_within_s, lease_s, **options
    )
    return OperationRunner(routers, steps.carry_out)


@contextlib.asynccontextmanager
async def serving(fleet, routers=1, **options):
    """Run operations over this fleet; yields the routers."""
    there = [Router() for _ in range(routers)]
    running = asyncio.create_task(desk_of(there, fleet, **options).run(lambda _: None))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield there
    finally:
        running.cancel()
        await asyncio.wait((running,))


async def begun(router, asked, timeout_s=30.0):
    """Begin the operation that an operator would: a restart, or so many workers, in the mode in which tests begin."""
    restarts = asked == "restart"
    mode = None if restarts else "disaggregated"
    operation = new_operation("restart" if restarts else "scale", timeout_s, {} if restarts else asked, mode=mode)
    await router.book.begin(operation, PATIENCE_S)
    return operation


async def until_told(router, operation, sentence):
    """Wait until the router knows that an operation is so far."""
    assert router.book.last.operation == operation
    await eventually(lambda: any(sentence in said for said in router.book.last.sentences))


async def ended(router, operation):
    """How an operation ended."""
    await eventually(lambda: (known := router.book.last) and known.operation == operation and not known.is_open)
    return router.book.last


async def done(router, asked, timeout_s=30.0):
    """Begin it, and how it ended."""
    return await ended(router, await begun(router, asked, timeout_s))


async def test_a_change_of_mode_is_said_once_by_whichever_router_it_was_asked_for_and_not_at_the_start():
    routers, said = [Router(), Router()], []
    running = asyncio.create_task(desk_of(routers, OperatedFleet()).run(said.append))
    try:
        for mode in ("disaggregated", "colocated", "colocated", "disaggregated"):
            for router in routers:
                router.mode = mode
                router.book.wake()
            await eventually(lambda mode=mode: all(router.told == mode for router in routers))
    finally:
        running.cancel()
        await asyncio.wait((running,))
    assert said == [
        "the mode is colocated now, and was disaggregated",
        "the mode is disaggregated now, and was colocated",
    ]


def all_said(progress, parts):
    said = iter(progress.sentences)
    return all(any(part in sentence for sentence in said) for part in parts)


PAIR, TWO = ["prefill", "decode"], ["decode", "decode"]
REFUSED = "worker-2 (decode) and worker-0 (prefill) cannot exchange KV: model"


def case(name, start, asked, log, *said, state="done", **fleet):
    """An operation on a fleet with these workers that is so: what is done, and what is said of it."""
    return pytest.param(start, asked, log, said, state, fleet, id=name)


@pytest.mark.parametrize(
    ("start", "asked", "log", "said", "state", "fleet"),
    [
        case(
            "starts_what_is_missing",
            PAIR,
            {"prefill": 3},
            ["add worker-2:1", "add worker-3:1"],
            *("begins", "worker-2: starting", "prefill has 3 workers"),
        ),
        case(
            "has_the_newest_leave_after_the_new_ones_serve",
            ["prefill", "prefill", "prefill", "decode"],
            {"prefill": 1, "decode": 2},
            ["add worker-4:1", "drain worker-2 7", "drain worker-1 7"],
        ),
        case(
            "has_them_leave_first_if_there_is_no_room",
            ["prefill", "prefill", "decode"],
            {"prefill": 1, "decode": 2},
            ["retire worker-3", "drain worker-1 7", "add worker-4:1"],
            "there is room now",
            room=0,
        ),
        case(
            "finds_no_place", PAIR, {"decode": 2}, ["retire worker-2"], "no place for worker-2", state="failed", room=0
        ),
        case("is_refused", PAIR, {"decode": 2}, ["retire worker-2"], REFUSED, state="failed", refuses=REFUSED),
        case(
            "restarts_one_after_the_other", TWO, "restart", ["drain worker-0 7", "drain worker-1 7"], "2 workers of 2"
        ),
        case(
            "gives_up_first_what_does_not_run",
            ["prefill", "decode", "decode", "decode"],
            {"decode": 1},
            ["dismiss worker-1", "drain worker-3 7"],
            *("worker-1: does not run", "decode has 1 worker"),
            lost={"worker-1"},
        ),
        case(
            "keeps_the_one_that_serves",
            ["decode"] * 3,
            {"decode": 1},
            ["dismiss worker-1", "dismiss worker-0"],
            lost={"worker-0", "worker-1"},
        ),
        case("drains_first_what_is_unusable", TWO, {"decode": 1}, ["drain worker-0 7"], unusable={"worker-0"}),
        case("gives_up_what_is_not_reached", TWO, {"decode": 1}, ["dismiss worker-0"], partitioned={"worker-0"}),
        case("counts_none_that_drains", TWO, {"decode": 1}, [], draining={"worker-1"}),
        case("replaces_one_that_drains", TWO, {"decode": 2}, ["add worker-2:1"], draining={"worker-1"}),
        case(
            "restarts_not_the_only_one_that_serves",
            ["colocated"] * 3,
            "restart",
            [],
            "worker-0 is the only worker that serves now",
            state="failed",
            lost={"worker-1"},
            unusable={"worker-2"},
        ),
        case(
            "restarts_nothing_that_is_started_again_anyway_or_leaves",
            ["colocated"] * 4,
            "restart",
            ["drain worker-0 7", "drain worker-3 7"],
            "2 workers of 4",
            lost={"worker-1"},
            draining={"worker-2"},
        ),
        case(
            "restarts_nothing_that_it_could_not_drain",
            ["decode"] * 3,
            "restart",
            ["drain worker-0 7", "drain worker-2 7"],
            *("worker-1: was not told to drain", "2 workers of 3"),
            partitioned={"worker-1"},
        ),
        case("orders_no_drain_twice", TWO, {"decode": 1}, ["drain worker-1 7"], "decode has 1 worker", lost_answers=1),
        case(
            "restarts_nothing_twice",
            TWO,
            "restart",
            ["drain worker-0 7", "drain worker-1 7"],
            "2 workers of 2",
            lost_answers=1,
        ),
        case("survives_that_the_leader_is_away_for_a_while", TWO, {"decode": 1}, ["drain worker-1 7"], away=1),
        case(
            "is_void_in_another_mode",
            PAIR,
            {"prefill": 1, "decode": 1},  # nothing to do in its mode
            [],
            "serves colocated now",
            state="failed",
            mode="colocated",
        ),
    ],
)
async def test_an_operation(start, asked, log, said, state, fleet):
    there = OperatedFleet(start=start)
    vars(there).update(fleet)
    async with serving(there) as (router,):
        progress = await done(router, asked, 7.0)
        assert (progress.state, there.log) == (state, log)
        assert all_said(progress, said), progress.sentences
        assert not there.come_back


async def test_new_workers_get_names_that_no_other_has_had():
    fleet = OperatedFleet(start=PAIR)
    async with serving(fleet) as (router,):
        for wanted in (3, 1, 2):
            await done(router, {"prefill": wanted})
        assert set(fleet.pool_of) == {"worker-0", "worker-1", "worker-4"}


# --- one at a time


async def test_one_operation_is_under_way_at_a_time_and_any_router_says_which_and_how_it_goes_on():
    fleet = OperatedFleet(start=PAIR)
    fleet.may_start.clear()
    async with serving(fleet, routers=2) as (first, second):
        operation = await begun(first, {"decode": 2})
        for router in (first, second):
            with pytest.raises(OperationRuns, match=operation.operation_id):
                await begun(router, "restart")
        fleet.may_start.set()
        assert (await ended(second, operation)).state == (await ended(first, operation)).state == "done"
        assert (await ended(first, await begun(second, {"decode": 3}))).state == "done"


async def test_of_two_that_two_routers_are_given_at_once_one_is_refused():
    fleet = OperatedFleet(start=PAIR)
    fleet.may_start.clear()
    async with serving(fleet, routers=2) as routers:
        given = [asyncio.create_task(begun(router, {"decode": 2})) for router in routers]
        await asyncio.wait(given)
        assert [type(task.exception()) for task in given].count(OperationRuns) == 1


async def test_it_is_known_whether_an_operation_is_under_way():
    router, told = Router(), []
    operations = desk_of([router], OperatedFleet(start=PAIR))
    running = asyncio.create_task(operations.run(lambda sentence: told.append(operations.under_way)))
    assert not operations.under_way
    for wanted in (2, 3):
        await done(router, {"decode": wanted})
    await asyncio.sleep(0)
    assert not operations.under_way
    assert all(told)
    running.cancel()
    await asyncio.wait((running,))


async def test_an_operation_that_no_driver_takes_up_is_told_and_leaves_room_for_another():
    book = Operations()
    for _ in range(2):
        with pytest.raises(NotTaken):
            await book.begin(new_operation("restart", 1.0, {}), 0.01)
    assert book.last is None


def test_what_arrives_late_does_not_bring_back_an_operation_that_has_ended():
    book, operation = Operations(), new_operation("restart", 1.0, {})
    for state, number in (("running", 1), ("done", 3), ("running", 2)):
        book.report(Progress(operation, state, number=number))
    assert (book.last.state, book.running) == ("done", None)


# --- every operation ends


async def test_a_worker_that_has_loaded_when_the_mode_is_another_one_is_not_added():
    fleet = OperatedFleet(start=PAIR)
    fleet.may_start.clear()
    async with serving(fleet) as (router,):
        operation = await begun(router, {"decode": 2})
        await until_told(router, operation, "worker-2: starting")
        fleet.mode = "colocated"
        fleet.may_start.set()
        assert (await ended(router, operation)).state == "failed"
        assert fleet.log == ["retire worker-2"]


@pytest.mark.parametrize(("lease_s", "state"), [(2 * PATIENCE_S, "done"), (0.0, "failed")])
async def test_a_worker_whose_kv_is_needed_for_a_long_lease_is_waited_for(monkeypatch, lease_s, state):
    monkeypatch.setattr("ridgeline.cluster.runtime.fleet_operations.BEYOND_LEASE_S", 0.0)
    fleet = OperatedFleet(start=TWO)
    fleet.may_leave.clear()
    async with serving(fleet, lease_s=lease_s) as (router,):
        operation = await begun(router, {"decode": 1}, 0.0)
        await eventually(lambda: fleet.draining)
        if state == "done":
            fleet.may_leave.set()
        assert (await ended(router, operation)).state == state


async def test_an_operation_whose_worker_waits_for_a_node_fails_in_the_end_and_later_ones_go_on(monkeypatch):
    monkeypatch.setattr("ridgeline.cluster.runtime.fleet_operations.BEYOND_LEASE_S", 0.0)
    fleet = OperatedFleet(start=PAIR)
    fleet.may_leave.clear()  # it drains, and its node is gone: it never comes back
    async with serving(fleet, start_within_s=0.01, lease_s=0.0) as (router,):
        progress = await done(router, "restart", 0.0)
        assert progress.state == "failed"
        assert all_said(progress, ["worker-0 does not serve again"])
        assert fleet.come_back == {"worker-0"}
        assert (await done(router, {"decode": 1})).state == "done"


async def test_a_worker_that_does_not_start_in_time_is_ended():
    fleet = OperatedFleet(start=PAIR)
    fleet.may_start.clear()
    async with serving(fleet, start_within_s=0.01) as (router,):
        progress = await done(router, {"decode": 2})
        assert (progress.state, fleet.log) == ("failed", ["retire worker-2"])
        assert all_said(progress, ["supervision.start_timeout_s"])


@pytest.mark.parametrize("lost_answers", [0, 1])
async def test_a_scale_that_is_cancelled_keeps_what_serves_and_ends_what_starts(lost_answers):
    fleet = OperatedFleet(start=PAIR)
    fleet.may_start.clear()
    async with serving(fleet) as (router,):
        operation = await begun(router, {"decode": 2})
        await until_told(router, operation, "worker-2: starting")
        router.lost_answers = lost_answers
        router.book.cancel(operation)
        progress = await ended(router, operation)
        assert (progress.state, fleet.log, router.lost_answers) == ("cancelled", ["retire worker-2"], 0)
        assert all_said(progress, ["worker-2: ended", "the rest of it is not done"])
        fleet.may_start.set()
        assert (await done(router, {"decode": 2})).state == "done"  # the next one is carried out


@pytest.mark.parametrize(
    ("asked", "log", "said", "left"),
    [
        ({"decode": 1}, "drain worker-2 1", "worker-2: drains already, and leaves", {"worker-0", "worker-1"}),
        ("restart", "drain worker-0 1", "worker-0: is started again", {"worker-0", "worker-1", "worker-2"}),
    ],
    ids=["scale", "restart"],
)
async def test_a_worker_that_drains_when_its_operation_is_cancelled_leaves_or_comes_back(asked, log, said, left):
    fleet = OperatedFleet(start=["decode"] * 3)
    fleet.may_leave.clear()
    async with serving(fleet) as (router,):
        operation = await begun(router, asked, 1.0)
        await eventually(lambda: fleet.draining)
        router.book.cancel(operation)
        progress = await ended(router, operation)
        assert (progress.state, fleet.log) == ("cancelled", [log])
        assert all_said(progress, [said])
        assert fleet.come_back == ({"worker-0"} if asked == "restart" else set())
        fleet.may_leave.set()
        await eventually(lambda: set(fleet.pool_of) == left and not fleet.draining)
        assert len(fleet.log) == 1


async def test_a_restart_that_is_cancelled_before_a_worker_was_told_to_drain_lets_it_leave_later():
    fleet = OperatedFleet(start=TWO)

    async def router_ended(name, timeout_s, incarnation):
        raise ActorGone("router ended")

    fleet.drain_worker = router_ended
    async with serving(fleet) as (router,):
        operation = await begun(router, "restart", 1.0)
        await until_told(router, operation, "worker-0: drains")
        router.book.cancel(operation)
        progress = await ended(router, operation)
        assert (progress.state, fleet.come_back) == ("cancelled", set())
        assert all_said(progress, ["worker-0: was not told to drain"])


async def test_a_worker_that_drains_for_a_cancelled_restart_leaves_if_its_pool_shrinks_meanwhile():
    fleet = OperatedFleet(start=TWO)
    fleet.may_leave.clear()
    async with serving(fleet) as (router,):
        restarts = await begun(router, "restart", 1.0)
        await eventually(lambda: fleet.draining)
        router.book.cancel(restarts)
        await ended(router, restarts)
        shrinks = await begun(router, {"decode": 1})
        await until_told(router, shrinks, "worker-0: drains")
        fleet.may_leave.set()
        assert (await ended(router, shrinks)).state == "done"
        assert fleet.workers == ["worker-1"]


# --- calls that get lost


async def test_a_router_that_is_away_is_asked_again_when_it_is_back():
    fleet = OperatedFleet(start=PAIR)
    async with serving(fleet) as (router,):
        router.away = True
        given = asyncio.create_task(begun(router, {"decode": 2}))
        await asyncio.sleep(0)
        router.away = False
        assert (await ended(router, await given)).state == "done"


async def test_an_answer_that_nobody_reads_loses_no_operation_and_none_is_carried_out_twice():
    fleet = OperatedFleet(start=PAIR)
    async with serving(fleet) as (router,):
        router.lost_answers = 2  # that with the operation, and that to the report of its end
        assert (await done(router, {"decode": 2})).state == "done"
        await eventually(lambda: not router.lost_answers)
        assert (await done(router, {"decode": 3})).state == "done"
        assert fleet.log == ["add worker-2:1", "add worker-3:1"]


async def test_a_router_that_was_started_again_is_told_of_the_operation_that_is_under_way():
    fleet = OperatedFleet(start=PAIR)
    fleet.may_start.clear()
    async with serving(fleet) as (router,):
        operation = await begun(router, {"decode": 2})
        await until_told(router, operation, "worker-2: starting")
        router.start_again()
        await eventually(lambda: router.book.running == operation)
        fleet.may_start.set()
        assert (await ended(router, operation)).state == "done"


async def test_an_operation_fails_if_the_leading_router_stays_away():
    fleet, clock = OperatedFleet(start=TWO), FakeClock()
    fleet.away = 10**9
    async with serving(fleet, clock=clock) as (router,):
        operation = await begun(router, {"decode": 1})
        await eventually(lambda: fleet.away < 10**9)  # it has asked
        clock.now_s += LEAD_BACK_WITHIN_S
        progress = await ended(router, operation)
        assert (progress.state, progress.sentences[-1]) == ("failed", "router ended")


@pytest.mark.parametrize(
    "words", [["prefill"], ["prefill=0"], ["prefill=-1"], ["prefill=two"], ["router=2"], ["=2"], ["prefill=2"] * 2]
)
def test_a_word_that_is_no_pool_with_its_number_or_names_one_twice_is_refused(words):
    with pytest.raises(ValueError, match=r"prefill|router|="):
        wanted_workers(words)
    assert wanted_workers(["prefill=2", "decode=1"]) == {"prefill": 2, "decode": 1}
