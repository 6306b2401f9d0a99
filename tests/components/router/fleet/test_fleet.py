"""The connected workers: what is reserved on them, how they pair, what is known when they do not answer."""

import asyncio
import contextlib
from collections import Counter

import msgspec
import pytest

from ridgeline.contracts.errors import EngineFailed, WorkerLost
from ridgeline.contracts.workers import Role, WorkerStatus
from ridgeline.kv_transfer.service import PairedTransport
from ridgeline.router.fleet.fleet import Fleet, Worker
from ridgeline.router.fleet.pairing import KvPair, PairingRefused
from ridgeline.router.fleet.roles import RoleTable
from ridgeline.router.router_control import Member, members
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.clock import FakeClock
from tests.support.cut_route import Route
from tests.support.fake_engine import make_task
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT, worker_description
from tests.support.small_fleet import Done, a_fleet, hosts
from tests.support.task_deltas import task_deltas


class Client:
    connected = True
    failed_s = float("-inf")
    last_token_s = None


def a_worker():
    description = worker_description(worker_id="d0", layout=LAYOUT)
    return Worker(Client(), description)


def test_a_reservation_counts_a_sequence_and_its_prompt_until_the_prompt_is_done():
    worker = a_worker()
    with worker.reserve(70) as first, worker.reserve(30):
        assert (worker.outstanding.running, worker.outstanding.prompt_tokens) == (2, 100)
        first.prompt_done()
        first.prompt_done()
        assert (worker.outstanding.running, worker.outstanding.prompt_tokens) == (2, 30)
    assert (worker.outstanding.running, worker.outstanding.prompt_tokens) == (0, 0)


def test_a_reservation_ends_with_an_exception_too():
    worker = a_worker()
    with pytest.raises(RuntimeError), worker.reserve(70):
        raise RuntimeError
    assert (worker.outstanding.running, worker.outstanding.prompt_tokens) == (0, 0)


def test_a_load_is_what_the_worker_last_said_and_what_was_sent_there():
    worker = a_worker()
    assert worker.kv_blocks_free == 100
    worker.status = WorkerStatus(worker_id="d0", kv_blocks_free=7, draining=True, running=99)
    assert (worker.kv_blocks_free, worker.drains, worker.outstanding.running) == (7, True, 0)


async def test_one_question_without_an_answer_is_forgiven_and_the_second_in_a_row_is_not(monkeypatch):
    now_s, worker, status = 100.0, a_worker(), WorkerStatus(worker_id="d0", kv_blocks_free=7)
    monkeypatch.setattr("ridgeline.router.fleet.worker.time.monotonic", lambda: now_s)

    async def answer():
        return status

    async def hang():
        raise WorkerLost("DEADLINE_EXCEEDED")

    worker.client.status = answer
    await worker.refresh()
    worker.client.status = hang
    now_s += 2.5
    await worker.refresh()
    assert (worker.usable, worker.status) == (True, status)
    now_s += 2.5
    await worker.refresh()
    assert (worker.usable, worker.status) == (False, None)
    worker.client.status = answer
    await worker.refresh()
    assert worker.usable
    worker.client.status, worker.client.connected = hang, False
    await worker.refresh()
    assert worker.status is None, "it is gone, and that is known"


async def test_a_router_that_stood_still_takes_no_worker_for_gone(monkeypatch):
    clock, worker, status = FakeClock(), a_worker(), WorkerStatus(worker_id="d0", kv_blocks_free=7)
    monkeypatch.setattr("ridgeline.router.fleet.worker.time.monotonic", clock)
    worker._silent_since_s, worker.status = clock(), status

    async def not_heard_for(seconds):
        clock.now_s += seconds
        raise WorkerLost("DEADLINE_EXCEEDED")

    for stood_still_s in (2.5, 30.0, 2.5):  # a question's deadline was over when this process ran again
        worker.client.status = lambda seconds=stood_still_s: not_heard_for(seconds)
        await worker.refresh()
        assert (worker.usable, worker.status) == (True, status)
    worker.client.status = lambda: not_heard_for(2.0)
    await worker.refresh()
    assert worker.usable
    await worker.refresh()
    assert not worker.usable, "it listened to two, and heard nothing"


