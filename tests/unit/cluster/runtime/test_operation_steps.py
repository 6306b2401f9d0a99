"""Operators' operations: who is started, who leaves and when, and what is told about it; with workers that are none."""

import asyncio
import contextlib

import pytest

from ridgeline.cluster.commands.operators import wanted_workers
from ridgeline.cluster.runtime.handles.actor import ActorGone, DeploymentFailed
from ridgeline.cluster.runtime.operation_runner import OperationRunner
from ridgeline.cluster.runtime.operation_steps import LEAD_BACK_WITHIN_S, OperationSteps
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
            return taking.result()
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


async def scale(router, workers, timeout_s=30.0):
    """Begin the operation that an operator would, in the mode in which the tests begin."""
    operation = new_operation("scale", timeout_s, workers, mode="disaggregated")
    await router.book.begin(operation, PATIENCE_S)
    return operation


async def restart(router, timeout_s=30.0):
    operation = new_operation("restart", timeout_s, {})
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


async def test_missing_workers_are_started_and_get_names_that_no_other_has_had():
    fleet = OperatedFleet(start=["prefill", "decode"])
    async with serving(fleet) as (router,):
        progress = await ended(router, await scale(router, {"prefill": 3}))
        assert progress.state == "done"
        assert fleet.pool_of == {f"worker-{n}": p for n, p in enumerate(["prefill", "decode", "prefill", "prefill"])}
        await ended(router, await scale(router, {"prefill": 1}, 5.0))
        await ended(router, await scale(router, {"prefill": 2}))
        assert set(fleet.pool_of) == {"worker-0", "worker-1", "worker-4"}
        assert progress.sentences[:2] == ("begins", "worker-2: starting")
        assert progress.sentences[-1] == "done after 0 s: prefill has 3 workers"


async def test_the_newest_of_a_pool_leave_after_the_new_ones_of_the_other_serve():
    fleet = OperatedFleet(start=["prefill", "prefill", "prefill", "decode"])
    async with serving(fleet) as (router,):
        assert (await ended(router, await scale(router, {"prefill": 1, "decode": 2}, 7.0))).state == "done"
        assert fleet.log == ["add worker-4:1", "drain worker-2 7", "drain worker-1 7"]


async def test_without_room_the_leaving_ones_go_first():
    fleet = OperatedFleet(start=["prefill", "prefill", "decode"])
    fleet.room = 0
    async with serving(fleet) as (router,):
        progress = await ended(router, await scale(router, {"prefill": 1, "decode": 2}, 7.0))
        assert progress.state == "done"
        assert fleet.log == ["retire worker-3", "drain worker-1 7", "add worker-4:1"]
        assert any("there is room now; before, Ray found no place for worker-3" in line for line in progress.sentences)


REFUSED = "worker-2 (decode) and worker-0 (prefill) cannot exchange KV: model"


@pytest.mark.parametrize(
    ("state", "reason"), [({"room": 0}, "Ray found no place for worker-2"), ({"refuses": REFUSED}, REFUSED)]
)
async def test_a_worker_that_has_no_place_or_that_the_routers_refuse_is_ended_and_the_reason_told(state, reason):
    fleet = OperatedFleet(start=["prefill", "decode"])
    vars(fleet).update(state)
    async with serving(fleet) as (router,):
        progress = await ended(router, await scale(router, {"decode": 2}))
        assert (progress.state, progress.sentences[-1]) == ("failed", reason)
        assert fleet.log == ["retire worker-2"]


async def test_all_workers_are_started_again_one_after_the_other():
    fleet = OperatedFleet(start=["prefill", "decode", "decode"])
    async with serving(fleet) as (router,):
        progress = await ended(router, await restart(router, 3.0))
        assert progress.state == "done"
        assert fleet.log == ["drain worker-0 3", "drain worker-1 3", "drain worker-2 3"]
        assert not fleet.restarts


