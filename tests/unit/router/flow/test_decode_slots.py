"""No client alone fills decode: whose prompt is started, and that no way out keeps a place."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from ridgeline.contracts.workers import WorkerStatus
from ridgeline.router.fleet.policy import Demand
from ridgeline.router.flow.decode_slots import DecodeSlots
from ridgeline.router.flow.prompt_queue import PromptQueue
from tests.unit.router.flow.test_prompt_queue import Bench, a_worker, settle


def slots_of(*workers):
    """Of decode workers that run eight sequences each."""
    for worker in workers:
        worker.description = type(worker.description)(
            **{name: getattr(worker.description, name) for name in worker.description.__struct_fields__}
            | {"max_num_seqs": 8}
        )
    return DecodeSlots(lambda: workers)


@pytest.fixture
async def bench():
    bench = Bench()
    bench.decodes[:] = [a_worker("decode-0")]
    bench.slots = slots_of(*bench.decodes)
    bench.queue = PromptQueue("prefill", lambda: bench.workers, 1000, 60.0, bench.slots, bench.clock)
    yield bench
    await bench.end()
    assert not bench.slots._held


def test_one_client_alone_has_seven_eighths_and_whoever_comes_is_let_in():
    slots = slots_of(a_worker())
    greedy = [slots.take("greedy") for _ in range(7)]
    assert not slots.may_start("greedy")
    assert slots.may_start("polite")
    slots.take("polite")
    greedy.pop().release()
    assert not slots.may_start("greedy"), "it may have seven eighths of seven"
    greedy.pop().release()
    assert slots.may_start("greedy")


def test_two_that_are_as_greedy_have_half_each_and_one_is_still_free():
    slots = slots_of(a_worker("decode-0"), a_worker("decode-1"))
    held = {"a": 0, "b": 0}
    for _ in range(20):
        for client in held:
            if slots.may_start(client):
                slots.take(client)
                held[client] += 1
    assert sum(held.values()) < 16
    assert abs(held["a"] - held["b"]) <= 1


def test_a_client_with_nothing_is_let_in_whatever_the_others_hold():
    slots = slots_of(a_worker())
    for number in range(30):
        slots.take(f"client-{number}")
    assert slots.may_start("another")


def test_what_runs_on_a_worker_that_leaves_takes_no_place_from_the_others():
    stays, leaves = a_worker("decode-0"), a_worker("decode-1")
    slots = slots_of(stays, leaves)
    for _ in range(7):
        slots.take("a").on(leaves)
    leaves.status = WorkerStatus(worker_id="decode-1", draining=True)
    assert slots.may_start("a")
    for _ in range(7):
        slots.take("a").on(stays)
    assert not slots.may_start("a")


def test_a_place_is_given_back_once():
    slots, heard = slots_of(a_worker()), []
    slots.tell(lambda: heard.append(slots.may_start("a")))
    held = [slots.take("a") for _ in range(7)]
    held[0].release()
    held[0].release()
    assert (heard, slots._total) == ([True], 6)


async def test_a_prompt_is_not_started_before_its_answer_has_a_place_and_others_pass_it(bench):
    held = [bench.slots.take("greedy") for _ in range(7)]
    await bench.send("waits", 10, client="greedy")
    await bench.send("passes", 10, client="polite")
    assert bench.started == ["passes"]
    for slot in held[:2]:  # seven eighths of what the polite one leaves
        slot.release()
    await settle()
    assert bench.started == ["passes", "waits"]
    for slot in held:
        slot.release()


async def test_what_is_urgent_does_not_wait_for_a_place(bench):
    held = [bench.slots.take("a") for _ in range(7)]
    await bench.send("again", 10, client="a", urgent=True)
    assert bench.started == ["again"]
    for slot in held:
        slot.release()


async def test_a_client_that_leaves_while_it_waits_for_a_place_holds_nothing(bench):
    held = [bench.slots.take("a") for _ in range(7)]
    await bench.send("gone", 10, client="a")
    await bench.cancel("gone")
    for slot in held:
        slot.release()
    assert (bench.queue.waiting, bench.started, bench.slots._held) == (0, [], {})


async def test_a_prompt_that_is_cancelled_on_its_way_to_its_worker_gives_its_place_back(bench):
    held = [bench.slots.take("a") for _ in range(7)]
    await bench.send("gone", 10, client="a")
    held[0].release()  # it is granted now, and has not run yet
    await bench.cancel("gone")
    assert bench.slots._total == 6
    for slot in held:
        slot.release()


async def test_no_place_stays_taken_whatever_becomes_of_the_turns(bench):
    async def one(number):
        async with (
            AsyncExitStack() as stack,
            bench.queue.turn(Demand(100, client=f"client-{number % 3}"), decodes_here=False) as turn,
        ):
            if number % 2:
                slot = turn.take_slot()
                stack.callback(slot.release)
                slot.on(bench.decodes[0])
            await asyncio.sleep(0)
            turn.prompt_done()
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(number)) for number in range(60)]
    await settle()
    for task in tasks[::4]:
        task.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not bench.slots._held


async def test_who_may_start_is_counted_once_a_grant_however_many_clients_wait(bench):
    await bench.send("first", 1000)
    for number in range(50):
        await bench.send(f"waits {number}", 10, client=f"client-{number}")
    counted = []
    bench.slots._workers = lambda: counted.append(1) or bench.decodes
    await bench.finish("first")
    assert len(bench.started) == 51
    assert len(counted) <= len(bench.started) + 2, "once for each prompt that was started, and when none is left"


async def test_of_two_pools_whose_prompts_wait_for_places_each_gets_its_turn():
    bench = Bench()
    bench.decodes[:] = [a_worker("decode-0")]
    slots = slots_of(*bench.decodes)
    long = PromptQueue("prefill", lambda: bench.workers, 100_000, 60.0, slots, bench.clock)
    short = PromptQueue("decode", lambda: bench.decodes, 100_000, 60.0, slots, bench.clock)
    started, held, tasks = [], [], []

    async def ask(queue, client):
        async with queue.turn(Demand(10, client=client), decodes_here=queue is short) as turn:
            started.append(queue.pool)
            turn.prompt_done()
            done = asyncio.Event()
            held.append(done)
            await done.wait()

    try:
        tasks += [asyncio.create_task(ask(long, "app")) for _ in range(30)]
        await settle()
        tasks += [asyncio.create_task(ask(short, "app")) for _ in range(3)]
        await settle()
        assert started == ["prefill"] * 7
        for _ in range(8):
            held.pop(0).set()
            await settle()
        assert started.count("decode") == 3, started
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_client_with_short_prompts_gets_its_part_of_the_places_beside_one_with_long_prompts():
    bench = Bench()
    bench.decodes[:] = [a_worker("decode-0")]
    slots = slots_of(*bench.decodes)
    long = PromptQueue("prefill", lambda: bench.workers, 100_000, 60.0, slots, bench.clock)
    short = PromptQueue("decode", lambda: bench.decodes, 100_000, 60.0, slots, bench.clock)
    running, tasks = [], []

    async def ask(queue, client):
        async with queue.turn(Demand(10, client=client), decodes_here=queue is short) as turn:
            turn.prompt_done()
            done = asyncio.Event()
            running.append((client, done))
            await done.wait()

    try:
        tasks += [asyncio.create_task(ask(long, "greedy")) for _ in range(60)]
        await settle()
        tasks += [asyncio.create_task(ask(short, "polite")) for _ in range(60)]
        await settle()
        for _ in range(30):
            running.pop(0)[1].set()
            await settle()
        held = [client for client, _ in running]
        assert held.count("polite") >= 3, held
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_a_look_takes_as_long_with_thousands_of_clients_as_with_a_few():
    workers = [a_worker(f"decode-{index}") for index in range(64)]

    def look_s(clients):
        slots = slots_of(*workers)
        for number in range(5000):
            slots.take(f"client-{number % clients}").on(workers[number % 64])
        took_s = []
        for _ in range(20):
            began_s = time.process_time()
            for _ in range(5):
                slots.may_start("client-0")
            took_s.append(time.process_time() - began_s)
        return min(took_s)

    assert look_s(5000) < 4 * look_s(1), "it was 30 times as long when each client's places were added up"