@pytest.fixture
def asked(monkeypatch):
    """How often each worker was asked for its status; who is in `asked.hang` does not answer."""

    class Asked(Counter):
        hang = frozenset()

    told, status = Asked(), WorkerHost._status

    async def count(self, request):
        name = self._engine.config.worker_id
        told[name] += 1
        if name in told.hang:
            await asyncio.Event().wait()
        return await status(self, request)

    monkeypatch.setattr(WorkerHost, "_status", count)
    return told


async def test_a_hundred_who_want_to_know_at_once_put_one_question_to_each_worker(asked):
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(decode=LAYOUT, decode_1=LAYOUT) as started,
        a_fleet([host.address for host in started]) as fleet,
    ):
        await fleet.refresh()
        asked.clear()
        await asyncio.gather(*(fleet.refresh() for _ in range(100)))
        # One that was under way is no answer to what is asked now, so there may be two; and the poll's own.
        assert max(asked.values()) <= 3


async def test_a_worker_that_hangs_does_not_make_what_is_known_of_the_others_old(asked, monkeypatch):
    monkeypatch.setattr("ridgeline.router.fleet.worker.STATUS_INTERVAL_S", 0.01)
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(decode=LAYOUT, decode_1=LAYOUT) as started,
        a_fleet([host.address for host in started]) as fleet,
    ):
        asked.hang = {"decode-0"}
        before = asked["decode-0"]
        await eventually(lambda: asked["decode-0"] > before)
        asked.clear()
        started[1]._engine.stats.kv_usage = 0.5
        await eventually(lambda: fleet.get("decode-1").kv_blocks_free == 50)
        await eventually(lambda: asked["decode-1"] > 5)
        assert asked["decode-0"] <= 1
        asked.hang = frozenset()


async def test_a_worker_without_work_says_itself_when_its_health_changes(monkeypatch):
    monkeypatch.setattr("ridgeline.router.fleet.worker.STATUS_INTERVAL_S", 3600.0)
    monkeypatch.setattr("ridgeline.worker_runtime.host.HEALTH_LOOK_S", 0.01)
    async with asyncio.timeout(PATIENCE_S), hosts(decode=LAYOUT) as started, a_fleet([started[0].address]) as fleet:
        worker = fleet.get("decode-0")
        await eventually(lambda: worker.usable)
        started[0]._engine.failed = True
        await eventually(lambda: not worker.usable)
        started[0]._engine.failed = False
        await eventually(lambda: worker.usable)


class Asked(Exception):
    """Ends a worker's `keep_fresh`."""


@pytest.mark.parametrize(
    ("tasks", "running", "answers", "asked_at_s"),
    [
        (0, 0, True, [0.0, 1.0, 2.0]),
        (1, 0, True, [0.0, 0.5, 1.0]),
        (0, 1, True, [0.0, 0.5, 1.0]),
        (0, 0, False, [0.0, 2.0, 4.0]),
    ],
)
async def test_an_idle_worker_is_asked_once_a_second_and_one_that_does_not_answer_again_at_once(
    monkeypatch, tasks, running, answers, asked_at_s
):
    now_s, asked = 0.0, []
    worker = a_worker()
    worker.client.news = asyncio.Event()
    worker.outstanding.running = running

    async def status():
        nonlocal now_s
        asked.append(now_s)
        if len(asked) > len(asked_at_s):
            raise Asked
        if not answers:
            now_s += 2.0
            raise WorkerLost("silent")
        return WorkerStatus(worker_id="d0", tasks=tasks)

    @contextlib.asynccontextmanager
    async def timeout(seconds):
        nonlocal now_s
        now_s += seconds
        raise TimeoutError
        yield

    worker.client.status = status
    monkeypatch.setattr("ridgeline.router.fleet.worker.time.monotonic", lambda: now_s)
    monkeypatch.setattr("ridgeline.router.fleet.worker.asyncio.timeout", timeout)
    with pytest.raises(Asked):
        await worker.keep_fresh()
    assert asked[: len(asked_at_s)] == asked_at_s


async def test_the_next_answer_of_a_worker_in_doubt_is_news(asked):
    async with asyncio.timeout(PATIENCE_S), hosts(decode=LAYOUT) as started, a_fleet([started[0].address]) as fleet:
        worker, heard = fleet.get("decode-0"), []
        await fleet.refresh()
        fleet.on_news = lambda: heard.append(worker.takes_work)
        worker.client.has_failed()
        assert worker.usable
        assert not worker.takes_work
        await fleet.refresh()
        assert True in heard