async def test_one_operation_is_under_way_at_a_time_and_any_router_says_which_and_how_it_goes_on():
    fleet = OperatedFleet(start=["prefill", "decode"])
    fleet.may_start.clear()
    async with serving(fleet, routers=2) as (first, second):
        operation = await scale(first, {"decode": 2})
        for router in (first, second):
            with pytest.raises(
                OperationRuns, match=rf"operation {operation.operation_id} \(scale decode=2\) is under way"
            ):
                await restart(router)
        fleet.may_start.set()
        assert (await ended(second, operation)).state == (await ended(first, operation)).state == "done"
        assert fleet.log == ["add worker-2:1"]
        assert (await ended(first, await scale(second, {"decode": 3}))).state == "done"


async def test_of_two_that_two_routers_are_given_at_once_one_is_refused():
    fleet = OperatedFleet(start=["prefill", "decode"])
    fleet.may_start.clear()
    async with serving(fleet, routers=2) as routers:
        given = [asyncio.create_task(scale(router, {"decode": 2})) for router in routers]
        await asyncio.wait(given)
        assert [type(task.exception()) for task in given].count(OperationRuns) == 1


async def test_it_is_known_whether_an_operation_is_under_way():
    fleet = OperatedFleet(start=["prefill", "decode"])
    router = Router()
    operations = desk_of([router], fleet)
    told = []
    running = asyncio.create_task(operations.run(lambda sentence: told.append((operations.under_way, sentence))))
    assert not operations.under_way
    for wanted in (2, 3):
        await ended(router, await scale(router, {"decode": wanted}))
    await asyncio.sleep(0)
    assert not operations.under_way
    assert all(under_way for under_way, _ in told)
    running.cancel()
    await asyncio.wait((running,))


async def test_a_router_that_is_away_is_asked_again_when_it_is_back():
    fleet = OperatedFleet(start=["prefill", "decode"])
    async with serving(fleet) as (router,):
        router.away = True
        given = asyncio.create_task(scale(router, {"decode": 2}))
        await asyncio.sleep(0)
        router.away = False
        assert (await ended(router, await given)).state == "done"


async def test_an_operation_that_no_driver_takes_up_is_told_and_leaves_room_for_another():
    book = Operations()
    for _ in range(2):
        with pytest.raises(NotTaken):
            await book.begin(new_operation("restart", 1.0, {}), 0.01)
    assert book.last is None


def test_what_arrives_late_does_not_bring_back_an_operation_that_has_ended():
    book, operation = Operations(), new_operation("restart", 1.0, {})
    for progress in (
        Progress(operation, number=1),
        Progress(operation, "done", number=3),
        Progress(operation, number=2),
    ):
        book.report(progress)
    assert (book.last.state, book.running) == ("done", None)


# --- who leaves


async def test_of_a_pool_that_shrinks_the_workers_that_do_not_run_leave_first_and_without_a_drain():
    fleet = OperatedFleet(start=["prefill", "decode", "decode", "decode"])
    fleet.lost = {"worker-1"}
    async with serving(fleet) as (router,):
        progress = await ended(router, await scale(router, {"decode": 1}, 1.0))
        assert fleet.log == ["dismiss worker-1", "drain worker-3 1"]
        assert "worker-1: does not run, and is given up without a drain" in progress.sentences
        assert progress.sentences[-1].endswith("decode has 1 worker")


@pytest.mark.parametrize(
    ("workers", "state", "log"),
    [
        (3, {"lost": {"worker-0", "worker-1"}}, ["dismiss worker-1", "dismiss worker-0"]),
        (2, {"unusable": {"worker-0"}}, ["drain worker-0 2"]),
        (2, {"partitioned": {"worker-0"}}, ["dismiss worker-0"]),
    ],
    ids=["the_one_that_serves_stays", "unusable_drains_first", "not_reached_is_given_up"],
)
async def test_who_does_not_serve_leaves_before_who_does(workers, state, log):
    fleet = OperatedFleet(start=["decode"] * workers)
    vars(fleet).update(state)
    async with serving(fleet) as (router,):
        assert (await ended(router, await scale(router, {"decode": 1}, 2.0))).state == "done"
        assert fleet.log == log


