"""Operators' orders: who is started, who leaves and when, and what is told about it; with workers that are none."""

import asyncio
import contextlib

import pytest

from cluster.commands.operators.orders import wanted_workers
from cluster.runtime.handles.actor import ActorGone, DeploymentFailed, NoPlace
from cluster.runtime.orders import Orders
from router.front.orders import KEPT, OrderBook


class Router:
    """An order book behind calls that fail while its process is away."""

    def __init__(self):
        self.book = OrderBook()
        self.away = False

    async def take_orders(self, within_s):
        if self.away:
            raise ActorGone("router ended")
        return await self.book.take(within_s)

    async def report(self, order_id, state, sentence):
        if self.away:
            raise ActorGone("router ended")
        self.book.report(order_id, state, sentence)


class Fleet:
    """The supervisor and the leading router in one: which workers there are."""

    def __init__(self, **pools):
        self.pool_of = {f"worker-{number}": pool for number, pool in enumerate(pools.get("start", ()))}
        self.log = []
        self.room = 9
        self.refuses = None
        self.restarts = {}

    @property
    def workers(self):
        return list(self.pool_of)

    async def pools(self):
        return self.pool_of

    async def drain_worker(self, name, timeout_s):
        self.log.append(f"drain {name} {timeout_s:g}")
        if name in self.restarts:
            self.restarts[name].set_result(None)
        else:
            del self.pool_of[name]
            self.room += 1

    async def add(self, worker, address):
        if self.refuses:
            raise DeploymentFailed(self.refuses)
        self.pool_of[worker.name] = worker.pool
        self.log.append(f"add {address}")

    def restart_drained(self, name):
        self.restarts[name] = asyncio.get_running_loop().create_future()
        return self.restarts[name]

    def forget_restart(self, name):
        self.restarts.pop(name)


class Worker:
    def __init__(self, fleet, name, pool):
        self.fleet, self.name, self.pool = fleet, name, pool

    async def start(self):
        await asyncio.sleep(0)
        if not self.fleet.room:
            raise NoPlace(f"Ray found no place for {self.name}")
        self.fleet.room -= 1
        return f"{self.name}:1"

    async def retire(self):
        self.fleet.log.append(f"retire {self.name}")


@contextlib.asynccontextmanager
async def serving(fleet, routers=1):
    """Run orders over this fleet; yields the routers."""
    there = [Router() for _ in range(routers)]
    orders = Orders(there, fleet, fleet, lambda name, pool: Worker(fleet, name, pool))
    running = asyncio.create_task(orders.run(lambda _: None))
    try:
        async with asyncio.timeout(10):
            yield there
    finally:
        running.cancel()
        await asyncio.wait((running,))