async def test_a_worker_whose_engine_failed_a_request_gets_no_other_before_it_has_told_that_it_is_well(asked):
    async with asyncio.timeout(PATIENCE_S), hosts(decode=LAYOUT) as started, a_fleet([started[0].address]) as fleet:
        worker = fleet.get("decode-0")
        await fleet.refresh()
        started[0]._engine.error = EngineFailed("it died")
        asked.hang = {"decode-0"}
        with pytest.raises(EngineFailed):
            await anext(task_deltas(worker.client, make_task()))
        assert not worker.takes_work
        assert worker.usable, "nobody is refused because of one that is asked"
        await eventually(lambda: asked["decode-0"])
        asked.hang, started[0]._engine.error = frozenset(), None
        await fleet.refresh()
        assert worker.takes_work


async def test_a_fleet_connects_sorts_into_pools_and_knows_every_status():
    async with asyncio.timeout(PATIENCE_S), hosts(prefill=LAYOUT, decode=LAYOUT) as started:
        fleet, checked = Fleet("router"), False
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                await fleet.connect([host.address for host in started], group)
                assert [worker.worker_id for worker in fleet.workers] == ["prefill-0", "decode-0"]
                assert [worker.worker_id for worker in fleet.pool("decode")] == ["decode-0"]
                assert fleet.pool("colocated") == []
                assert fleet.get("prefill-0").pool == "prefill"
                assert all(worker.status is not None for worker in fleet.workers)
                assert fleet.kv_pairs == [KvPair("prefill-0", "decode-0", "shm", "")]
                await started[1].stop()
                await eventually(lambda: not fleet.get("decode-0").client.connected)
                await fleet.refresh()
                assert fleet.get("decode-0").status is None, "a worker that does not answer has no figures"
                assert fleet.get("prefill-0").status is not None
                checked = True
                raise Done
        assert checked


async def test_a_worker_that_comes_back_takes_the_place_of_its_older_incarnation_and_pairs_again():
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT) as old,
        hosts(decode=LAYOUT) as new,
        a_fleet([host.address for host in old]) as fleet,
    ):
        before = fleet.get("decode-0")
        await old[1].stop()
        await fleet.replace(new[0].address, "engine_died")
        await fleet.replace(new[0].address, "engine_died")
        assert fleet.get("decode-0") is not before
        assert fleet.get("decode-0").client.address == new[0].address
        assert fleet.get("decode-0").status is not None
        assert [worker.worker_id for worker in fleet.workers] == ["prefill-0", "decode-0"]
        assert fleet.kv_pairs == [KvPair("prefill-0", "decode-0", "shm", "")]
        assert fleet.restarts == {("decode", "decode-0", "engine_died"): 1}, "told twice is counted once"


async def test_a_worker_that_has_got_the_port_of_a_dead_one_is_not_taken_for_it():
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(decode=LAYOUT, decode_1=LAYOUT) as old,
        hosts(decode_1=LAYOUT) as new,
    ):
        route = Route(old[0].address)
        address = await route.start()
        async with a_fleet([address, old[1].address]) as fleet:
            dead = fleet.get("decode-0")
            route.lead_to(new[0].address)
            await asyncio.gather(*(host.stop() for host in old))
            route.cut("refused")
            route.mend()
            await fleet.replace(address, "actor_died")
            newcomer = fleet.get("decode-1")
            assert newcomer.description.incarnation == new[0]._engine.config.incarnation
            assert newcomer.usable
            await eventually(lambda: "this is decode-1" in dead.client._why_lost)
            await dead.refresh()
            assert not dead.usable
            assert dead.unreached_s > 0.0, "what another one answers at its address does not count"
            assert [task async for task in task_deltas(newcomer.client, make_task(max_tokens=1))][-1].finished
        await route.close()


async def test_a_worker_that_the_fleet_has_is_not_attached_again_which_would_end_its_requests():
    async with asyncio.timeout(PATIENCE_S), hosts(decode=LAYOUT) as started, a_fleet([started[0].address]) as fleet:
        started[0]._engine._stepping = "manual"
        leg = asyncio.ensure_future(anext(task_deltas(fleet.get("decode-0").client, make_task())))
        await eventually(lambda: started[0]._engine.running)
        await fleet.replace(started[0].address, "actor_died")
        started[0]._engine.step()
        assert (await leg).token_ids