async def test_a_worker_that_drains_already_counts_no_more():
    fleet = OperatedFleet(start=["decode", "decode"])
    fleet.draining = {"worker-1"}
    async with serving(fleet) as (router,):
        await ended(router, await scale(router, {"decode": 1}))
        assert fleet.log == []
        await ended(router, await scale(router, {"decode": 2}))
        assert fleet.log == ["add worker-2:1"]


async def test_no_restart_drains_the_only_worker_that_serves_while_others_are_lost():
    fleet = OperatedFleet(start=["colocated", "colocated", "colocated"])
    fleet.lost, fleet.unusable = {"worker-1"}, {"worker-2"}
    async with serving(fleet) as (router,):
        progress = await ended(router, await restart(router, 1.0))
        assert progress.state == "failed"
        assert progress.sentences[-1].startswith("worker-0 is the only worker that serves now")
        assert fleet.log == []


async def test_a_restart_leaves_out_what_is_started_again_anyway_and_what_leaves():
    fleet = OperatedFleet(start=["colocated"] * 4)
    fleet.lost, fleet.draining = {"worker-1"}, {"worker-2"}
    async with serving(fleet) as (router,):
        progress = await ended(router, await restart(router, 1.0))
        assert fleet.log == ["drain worker-0 1", "drain worker-3 1"]
        assert progress.sentences[-1] == "done after 0 s: 2 workers of 4 started again"


async def test_a_restart_counts_no_worker_that_it_could_not_drain_and_a_later_drain_lets_that_one_leave():
    fleet = OperatedFleet(start=["decode"] * 3)
    fleet.partitioned = {"worker-1"}
    async with serving(fleet) as (router,):
        progress = await ended(router, await restart(router, 1.0))
        assert fleet.log == ["drain worker-0 1", "drain worker-2 1"]
        assert "worker-1: was not told to drain, and stays as it is" in progress.sentences
        assert progress.sentences[-1] == "done after 0 s: 2 workers of 3 started again"
        assert not fleet.come_back


async def test_a_restart_that_is_cancelled_before_a_worker_was_told_to_drain_lets_it_leave_later():
    fleet = OperatedFleet(start=["decode", "decode"])

    async def router_ended(name, timeout_s, incarnation):
        raise ActorGone("router ended")

    fleet.drain_worker = router_ended
    async with serving(fleet) as (router,):
        operation = await restart(router, 1.0)
        await until_told(router, operation, "worker-0: drains")
        router.book.cancel(operation)
        progress = await ended(router, operation)
        assert progress.state == "cancelled"
        assert "worker-0: was not told to drain, and stays as it is" in progress.sentences
        assert not fleet.come_back


# --- another mode


async def test_an_operation_is_void_in_another_mode_than_that_in_which_it_was_given():
    fleet = OperatedFleet(start=["prefill", "prefill", "decode", "decode"])
    async with serving(fleet) as (router,):
        fleet.mode = "colocated"
        fleet.pool_of = dict.fromkeys(fleet.pool_of, "colocated")
        progress = await ended(router, await scale(router, {"prefill": 2, "decode": 2}))  # nothing to do in its mode
        assert progress.state == "failed"
        assert "it is for mode disaggregated, and the server serves colocated now" in progress.sentences[-1]
        assert fleet.log == []


async def test_a_worker_that_has_loaded_when_the_mode_is_another_one_is_not_added():
    fleet = OperatedFleet(start=["prefill", "decode"])
    fleet.may_start.clear()
    async with serving(fleet) as (router,):
        operation = await scale(router, {"decode": 2})
        await until_told(router, operation, "worker-2: starting")
        fleet.mode = "colocated"
        fleet.may_start.set()
        assert (await ended(router, operation)).state == "failed"
        assert fleet.log == ["retire worker-2"]


# --- every operation ends


async def test_a_worker_whose_kv_is_needed_for_a_long_lease_is_waited_for(monkeypatch):
    monkeypatch.setattr("ridgeline.cluster.runtime.operation_steps.BEYOND_LEASE_S", 0.0)
    for lease_s, state in ((2 * PATIENCE_S, "done"), (0.0, "failed")):
        fleet = OperatedFleet(start=["decode", "decode"])
        fleet.may_leave.clear()
        async with serving(fleet, lease_s=lease_s) as (router,):
            operation = await scale(router, {"decode": 1}, 0.0)
            await eventually(lambda fleet=fleet: fleet.draining)
            if state == "done":
                fleet.may_leave.set()
            progress = await ended(router, operation)
            assert progress.state == state, progress


