"""Who gets a place on a worker, and that no way out of the queue loses one."""

import asyncio
import math
import random

import pytest

from ridgeline.contracts.workers import WorkerStatus
from ridgeline.router.fleet.fleet import Worker
from ridgeline.router.fleet.policy import PROMPT_SCORERS, Demand, NoWorker, Rerouted
from ridgeline.router.flow.choice import Choice
from ridgeline.router.flow.decode_slots import DecodeSlots
from ridgeline.router.flow.prompt_queue import PromptQueue
from ridgeline.router.scheduler.features import Assignment
from tests.support.clock import FakeClock
from tests.support.patience import eventually
from tests.support.samples import LAYOUT, worker_description

WINDOW = 1000


class Client:
    connected = True
    failed_s = float("-inf")


def a_worker(worker_id="prefill-0"):
    description = worker_description(worker_id=worker_id, pool="prefill", layout=LAYOUT)
    return Worker(Client(), description)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Bench:
    """A queue over workers, and prompts that hold their places until told."""

    def __init__(self, workers=1, recovery_timeout_s=60.0, chooser=None):
        self.clock = FakeClock()
        self.workers = [a_worker(f"prefill-{index}") for index in range(workers)]
        self.decodes = [a_worker("decode-0")]
        self.slots = DecodeSlots(lambda: self.decodes)
        self.queue = PromptQueue(
            "prefill", lambda: self.workers, WINDOW, recovery_timeout_s, self.slots, self.clock, chooser=chooser
        )
        self.started = []
        self.tasks = {}
        self.turns = {}
        self._done = {}

    async def send(self, name, tokens, client="a", urgent=False, limit_s=math.inf, waited_s=0.0, avoided=()):
        self._done[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(
            self._hold(
                name,
                Demand(tokens, client=client, ttft_limit_s=limit_s, waited_s=waited_s, avoided=frozenset(avoided)),
                urgent,
            )
        )
        await settle()

    async def _hold(self, name, demand, urgent):
        async with self.queue.turn(demand, decodes_here=False, urgent=urgent) as turn:
            self.started.append(name)
            self.turns[name] = turn
            await self._done[name].wait()
            turn.prompt_done()

    async def finish(self, name):
        self._done[name].set()
        await self.tasks[name]
        await settle()

    async def cancel(self, name):
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await settle()

    def outstanding(self):
        return [worker.load().outstanding_prompt_tokens for worker in self.workers]

    async def end(self):
        for name in self.tasks:
            await self.cancel(name)
        assert self.queue.waiting == 0
        assert all(
            (worker.load().running, worker.load().outstanding_prompt_tokens) == (0, 0) for worker in self.workers
        )


@pytest.fixture
async def bench():
    bench = Bench()
    yield bench
    await bench.end()


async def test_prompts_go_to_the_worker_until_its_window_is_full_and_on_when_there_is_room(bench):
    for name in ("one", "two", "three", "four"):
        await bench.send(name, 600)
    assert (bench.started, bench.outstanding(), bench.queue.waiting_tokens) == (["one", "two"], [1200], 1200)
    await bench.finish("one")
    assert (bench.started, bench.outstanding()) == (["one", "two", "three"], [1200])


async def test_a_prompt_longer_than_the_window_goes_to_a_worker_with_room(bench):
    await bench.send("long", 5000)
    await bench.send("short", 10)
    assert bench.started == ["long"]
    await bench.finish("long")
    assert bench.started == ["long", "short"]


async def test_a_place_is_free_from_the_first_token_on_and_not_only_at_the_end(bench):
    await bench.send("one", 2000)
    await bench.send("two", 2000)
    bench.turns["one"].prompt_done()
    await settle()
    assert bench.started == ["one", "two"]
    assert bench.workers[0].load().running == 2


async def test_the_worker_with_the_fewest_prompt_tokens_is_next():
    bench = Bench(workers=2)
    await bench.send("one", 900)
    await bench.send("two", 100)
    await bench.send("three", 100)
    assert [bench.turns[name].worker.worker_id for name in ("one", "two", "three")] == [
        "prefill-0",
        "prefill-1",
        "prefill-1",
    ]
    await bench.end()


async def test_the_worker_is_chosen_for_the_prompt_that_is_next_and_by_what_it_asks_for(monkeypatch):
    def by_length(demand, load):
        return (load.worker_id != ("prefill-1" if demand.prompt_tokens > 100 else "prefill-0"),)

    monkeypatch.setitem(PROMPT_SCORERS, "prefill", by_length)
    bench = Bench(workers=2)
    for name, tokens in (("long", 900), ("short", 100), ("longer", 800), ("shorter", 50)):
        await bench.send(name, tokens)
    assert {name: turn.worker.worker_id for name, turn in bench.turns.items()} == {
        "long": "prefill-1",
        "short": "prefill-0",
        "longer": "prefill-1",
        "shorter": "prefill-0",
    }
    await bench.end()


async def test_no_worker_is_chosen_for_a_prompt_whose_client_left_while_it_waited(monkeypatch):
    asked_for = []

    def noting(demand, load):
        asked_for.append(demand.prompt_tokens)
        return (0,)

    monkeypatch.setitem(PROMPT_SCORERS, "prefill", noting)
    bench = Bench()
    for name, tokens in (("one", 2000), ("left", 300), ("two", 400)):
        await bench.send(name, tokens)
    bench.tasks["left"].cancel()  # its task has not run yet when the place becomes free
    bench.turns["one"].prompt_done()
    await settle()
    assert asked_for == [2000, 400]
    assert bench.started == ["one", "two"]
    await bench.end()


async def test_a_prompt_for_which_the_choice_of_a_worker_fails_leaves_the_queue_with_that_error(monkeypatch):
    def failing(demand, load):
        raise ZeroDivisionError

    monkeypatch.setitem(PROMPT_SCORERS, "prefill", failing)
    bench = Bench()
    await bench.send("one", 100)
    assert bench.queue.waiting == 0
    with pytest.raises(ZeroDivisionError):
        await bench.tasks["one"]


async def test_a_short_prompt_of_another_client_is_next_after_what_the_worker_has(bench):
    for index in range(10):
        await bench.send(f"flood-{index}", 2000, "flood")
    await bench.send("short", 40, "other")
    await bench.finish("flood-0")
    assert bench.started[1] in ("short", "flood-1")
    if bench.started[1] == "flood-1":
        await bench.finish("flood-1")
    assert "short" in bench.started[:3]


async def test_an_urgent_prompt_passes_all_that_wait(bench):
    await bench.send("one", 2000)
    await bench.send("two", 20)
    await bench.send("health-probe", 40, "health-probe", urgent=True)
    await bench.finish("one")
    assert bench.started == ["one", "health-probe", "two"]


@pytest.mark.parametrize("seed", range(20))
async def test_a_short_prompt_starts_within_the_stated_bound_however_others_flood(seed):
    """Simulation: each step the worker finishes its first prompt; tokens computed before the short one are counted."""
    chance, bench = random.Random(seed), Bench()
    longest, clients, sizes, number = 2000, chance.randint(1, 4), {}, 0

    async def flood(client):
        nonlocal number
        number += 1
        name = f"{client}-{number}"
        sizes[name] = chance.randint(1, longest)
        await bench.send(name, sizes[name], client)

    for client in range(clients):
        for _ in range(chance.randint(1, 12)):
            await flood(f"flood-{client}")
    in_service = bench.outstanding()[0]
    assert in_service < WINDOW + longest
    await bench.send("short", 40, "short")
    computed = 0
    while "short" not in bench.started:
        first = next(name for name in bench.started if not bench.tasks[name].done())
        computed += sizes[first]
        await flood(first.rpartition("-")[0])  # the others never run out
        await bench.finish(first)
    assert computed <= WINDOW + longest + clients * (512 + longest)
    await bench.end()


# --- cancelled in every state


async def test_a_prompt_that_is_cancelled_while_it_waits_leaves_the_queue(bench):
    await bench.send("one", 2000)
    await bench.send("two", 2000)
    await bench.send("three", 10)
    await bench.cancel("two")
    await bench.finish("one")
    assert bench.started == ["one", "three"]


async def test_a_place_given_to_a_prompt_that_is_cancelled_at_that_moment_is_passed_on(bench):
    await bench.send("one", 2000)
    await bench.send("two", 2000)
    await bench.send("three", 2000)
    bench._done["one"].set()
    bench.turns["one"].prompt_done()  # the place is two's from here on, and its task has not run yet
    assert bench.outstanding() == [2000]
    await bench.cancel("two")
    assert bench.started == ["one", "three"]


async def test_a_prompt_cancelled_just_before_a_place_is_free_does_not_get_it(bench):
    await bench.send("one", 2000)
    await bench.send("two", 2000)
    await bench.send("three", 2000)
    bench.tasks["two"].cancel()  # its task has not run yet
    bench.turns["one"].prompt_done()
    await settle()
    assert bench.started == ["one", "three"]


async def test_a_prompt_that_is_cancelled_on_the_worker_frees_its_place(bench):
    await bench.send("one", 2000)
    await bench.send("two", 2000)
    await bench.cancel("one")
    assert (bench.started, bench.outstanding()) == (["one", "two"], [2000])


async def test_a_block_that_fails_frees_its_place(bench):
    with pytest.raises(RuntimeError):
        async with bench.queue.turn(Demand(2000, client="a"), decodes_here=False):
            raise RuntimeError
    assert bench.outstanding() == [0]


async def test_nothing_is_lost_when_many_come_go_and_are_cancelled_at_random():
    chance, bench = random.Random(7), Bench(workers=3)
    for index in range(300):
        await bench.send(f"{index}", chance.randint(1, 1500), f"client-{index % 5}")
        for name in chance.sample(sorted(bench.tasks), k=min(2, len(bench.tasks))):
            if chance.random() < 0.5:
                bench.tasks[name].cancel()
            else:
                bench._done[name].set()
    for done in bench._done.values():
        done.set()
    await asyncio.gather(*bench.tasks.values(), return_exceptions=True)
    await bench.end()


# --- workers that come and go


async def test_prompts_wait_for_a_pool_that_has_lost_its_workers_and_go_on_when_one_is_back(bench):
    bench.workers[0].client.connected = False
    await bench.send("one", 10)
    bench.clock.now_s += 59
    bench.queue.dispatch()
    await settle()
    assert (bench.started, bench.queue.waiting, bench.queue.usable_workers) == ([], 1, 0)
    bench.workers = [a_worker("prefill-7")]
    bench.queue.dispatch()
    await settle()
    assert bench.turns["one"].worker.worker_id == "prefill-7"


async def test_a_pool_that_stays_without_a_worker_fails_what_waits_and_names_the_setting(bench):
    bench.workers[0].client.connected = False
    await bench.send("one", 10)
    await bench.send("two", 10)
    bench.clock.now_s += 60
    bench.queue.dispatch()
    for name in ("one", "two"):
        with pytest.raises(NoWorker, match=r"no prefill worker .* 60 s \(router\.recovery_timeout_s\)"):
            await bench.tasks[name]


async def test_the_time_without_a_worker_begins_anew_with_each_outage(bench):
    worker = bench.workers[0]
    worker.client.connected = False
    await bench.send("one", 2000)
    bench.clock.now_s += 50
    worker.client.connected = True
    bench.queue.dispatch()
    await settle()
    await bench.send("two", 10)
    worker.client.connected = False
    bench.clock.now_s += 50
    bench.queue.dispatch()
    await settle()
    assert (bench.started, bench.queue.waiting) == (["one"], 1)


async def test_a_worker_is_found_again_without_being_told(bench, monkeypatch):
    monkeypatch.setattr("ridgeline.router.flow.prompt_queue.RECHECK_S", 0.001)
    bench.workers[0].client.connected = False
    await bench.send("one", 10)
    bench.workers[0].client.connected = True
    await eventually(lambda: bench.started)


async def test_a_draining_worker_gets_nothing(bench):
    bench.workers.append(a_worker("prefill-1"))
    bench.workers[0].status = WorkerStatus(worker_id="prefill-0", draining=True)
    await bench.send("one", 10)
    assert bench.turns["one"].worker.worker_id == "prefill-1"


# --- what admission reads


async def test_the_wait_is_known_once_full_workers_were_measured(bench):
    assert bench.queue.wait_s("a", 100) is None
    await bench.send("one", 2000)
    await bench.send("two", 2000)
    await bench.send("three", 2000)
    bench.clock.now_s += 8
    await bench.finish("one")
    assert bench.queue.tokens_per_s == pytest.approx(250)
    assert bench.queue.wait_s("a", 100) == pytest.approx((2000 + 2000) / 250)
    assert bench.queue.wait_s("b", 100) == pytest.approx((2000 + 2000) / 250), "what is there already, and one prompt"
    await bench.send("four", 2000)
    assert bench.queue.wait_s("a", 100) == pytest.approx(6000 / 250)
    assert bench.queue.wait_s("b", 100) == pytest.approx((2000 + 2100) / 250)


async def test_an_idle_pool_is_not_measured_by_a_short_prompt(bench):
    await bench.send("one", 20)
    bench.clock.now_s += 2
    await bench.finish("one")
    assert bench.queue.tokens_per_s is None


async def test_more_workers_make_the_wait_shorter():
    bench = Bench(workers=2)
    for name in ("one", "two", "three"):
        await bench.send(name, 2000)
    bench.clock.now_s += 8
    await bench.finish("one")
    assert bench.queue.tokens_per_s == pytest.approx(500)
    bench.workers[1].client.connected = False
    assert bench.queue.tokens_per_s == pytest.approx(250)
    await bench.end()


async def test_what_a_worker_would_take_at_once_does_not_wait_however_slow_it_was(bench):
    for name in ("one", "two"):
        await bench.send(name, WINDOW)
    bench.clock.now_s += 1000.0
    await bench.finish("one")
    bench.clock.now_s += 1000.0
    await bench.finish("two")
    assert bench.queue.tokens_per_s == pytest.approx(1.0)
    assert bench.queue.wait_s("a", 100) == 0.0
    await bench.send("three", WINDOW - 1)
    assert bench.queue.wait_s("a", 100) == 0.0, "its window has room"
    await bench.send("four", WINDOW)
    assert bench.queue.wait_s("a", 100) > WINDOW


async def test_a_worker_that_is_usable_again_takes_what_waits_without_being_told():
    bench = Bench(workers=2)
    bench.workers[1].client = Client()
    bench.workers[1].client.connected = False
    await bench.send("one", WINDOW)
    await bench.send("two", WINDOW)
    assert bench.started == ["one"]
    bench.workers[1].client.connected = True
    await eventually(lambda: bench.started == ["one", "two"])
    await bench.end()


class Whole:
    """A chooser that takes the first worker that a prompt's router reaches, however full, as predictions may."""

    def __init__(self, bench):
        self.bench = bench

    def choose(self, demand, waited_s, roomy, *, urgent):
        worker = next(one for one in self.bench().workers if one.worker_id not in demand.avoided)
        return Choice(worker) if worker in roomy else None

    def arrived(self, demand):
        return None

    def least_s(self, demand):
        return None


@pytest.mark.parametrize("by_prediction", [False, True])
async def test_a_prompt_of_a_router_that_reaches_only_full_workers_holds_up_no_others_and_is_next_there(by_prediction):
    bench = Bench(workers=2)
    if by_prediction:
        bench.queue._chooser = Whole(lambda: bench)
    await bench.send("fills", WINDOW, avoided=["prefill-1"])
    await bench.send("cut off", 10, client="b", avoided=["prefill-1"])
    await bench.send("left", 10, client="b", avoided=["prefill-1"])
    await bench.send("later", 10, client="b", avoided=["prefill-0"])
    assert bench.started == ["fills", "later"]
    assert (bench.queue.waiting, bench.queue.waiting_tokens) == (2, 20)
    await bench.cancel("left")
    await bench.finish("fills")
    assert bench.started == ["fills", "later", "cut off"]
    assert bench.turns["cut off"].worker.worker_id == "prefill-0"
    assert bench.queue.waiting == 0
    await bench.end()


async def test_prompts_that_were_set_aside_and_the_others_go_in_turn_once_there_is_room():
    bench = Bench(workers=2)
    await bench.send("fills", WINDOW, "greedy", avoided=["prefill-1"])
    for number in range(4):
        await bench.send(f"aside {number}", 900, "greedy", avoided=["prefill-1"])
    await bench.send("fills too", WINDOW, "polite", avoided=["prefill-0"])
    for number in range(4):
        await bench.send(f"polite {number}", 900, "polite", avoided=["prefill-1"] * (number > 1))
    assert bench.started == ["fills", "fills too"]
    await bench.finish("fills")
    for name in ("aside 0", "polite 0", "aside 1", "polite 1", "aside 2", "polite 2", "aside 3", "polite 3"):
        assert name in bench.started
        await bench.finish(name)
    assert bench.started[2:] == [f"{who} {number}" for number in range(4) for who in ("aside", "polite")]
    await bench.end()


async def test_the_estimated_wait_counts_prompts_that_were_set_aside_as_those_of_their_clients():
    bench = Bench(workers=2)
    await bench.send("measured", 10 * WINDOW, avoided=["prefill-1"])
    bench.clock.now_s += 10
    await bench.finish("measured")
    await bench.send("fills", WINDOW, avoided=["prefill-1"])
    for number in range(5):
        await bench.send(f"aside {number}", 700, "greedy", avoided=["prefill-1"])
    assert bench.queue.wait_s("other", 100) == 0.0, "the other worker would take it"
    await bench.send("fills too", WINDOW, avoided=["prefill-0"])
    per_s = bench.queue.tokens_per_s
    assert bench.queue.wait_s("other", 100) == pytest.approx((2 * WINDOW + 700 + 100) / per_s)
    assert bench.queue.wait_s("greedy", 100) == pytest.approx((2 * WINDOW + 5 * 700) / per_s)
    assert bench.queue.now().waiting.prompts == 5
    await bench.end()


async def test_a_prompt_that_was_set_aside_is_sent_away_with_the_others(bench):
    bench.workers.append(a_worker("prefill-1"))
    await bench.send("fills", WINDOW, avoided=["prefill-1"])
    await bench.send("cut off", 10, avoided=["prefill-1"])
    assert bench.queue.send_away() == 1
    with pytest.raises(Rerouted):
        await bench.tasks["cut off"]
    await bench.end()


class Faulty:
    """A chooser whose predictions fail."""

    def choose(self, demand, waited_s, roomy, *, urgent):
        raise ZeroDivisionError

    def arrived(self, demand):
        return None

    def least_s(self, demand):
        return None


async def test_while_predictions_fail_prompts_go_to_the_least_loaded_worker():
    bench = Bench(workers=2, chooser=Faulty())
    for name in ("one", "two"):
        await bench.send(name, 100)
    assert {name: turn.worker.worker_id for name, turn in bench.turns.items()} == {
        "one": "prefill-0",
        "two": "prefill-1",
    }
    await bench.end()


async def test_a_request_whose_first_token_makes_room_is_not_ended_by_the_fault_of_the_choice_for_the_next(monkeypatch):
    def failing_for_short_ones(demand, load):
        return (1 / (demand.prompt_tokens - 10),)

    monkeypatch.setitem(PROMPT_SCORERS, "prefill", failing_for_short_ones)
    bench = Bench()
    for name, tokens in (("fills", WINDOW), ("fault", 10), ("next", 20)):
        await bench.send(name, tokens)
    await bench.finish("fills")
    with pytest.raises(ZeroDivisionError):
        await bench.tasks["fault"]
    assert bench.started == ["fills", "next"]
    await bench.end()


class Patient:
    """A chooser that goes by limits, and always takes the first worker that it is shown."""

    def __init__(self):
        self.asked = []
        self.is_picky = True

    def choose(self, demand, waited_s, roomy, *, urgent):
        self.asked.append((demand.client, waited_s))
        if self.is_picky and demand.client == "picky":
            return None
        return Choice(roomy[0], assignment=Assignment("prefill-0", "prefill-0", "fewest_prompt_tokens"))

    def arrived(self, demand):
        return None

    def least_s(self, demand):
        return 1.0


async def test_a_clients_prompts_go_by_their_limits_and_the_late_ones_last():
    bench = Bench(chooser=Patient())
    await bench.send("fills", WINDOW)
    await bench.send("late", 10, limit_s=2.0)
    await bench.send("relaxed", 10, limit_s=60.0)
    await bench.send("hurried", 10, limit_s=20.0)
    await bench.send("whenever", 10)
    bench.clock.now_s += 5
    await bench.finish("fills")
    assert bench.started == ["fills", "hurried", "relaxed", "whenever", "late"]


async def test_a_chooser_is_told_how_long_a_request_has_waited_and_may_have_it_wait_on():
    chooser = Patient()
    bench = Bench(chooser=chooser)
    await bench.send("one", 10, client="picky", waited_s=3.0)
    bench.clock.now_s += 4
    bench.queue.dispatch()
    assert bench.started == []
    assert chooser.asked[-1] == ("picky", 7.0)
    await bench.end()


async def test_the_time_for_which_a_prompt_was_held_back_is_told_with_the_assignment():
    chooser = Patient()
    bench = Bench(chooser=chooser)
    await bench.send("fills", WINDOW)
    await bench.send("one", 10, client="picky")
    bench.clock.now_s += 4  # no worker has room, so it is not held back
    await bench.finish("fills")
    bench.clock.now_s += 2
    bench.queue.dispatch()
    bench.clock.now_s += 1
    await bench.send("urgent", WINDOW, urgent=True)
    bench.clock.now_s += 8  # no worker has room again
    await bench.finish("urgent")
    bench.clock.now_s += 0.5
    chooser.is_picky = False
    bench.queue.dispatch()
    await settle()
    held_s = {name: turn.assignment.held_s for name, turn in bench.turns.items()}
    assert held_s == {"fills": 0.0, "urgent": 0.0, "one": 3.5}
    await bench.end()