async def test_a_worker_that_cannot_be_reached_is_told_with_its_address_once_it_is_long_enough():
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT) as started,
        a_fleet([host.address for host in started]) as fleet,
    ):
        await fleet.refresh()
        assert fleet.unreached(0.001) == []
        await started[1].stop()
        await eventually(lambda: fleet.unreached(0.001) == [started[1].address])
        assert fleet.unreached(3600) == []


async def test_who_is_gone_is_told_so_that_what_was_kept_of_it_goes():
    gone = []
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT) as old,
        hosts(prefill=LAYOUT) as new,
        a_fleet([host.address for host in old]) as fleet,
    ):
        fleet._on_gone = gone.append
        await fleet.replace(new[0].address, "actor_died")
        assert gone == [["127.0.0.1:7001"]]
        await fleet.remove("decode-0")
        assert len(gone) == 2


def test_an_engine_without_a_step_gets_no_more_after_a_third_of_the_time_in_which_it_is_replaced():
    worker = Worker(Client(), a_worker().description, stall_timeout_s=300.0)
    worker.status = WorkerStatus(worker_id="d0", stalled_s=99.0)
    assert worker.usable
    worker.status = WorkerStatus(worker_id="d0", stalled_s=101.0)
    assert not worker.usable


async def test_a_request_on_a_worker_that_is_replaced_or_removed_is_told_that_it_is_lost():
    async with asyncio.timeout(PATIENCE_S), hosts(decode=LAYOUT) as started:
        started[0]._engine._stepping = "manual"
        async with a_fleet([started[0].address]) as fleet:
            leg = asyncio.ensure_future(anext(task_deltas(fleet.get("decode-0").client, make_task())))
            await eventually(lambda: started[0]._engine.running)
            await fleet.remove("decode-0")
            with pytest.raises(WorkerLost, match="has left"):
                await leg
            await fleet.remove("decode-0")
            assert fleet.workers == []


async def test_a_call_under_way_when_its_worker_is_removed_fails_and_is_not_cancelled(monkeypatch):
    asked = asyncio.Event()

    async def never(self, request):
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(WorkerHost, "_submit", never)
    async with asyncio.timeout(PATIENCE_S), hosts(decode=LAYOUT) as started, a_fleet([started[0].address]) as fleet:
        client = fleet.get("decode-0").client
        leg = asyncio.ensure_future(anext(task_deltas(client, make_task())))
        await asked.wait()
        await fleet.remove("decode-0")
        with pytest.raises(WorkerLost, match="has left"):
            await leg
        with pytest.raises(WorkerLost, match="has left"):
            await anext(task_deltas(client, make_task("another")))


async def test_a_worker_that_came_back_different_or_not_at_all_changes_nothing(monkeypatch):
    other = msgspec.structs.replace(LAYOUT, isa="vec")
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT) as old,
        hosts(decode=other) as new,
        a_fleet([host.address for host in old]) as fleet,
    ):
        before, pairs = fleet.get("decode-0"), fleet.kv_pairs
        with pytest.raises(PairingRefused, match="isa"):
            await fleet.replace(new[0].address, "actor_died")
        monkeypatch.setattr("ridgeline.router.fleet.fleet.CONNECT_TIMEOUT_S", 0.5)
        with pytest.raises(WorkerLost):
            await fleet.replace("127.0.0.1:9", "actor_died")
        assert (fleet.get("decode-0"), fleet.kv_pairs, dict(fleet.restarts)) == (before, pairs, {})
        assert before.client.connected


async def test_a_worker_comes_back_also_while_another_one_hangs(monkeypatch):
    async def hang(addresses, transport=None):
        await asyncio.sleep(2 * PATIENCE_S)

    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT) as old,
        hosts(prefill=LAYOUT) as new,
        a_fleet([host.address for host in old]) as fleet,
    ):
        old[1]._engine.pair = hang
        monkeypatch.setattr("ridgeline.worker_runtime.client.PAIR_DEADLINE_S", 0.3)
        await fleet.replace(new[0].address, "stalled")
        assert fleet.get("prefill-0").client.address == new[0].address
        assert fleet.kv_pairs == []