async def test_an_operation_whose_worker_waits_for_a_node_fails_in_the_end_and_later_ones_go_on(monkeypatch):
    monkeypatch.setattr("ridgeline.cluster.runtime.operation_steps.BEYOND_LEASE_S", 0.0)
    fleet = OperatedFleet(start=["prefill", "decode"])
    fleet.may_leave.clear()  # it drains, and its node is gone: it never comes back
    async with serving(fleet, start_within_s=0.01, lease_s=0.0) as (router,):
        progress = await ended(router, await restart(router, 0.0))
        assert progress.state == "failed"
        assert "worker-0 does not serve again after 0 s" in progress.sentences[-1]
        assert "it is started as soon as that is possible" in progress.sentences[-1]
        assert fleet.come_back == {"worker-0"}
        assert (await ended(router, await scale(router, {"decode": 1}))).state == "done"


async def test_a_worker_that_does_not_start_in_time_is_ended():
    fleet = OperatedFleet(start=["prefill", "decode"])
    fleet.may_start.clear()
    async with serving(fleet, start_within_s=0.01) as (router,):
        progress = await ended(router, await scale(router, {"decode": 2}))
        assert progress.state == "failed"
        assert progress.sentences[-1].endswith("raise ray.placement_timeout_s or supervision.start_timeout_s")
        assert fleet.log == ["retire worker-2"]


async def test_a_scale_that_is_cancelled_keeps_what_serves_and_ends_what_starts():
    fleet = OperatedFleet(start=["prefill", "decode"])
    fleet.may_start.clear()
    async with serving(fleet) as (router,):
        operation = await scale(router, {"decode": 2})
        await until_told(router, operation, "worker-2: starting")
        router.book.cancel(operation)
        progress = await ended(router, operation)
        assert progress.state == "cancelled"
        assert progress.sentences[-2:] == (
            "worker-2: ended, before it served",
            "cancelled after 0 s: the rest of it is not done",
        )
        assert fleet.log == ["retire worker-2"]
        fleet.may_start.set()
        assert (await ended(router, await scale(router, {"decode": 2}))).state == "done"  # the next one is carried out


async def test_a_cancellation_whose_answer_was_lost_is_handed_out_again():
    fleet = OperatedFleet(start=["prefill", "decode"])
    fleet.may_start.clear()
    async with serving(fleet) as (router,):
        operation = await scale(router, {"decode": 2})
        await until_told(router, operation, "worker-2: starting")
        router.lost_answers = 1
        router.book.cancel(operation)
        assert (await ended(router, operation)).state == "cancelled"
        assert not router.lost_answers


async def test_a_worker_that_drains_when_its_operation_is_cancelled_leaves_and_no_other_one():
    fleet = OperatedFleet(start=["decode", "decode", "decode"])
    fleet.may_leave.clear()
    async with serving(fleet) as (router,):
        operation = await scale(router, {"decode": 1})
        await eventually(lambda: fleet.draining)
        router.book.cancel(operation)
        progress = await ended(router, operation)
        assert "worker-2: drains already, and leaves; the others stay as they are" in progress.sentences
        fleet.may_leave.set()
        await eventually(lambda: set(fleet.pool_of) == {"worker-0", "worker-1"})
        assert len(fleet.log) == 1


async def test_a_worker_that_drains_when_its_restart_is_cancelled_comes_back():
    fleet = OperatedFleet(start=["decode", "decode"])
    fleet.may_leave.clear()
    async with serving(fleet) as (router,):
        operation = await restart(router, 1.0)
        await eventually(lambda: fleet.draining)
        router.book.cancel(operation)
        progress = await ended(router, operation)
        assert progress.state == "cancelled"
        assert "worker-0: is started again once it has drained; the others stay as they are" in progress.sentences
        assert fleet.come_back == {"worker-0"}
        assert fleet.log == ["drain worker-0 1"]