async def ended(router, order):
    """How an order ended."""
    while (progress := router.book.progress(order.order_id)) is None or progress.state in ("given", "running"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return progress


async def test_missing_workers_are_started_and_get_names_that_no_other_has_had():
    fleet = Fleet(start=["prefill", "decode"])
    async with serving(fleet) as (router,):
        progress = await ended(router, router.book.give("scale", 30.0, {"prefill": 3}))
        assert progress.state == "done"
        assert fleet.pool_of == {f"worker-{n}": p for n, p in enumerate(["prefill", "decode", "prefill", "prefill"])}
        await ended(router, router.book.give("scale", 5.0, {"prefill": 1}))
        await ended(router, router.book.give("scale", 30.0, {"prefill": 2}))
        assert set(fleet.pool_of) == {"worker-0", "worker-1", "worker-4"}
        assert progress.sentences[0] == "worker-2: starting"
        assert progress.sentences[-1].startswith("done after")


async def test_the_newest_of_a_pool_leave_after_the_new_ones_of_the_other_serve():
    fleet = Fleet(start=["prefill", "prefill", "prefill", "decode"])
    async with serving(fleet) as (router,):
        assert (await ended(router, router.book.give("scale", 7.0, {"prefill": 1, "decode": 2}))).state == "done"
        assert fleet.log == ["add worker-4:1", "drain worker-1 7", "drain worker-2 7"]


async def test_without_room_the_leaving_ones_go_first():
    fleet = Fleet(start=["prefill", "prefill", "decode"])
    fleet.room = 0
    async with serving(fleet) as (router,):
        progress = await ended(router, router.book.give("scale", 7.0, {"prefill": 1, "decode": 2}))
        assert progress.state == "done"
        assert fleet.log == ["retire worker-3", "drain worker-1 7", "add worker-4:1"]
        assert any("there is room now; before, Ray found no place for worker-3" in line for line in progress.sentences)


async def test_a_worker_that_nobody_can_place_is_ended_and_the_reason_told():
    fleet = Fleet(start=["prefill", "decode"])
    fleet.room = 0
    async with serving(fleet) as (router,):
        progress = await ended(router, router.book.give("scale", 30.0, {"decode": 2}))
        assert (progress.state, progress.sentences[-1]) == ("failed", "Ray found no place for worker-2")
        assert fleet.log == ["retire worker-2"]


async def test_a_worker_that_the_routers_refuse_is_ended_and_the_reason_told():
    fleet = Fleet(start=["prefill", "decode"])
    fleet.refuses = "worker-2 (decode) and worker-0 (prefill) cannot exchange KV: model"
    async with serving(fleet) as (router,):
        progress = await ended(router, router.book.give("scale", 30.0, {"decode": 2}))
        assert (progress.state, progress.sentences[-1]) == ("failed", fleet.refuses)
        assert fleet.log == ["retire worker-2"]


async def test_all_workers_are_started_again_one_after_the_other():
    fleet = Fleet(start=["prefill", "decode", "decode"])
    async with serving(fleet) as (router,):
        progress = await ended(router, router.book.give("restart", 3.0))
        assert progress.state == "done"
        assert fleet.log == ["drain worker-0 3", "drain worker-1 3", "drain worker-2 3"]
        assert not fleet.restarts


async def test_orders_are_carried_out_one_at_a_time_and_any_router_tells_how_they_go_on():
    fleet = Fleet(start=["prefill", "decode"])
    async with serving(fleet, routers=2) as (first, second):
        orders = [router.book.give("scale", 30.0, {"decode": wanted}) for router, wanted in ((first, 4), (second, 2))]
        for order in orders:
            assert (await ended(second, order)).state == (await ended(first, order)).state == "done"
        assert sorted(fleet.pool_of.values()) in (["decode"] * 2 + ["prefill"], ["decode"] * 4 + ["prefill"])


async def test_an_order_that_was_decided_before_another_change_is_void():
    fleet = Fleet(start=["prefill", "decode"])
    async with serving(fleet) as (router,):
        operators = router.book.give("scale", 30.0, {"decode": 3})
        late = router.book.give("scale", 30.0, {"decode": 2}, {"decode": 1})
        assert router.book.has_new
        assert (await ended(router, operators)).state == "done"
        progress = await ended(router, late)
        assert progress.state == "failed"
        assert progress.sentences == ["decode has 3 workers, and 1 when this was decided: nothing is changed"]
        assert not router.book.has_new
        assert sorted(fleet.pool_of.values()) == ["decode"] * 3 + ["prefill"]


async def test_it_is_known_whether_an_order_is_under_way():
    fleet = Fleet(start=["prefill", "decode"])
    router = Router()
    orders = Orders([router], fleet, fleet, lambda name, pool: Worker(fleet, name, pool))
    told = []
    running = asyncio.create_task(orders.run(lambda sentence: told.append((orders.under_way, sentence))))
    assert not orders.under_way
    given = [router.book.give("scale", 30.0, {"decode": wanted}) for wanted in (2, 3)]
    for order in given:
        await ended(router, order)
    await asyncio.sleep(0)
    assert not orders.under_way
    assert all(under_way for under_way, _ in told)
    running.cancel()
    await asyncio.wait((running,))


async def test_a_router_that_is_away_is_asked_again_when_it_is_back():
    fleet = Fleet(start=["prefill", "decode"])
    async with serving(fleet) as (router,):
        router.away = True
        order = router.book.give("scale", 30.0, {"decode": 2})
        await asyncio.sleep(0.1)
        router.away = False
        assert (await ended(router, order)).state == "done"


async def test_only_the_last_orders_are_kept():
    book = OrderBook()
    orders = [book.give("restart", 1.0) for _ in range(KEPT + 1)]
    assert book.progress(orders[0].order_id) is None
    assert book.progress(orders[-1].order_id).state == "given"
    assert len(await book.take(1.0)) == KEPT + 1
    assert await book.take(0.0) == []


@pytest.mark.parametrize("word", ["prefill", "prefill=0", "prefill=-1", "prefill=two", "router=2", "=2"])
def test_a_word_that_is_no_pool_with_its_number_is_refused(word):
    with pytest.raises(ValueError, match="is no pool with its number of workers"):
        wanted_workers([word])


def test_a_pool_is_given_once():
    assert wanted_workers(["prefill=2", "decode=1"]) == {"prefill": 2, "decode": 1}
    with pytest.raises(ValueError, match="prefill is given twice"):
        wanted_workers(["prefill=2", "prefill=1"])