async def test_a_worker_that_hangs_holds_up_neither_a_newcomer_for_long_nor_the_next_one_at_all(monkeypatch):
    monkeypatch.setattr("ridgeline.router.fleet.fleet.PAIR_WITHIN_S", 2 * PATIENCE_S)
    monkeypatch.setattr("ridgeline.worker_runtime.client.PAIR_DEADLINE_S", 2 * PATIENCE_S)
    asked = []

    async def hang(addresses, transport=None):
        asked.append(addresses)
        await asyncio.Event().wait()

    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT, decode_1=LAYOUT) as old,
        hosts(prefill=LAYOUT, decode_1=LAYOUT) as new,
        hosts(prefill=LAYOUT) as newest,
        a_fleet([host.address for host in old]) as fleet,
    ):
        await old[0].stop()
        await old[2].stop()
        old[1]._engine.pair = hang
        held_up = asyncio.create_task(fleet.replace(new[0].address, "actor_died"))
        await eventually(lambda: asked)
        assert not fleet.get("prefill-0").usable, "not yet"
        await fleet.replace(new[1].address, "actor_died")
        assert fleet.get("decode-1").usable
        assert fleet.kv_pairs == [KvPair("prefill-0", "decode-1", "shm", "")]
        assert not held_up.done()
        monkeypatch.setattr("ridgeline.router.fleet.fleet.PAIR_WITHIN_S", 0.2)
        await fleet.replace(newest[0].address, "actor_died")
        assert fleet.get("prefill-0").client.address == newest[0].address
        assert fleet.get("prefill-0").usable
        await eventually(lambda: fleet.kv_pairs)
        assert fleet.kv_pairs == [KvPair("prefill-0", "decode-1", "shm", "")]
        held_up.cancel()


async def test_all_decode_workers_are_asked_at_a_time():
    together = asyncio.Barrier(3)

    async def meet(addresses, transport=None):
        await together.wait()
        return {}

    names = {"prefill": LAYOUT, "decode": LAYOUT, "decode_1": LAYOUT, "decode_2": LAYOUT}
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(**names) as old,
        hosts(prefill=LAYOUT) as new,
        a_fleet([host.address for host in old]) as fleet,
    ):
        for host in old[1:]:
            host._engine.pair = meet
        await fleet.replace(new[0].address, "actor_died")
        assert not together.broken


async def test_a_source_that_a_decode_worker_cannot_reach_now_does_not_keep_it_away():
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT) as old,
        hosts(decode=LAYOUT) as new,
        a_fleet([host.address for host in old]) as fleet,
    ):
        msgspec.structs.force_setattr(fleet.get("prefill-0").description, "transfer_addresses", ["refuse:1"])
        await fleet.replace(new[0].address, "actor_died")
        assert fleet.get("decode-0").client.address == new[0].address
        assert fleet.kv_pairs == []


async def test_a_prefill_and_a_decode_worker_that_come_back_at_once_find_each_other():
    layouts = {"prefill": LAYOUT, "decode": LAYOUT}
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(**layouts) as old,
        hosts(**layouts) as new,
        a_fleet([host.address for host in old]) as fleet,
    ):
        await asyncio.gather(*(host.stop() for host in old))
        await eventually(lambda: not any(worker.client.connected for worker in fleet.workers))
        await asyncio.gather(*(fleet.replace(host.address, "actor_died") for host in new))
        assert fleet.kv_pairs == [KvPair("prefill-0", "decode-0", "shm", "")]


async def test_a_pair_that_goes_another_way_than_before_is_a_warning(caplog):
    layouts = {"prefill": LAYOUT, "decode": LAYOUT}
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(**layouts) as old,
        hosts(decode=LAYOUT) as again,
        hosts(decode=LAYOUT) as slower,
        a_fleet([host.address for host in old]) as fleet,
    ):

        async def by_grpc(addresses, transport=None):
            return dict.fromkeys(addresses, PairedTransport("grpc", "not cuda-ipc: it is in another container"))

        slower[0]._engine.pair = by_grpc
        await fleet.replace(again[0].address, "actor_died")
        assert "goes by" not in caplog.text
        await fleet.replace(slower[0].address, "actor_died")
    assert [record.message for record in caplog.records if "goes by" in record.message] == [
        "KV prefill-0 -> decode-0 goes by grpc now, by shm before (not cuda-ipc: it is in another container)"
    ]