async def test_a_worker_that_drains_for_a_cancelled_restart_leaves_if_its_pool_shrinks_meanwhile():
    fleet = OperatedFleet(start=["decode", "decode"])
    fleet.may_leave.clear()
    async with serving(fleet) as (router,):
        restarts = await restart(router, 1.0)
        await eventually(lambda: fleet.draining)
        router.book.cancel(restarts)
        await ended(router, restarts)
        shrinks = await scale(router, {"decode": 1})
        await until_told(router, shrinks, "worker-0: drains")
        fleet.may_leave.set()
        progress = await ended(router, shrinks)
        assert progress.sentences[-1] == "done after 0 s: decode has 1 worker"
        assert fleet.workers == ["worker-1"]


# --- calls that get lost


async def test_an_answer_that_nobody_reads_loses_no_operation_and_none_is_carried_out_twice():
    fleet = OperatedFleet(start=["prefill", "decode"])
    async with serving(fleet) as (router,):
        router.lost_answers = 2  # that with the operation, and that to the report of its end
        progress = await ended(router, await scale(router, {"decode": 2}))
        assert progress.state == "done"
        await eventually(lambda: not router.lost_answers)
        assert (await ended(router, await scale(router, {"decode": 3}))).state == "done"
        assert fleet.log == ["add worker-2:1", "add worker-3:1"]


async def test_a_router_that_was_started_again_is_told_of_the_operation_that_is_under_way():
    fleet = OperatedFleet(start=["prefill", "decode"])
    fleet.may_start.clear()
    async with serving(fleet) as (router,):
        operation = await scale(router, {"decode": 2})
        await until_told(router, operation, "worker-2: starting")
        router.start_again()
        await eventually(lambda: router.book.running == operation)
        fleet.may_start.set()
        assert (await ended(router, operation)).state == "done"


@pytest.mark.parametrize(("kind", "workers"), [("restart", 2), ("scale", 1)])
async def test_a_drain_whose_answer_was_lost_is_not_ordered_again_once_the_worker_has_drained(kind, workers):
    fleet = OperatedFleet(start=["decode", "decode"])
    fleet.lost_answers = 1
    async with serving(fleet) as (router,):
        operation = await scale(router, {"decode": 1}, 1.0) if kind == "scale" else await restart(router, 1.0)
        progress = await ended(router, operation)
        assert progress.state == "done"
        assert len(fleet.pool_of) == workers
        assert fleet.log == (["drain worker-1 1"] if kind == "scale" else ["drain worker-0 1", "drain worker-1 1"])
        assert progress.sentences[-1].endswith("has 1 worker" if kind == "scale" else "2 workers of 2 started again")


async def test_an_operation_survives_that_the_leading_router_is_away_for_a_while():
    fleet = OperatedFleet(start=["decode", "decode"])
    async with serving(fleet) as (router,):
        fleet.away = 1
        assert (await ended(router, await scale(router, {"decode": 1}))).state == "done"


async def test_an_operation_fails_if_the_leading_router_stays_away():
    fleet, clock = OperatedFleet(start=["decode", "decode"]), FakeClock()
    fleet.away = 10**9
    async with serving(fleet, clock=clock) as (router,):
        operation = await scale(router, {"decode": 1})
        await eventually(lambda: fleet.away < 10**9)  # it has asked
        clock.now_s += LEAD_BACK_WITHIN_S
        progress = await ended(router, operation)
        assert (progress.state, progress.sentences[-1]) == ("failed", "router ended")


@pytest.mark.parametrize("word", ["prefill", "prefill=0", "prefill=-1", "prefill=two", "router=2", "=2"])
def test_a_word_that_is_no_pool_with_its_number_is_refused(word):
    with pytest.raises(ValueError, match="is no pool with its number of workers"):
        wanted_workers([word])


def test_a_pool_is_given_once():
    assert wanted_workers(["prefill=2", "decode=1"]) == {"prefill": 2, "decode": 1}
    with pytest.raises(ValueError, match="prefill is given twice"):
        wanted_workers(["prefill=2", "prefill=1"])