async def test_decode_workers_forget_a_prefill_worker_that_has_left():
    asked = []
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT) as started,
        hosts(prefill_1=LAYOUT) as second,
    ):
        msgspec.structs.force_setattr(second[0]._description, "transfer_addresses", ["127.0.0.1:7002"])
        async with a_fleet([host.address for host in (*started, *second)]) as fleet:
            engine = started[1]._engine
            pair = engine.pair

            async def pair_and_note(addresses, transport=None):
                asked.append(addresses)
                return await pair(addresses, transport)

            engine.pair = pair_and_note
            await fleet.remove("prefill-0")
            assert fleet.kv_pairs == [KvPair("prefill-1", "decode-0", "shm", "")]
            await fleet.remove("prefill-1")
            assert fleet.kv_pairs == []
            await fleet.remove("prefill-1")
            await fleet.remove("decode-0")
    assert asked == [["127.0.0.1:7002"], []], "who is not named is forgotten"


async def test_a_decode_worker_that_does_not_answer_does_not_keep_a_prefill_worker_from_leaving(monkeypatch):
    asked = []

    async def hang(addresses, transport=None):
        await asyncio.sleep(2 * PATIENCE_S)

    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT) as started,
        a_fleet([host.address for host in started]) as fleet,
    ):
        started[1]._engine.pair = hang
        client = fleet.get("decode-0").client
        pair = client.pair

        async def note_and_pair(addresses, transport=None):
            asked.append(addresses)  # here: the deadline may end before the worker hears of it
            return await pair(addresses, transport)

        client.pair = note_and_pair
        monkeypatch.setattr("ridgeline.worker_runtime.client.PAIR_DEADLINE_S", 0.3)
        await fleet.remove("prefill-0")
        assert asked == [[]]
        assert [worker.worker_id for worker in fleet.workers] == ["decode-0"]


@pytest.mark.parametrize(
    ("field", "value"), [("isa", "vec"), ("block_size", 16), ("model", "another"), ("engine_version", "1")]
)
async def test_workers_that_cannot_exchange_kv_are_refused_with_the_field_that_differs(field, value):
    other = msgspec.structs.replace(LAYOUT, **{field: value})
    async with asyncio.timeout(PATIENCE_S), hosts(prefill=LAYOUT, decode=other) as started:
        with pytest.raises(ExceptionGroup) as refused:
            async with asyncio.TaskGroup() as group:
                await Fleet("router").connect([host.address for host in started], group)
        [error] = refused.value.exceptions
        assert isinstance(error, PairingRefused)
        for part in ("prefill-0", "decode-0", field, repr(value), repr(getattr(LAYOUT, field))):
            assert part in str(error)


async def test_a_worker_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr("ridgeline.router.fleet.fleet.CONNECT_TIMEOUT_S", 0.01)
    with pytest.raises(ExceptionGroup) as lost:
        async with asyncio.TaskGroup() as group:
            await Fleet("router").connect(["127.0.0.1:9"], group)
    [error] = lost.value.exceptions
    assert isinstance(error, WorkerLost)
    assert "127.0.0.1:9" in str(error)


async def test_a_fleet_that_is_started_again_begins_with_the_workers_that_it_reaches(monkeypatch):
    monkeypatch.setattr("ridgeline.router.fleet.fleet.STRAGGLERS_S", 0.1)
    async with asyncio.timeout(PATIENCE_S), hosts(prefill=LAYOUT, decode=LAYOUT) as started:
        fleet = Fleet("router")
        try:
            async with asyncio.TaskGroup() as group:
                await fleet.connect([started[0].address, "127.0.0.1:9"], group, some=True)
                assert [worker.worker_id for worker in fleet.workers] == ["prefill-0"]
                assert fleet.unreached(0.0) == ["127.0.0.1:9"], "to be registered"
                assert fleet.unreached(30.0) == [], "not yet a reason to start it again"
                await eventually(lambda: fleet.unreached(0.01) == ["127.0.0.1:9"])
                fleet._missed_since_s = {started[1].address: 0.0}  # the same, with a worker that is reached in the end
                assert fleet.unreached(30.0) == [started[1].address]
                await fleet.replace(started[1].address, None)
                assert [worker.worker_id for worker in fleet.workers] == ["prefill-0", "decode-0"]
                assert fleet.unreached(0.0) == []
                assert not fleet.restarts, "nothing was started again"
                raise Done
        except* Done:
            pass


async def test_a_fleet_that_reaches_nobody_does_not_begin(monkeypatch):
    monkeypatch.setattr("ridgeline.router.fleet.fleet.CONNECT_TIMEOUT_S", 0.01)
    with pytest.raises(ExceptionGroup) as lost:
        async with asyncio.TaskGroup() as group:
            await Fleet("router").connect(["127.0.0.1:9", "127.0.0.1:19"], group, some=True)
    assert isinstance(lost.value.exceptions[0], WorkerLost)


async def test_of_a_worker_that_is_removed_no_restarts_are_kept():
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=LAYOUT) as started,
        a_fleet([host.address for host in started]) as fleet,
    ):
        fleet.restarts["decode", "decode-0", "stalled"] = fleet.restarts["prefill", "prefill-0", "stalled"] = 1
        await fleet.remove("decode-0")
        assert list(fleet.restarts) == [("prefill", "prefill-0", "stalled")]


# --- who there is


async def test_members_are_all_workers_also_those_that_do_not_run_or_were_never_seen_here():
    decodes = Role(mode="disaggregated", pool="decode", max_num_seqs=1, max_num_batched_tokens=1)
    roles = RoleTable("disaggregated", of_new={"disaggregated": {"adaptive": decodes}})
    async with (
        hosts(prefill=LAYOUT, decode=LAYOUT, decode_1=LAYOUT) as started,
        a_fleet([host.address for host in started], roles) as fleet,
    ):
        started[2].drain(60)
        await started[1].stop()
        await eventually(lambda: not fleet.get("decode-0").usable)
        await fleet.refresh()
        found = members(fleet, {"decode-0": "decode", "worker-7": "adaptive", "worker-8": "prefill"})
        assert found.mode == "disaggregated"
        now = {worker.worker_id: worker.description.incarnation for worker in fleet.workers}
        assert found.workers == {
            "prefill-0": Member("prefill", usable=True, draining=False, incarnation=now["prefill-0"]),
            "decode-0": Member("decode", usable=False, draining=False, incarnation=now["decode-0"]),
            "decode-1": Member("decode", usable=False, draining=True, incarnation=now["decode-1"]),
            "worker-7": Member("decode", usable=False, draining=False),
            "worker-8": Member("prefill", usable=False, draining=False),
        }


@pytest.mark.parametrize("reuses", [False, True])
async def test_prefill_workers_pair_with_decode_workers_too_if_they_are_to_reuse_their_kv(reuses):
    layouts = {"prefill": LAYOUT, "prefill_1": LAYOUT, "decode": LAYOUT}
    back = [KvPair("decode-0", sink, "shm", "") for sink in ("prefill-0", "prefill-1")] if reuses else []
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(**layouts) as old,
        hosts(prefill_1=LAYOUT) as again,
    ):
        for number, host in enumerate((*old, *again)):
            msgspec.structs.force_setattr(host._description, "transfer_addresses", [f"127.0.0.1:{7001 + number}"])
        async with a_fleet([host.address for host in old], reuses_decode_kv=reuses) as fleet:
            forth = [KvPair(source, "decode-0", "shm", "") for source in ("prefill-0", "prefill-1")]
            assert fleet.kv_pairs == [*forth, *back]
            assert fleet.is_paired(fleet.get("decode-0"), fleet.get("prefill-1")) is reuses
            assert fleet.is_paired(fleet.get("prefill-1"), fleet.get("decode-0"))
            await fleet.replace(again[0].address, "engine_died")
            assert {pair.link for pair in fleet.kv_pairs} == {pair.link for pair in (*forth, *back)}
            await fleet.remove("decode-0")
            assert fleet.kv_pairs == []


async def test_a_prefill_worker_that_does_not_reach_a_decode_worker_is_a_warning(caplog):
    async with asyncio.timeout(PATIENCE_S), hosts(prefill=LAYOUT, decode=LAYOUT) as started:
        msgspec.structs.force_setattr(started[1]._description, "transfer_addresses", ["refuse:1"])
        async with a_fleet([host.address for host in started], reuses_decode_kv=True) as fleet:
            assert fleet.kv_pairs == [KvPair("prefill-0", "decode-0", "shm", "")]
    assert [record.name for record in caplog.records if record.levelname == "WARNING"] == [
        "ridgeline.router.fleet.pairing"
    ]
