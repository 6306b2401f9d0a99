"""Who gets a place on a worker, and that no way out loses one."""

import asyncio
import random
import re

import msgspec
import pytest

from ridgeline.contracts.errors import EngineFailed
from ridgeline.contracts.workers import WorkerStatus
from ridgeline.router.fleet.request_route import SPLIT, Demand
from ridgeline.router.placement.choice import Choice
from ridgeline.router.placement.placement_events import Doubts, Keeps
from ridgeline.router.placement.places import Placement, own_placement
from ridgeline.router.placement.pool_queue import ADAPTER_WAITS_S, RouterRequests
from ridgeline.router.scheduler.features import Assignment
from tests.support.samples import router_settings
from tests.unit.router.placement.bench import WINDOW, Bench, a_worker


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.end()


def test_prompts_go_to_the_worker_until_its_window_is_full_and_on_when_there_is_room(bench):
    for name in ("one", "two", "three", "four"):
        bench.send(name, 600)
    assert (bench.started, bench.outstanding(), bench.queue.now().waiting.tokens) == (["one", "two"], [1200], 1200)
    bench.finish("one")
    assert (bench.started, bench.outstanding()) == (["one", "two", "three"], [1200])


def test_a_prompt_longer_than_the_window_goes_to_a_worker_with_room(bench):
    bench.send("long", 5000)
    bench.send("short", 10)
    assert bench.started == ["long"]
    bench.finish("long")
    assert bench.started == ["long", "short"]


def test_a_place_is_free_from_the_first_token_on_and_not_only_at_the_end(bench):
    bench.send("one", 2000)
    bench.send("two", 2000)
    bench.first_token("one")
    assert bench.started == ["one", "two"]
    assert bench.prefills[0].outstanding.running == 2


def test_the_worker_with_the_fewest_prompt_tokens_is_next():
    bench = Bench(prefill=2)
    bench.send("one", 900)
    bench.send("two", 100)
    bench.send("three", 100)
    assert [bench.worker_of(name) for name in ("one", "two", "three")] == [
        "prefill-0",
        "prefill-1",
        "prefill-1",
    ]
    bench.end()


class Asking:
    """A chooser that asks a function for the number of a worker."""

    def __init__(self, number_of):
        self.number_of = number_of

    def choose(self, demand, waited_s, roomy):
        return Choice(roomy[self.number_of(demand.prompt_tokens)])

    def least_s(self, demand):
        return None


def test_the_worker_is_chosen_for_the_prompt_that_is_next_and_by_what_it_asks_for():
    bench = Bench(prefill=2, chooser=Asking(lambda tokens: tokens > 100))
    for name, tokens in (("long", 900), ("short", 100), ("longer", 800), ("shorter", 50)):
        bench.send(name, tokens)
    assert {name: place.prompt_worker[0] for name, place in bench.places.items()} == {
        "long": "prefill-1",
        "short": "prefill-0",
        "longer": "prefill-1",
        "shorter": "prefill-0",
    }
    bench.end()


def test_no_worker_is_chosen_for_a_prompt_whose_client_left_while_it_waited():
    asked_for = []
    bench = Bench(chooser=Asking(lambda tokens: asked_for.append(tokens) or 0))
    for name, tokens in (("one", 2000), ("left", 300), ("two", 400)):
        bench.send(name, tokens)
    bench.leave("left")
    bench.first_token("one")
    assert asked_for == [2000, 400]
    assert bench.started == ["one", "two"]
    bench.end()


def test_a_prompt_for_which_the_choice_of_a_worker_fails_leaves_the_queue_and_is_told_the_error():
    bench = Bench()
    bench.queue._choosers = [Asking(lambda tokens: tokens // 0)]
    bench.send("one", 100)
    assert bench.denied["one"].reason == "failed"
    assert "(ZeroDivisionError: " in bench.denied["one"].sentence
    bench.end()


def test_a_short_prompt_of_another_client_is_next_after_what_the_worker_has(bench):
    for index in range(10):
        bench.send(f"flood-{index}", 2000, "flood")
    bench.send("short", 40, "other")
    bench.finish("flood-0")
    assert bench.started[1] in ("short", "flood-1")
    if bench.started[1] == "flood-1":
        bench.finish("flood-1")
    assert "short" in bench.started[:3]


def test_an_urgent_prompt_passes_all_that_wait(bench):
    bench.send("one", 2000)
    bench.send("two", 20)
    bench.send("health-probe", 40, "health-probe", urgent=True)
    bench.finish("one")
    assert bench.started == ["one", "health-probe", "two"]


@pytest.mark.parametrize("seed", range(20))
def test_a_short_prompt_starts_within_the_stated_bound_however_others_flood(seed):
    """Simulation: each step the worker finishes its first prompt; tokens computed before the short one are counted."""
    chance, bench = random.Random(seed), Bench()
    longest, clients, sizes, number = 2000, chance.randint(1, 4), {}, 0

    left = set()

    def flood(client):
        nonlocal number
        number += 1
        name = f"{client}-{number}"
        sizes[name] = chance.randint(1, longest)
        bench.send(name, sizes[name], client)

    for client in range(clients):
        for _ in range(chance.randint(1, 12)):
            flood(f"flood-{client}")
    in_service = bench.outstanding()[0]
    assert in_service < WINDOW + longest
    bench.send("short", 40, "short")
    computed = 0
    while "short" not in bench.started:
        first = next(name for name in bench.started if name not in left)
        computed += sizes[first]
        flood(first.rpartition("-")[0])  # the others never run out
        bench.finish(first)
        left.add(first)
    assert computed <= WINDOW + longest + clients * (512 + longest)
    bench.end()


# --- cancelled in every state


def test_a_prompt_that_is_cancelled_while_it_waits_leaves_the_queue(bench):
    bench.send("one", 2000)
    bench.send("two", 2000)
    bench.send("three", 10)
    bench.leave("two")
    bench.finish("one")
    assert bench.started == ["one", "three"]


def test_a_prompt_that_is_cancelled_on_the_worker_frees_its_place(bench):
    bench.send("one", 2000)
    bench.send("two", 2000)
    bench.leave("one")
    assert (bench.started, bench.outstanding()) == (["one", "two"], [2000])


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_when_many_come_go_and_leave_at_random(seed):
    chance, bench = random.Random(seed), Bench(prefill=3, decode=2)
    there = []
    for index in range(300):
        bench.send(f"{index}", chance.randint(1, 1500), f"client-{index % 5}", urgent=index % 17 == 0)
        there.append(f"{index}")
        for name in chance.sample(there, k=min(3, len(there))):
            step = chance.choice(["prompt_done", "prompt_left", "decode_began", "leave", "leave"])
            if step == "leave":
                bench.leave(name)
                there.remove(name)
            else:
                bench.tell(name, step)
    bench.end()


# --- workers that come and go


def test_prompts_wait_for_a_pool_that_has_lost_its_workers_and_go_on_when_one_is_back(bench):
    for name in ("fills", "one"):
        bench.send(name, WINDOW)
    bench.prefills[0].client.connected = False
    bench.clock.now_s += 59
    bench.state.look()
    assert (bench.started, bench.queue.waiting, bench.queue.usable_workers) == (["fills"], 1, 0)
    del bench.fleet._workers["prefill-0"]
    bench.leave("fills")
    bench.add(a_worker("prefill-7"))
    bench.state.look()
    assert bench.worker_of("one") == "prefill-7"


def test_a_pool_that_stays_without_a_worker_fails_what_waits_and_names_the_setting():
    bench = Bench(decode=0)  # prefill serves requests whole, so that there is no other way
    for name in ("fills", "one", "two"):
        bench.send(name, WINDOW)
    bench.prefills[0].client.connected = False
    bench.look_again()
    bench.clock.now_s += 60
    bench.look_again()
    assert bench.denied.keys() == {"one", "two"}
    assert bench.denied["one"].reason == "no_worker"
    assert re.search(r"no prefill worker .* 60 s \(router\.recovery_timeout_s\)", bench.denied["one"].sentence)
    bench.end()


def test_prompts_whose_prefill_workers_are_lost_are_served_whole_by_decode_after_two_seconds(bench):
    for name in ("fills", "one"):
        bench.send(name, WINDOW)
    bench.prefills[0].client.connected = False
    bench.look_again()
    bench.clock.now_s += 2
    bench.look_again()
    assert (bench.worker_of("one"), bench.places["one"].route.path) == ("decode-0", "fallback")


def test_the_time_without_a_worker_begins_anew_with_each_outage():
    bench = Bench(decode=0)
    worker = bench.prefills[0]
    for name in ("one", "two"):
        bench.send(name, 2000)
    for _ in range(2):
        worker.client.connected = False
        bench.look_again()
        bench.clock.now_s += 50
        bench.look_again()
        worker.client.connected = True
        bench.look_again()
    assert (bench.started, bench.denied, bench.queue.waiting) == (["one"], {}, 1)
    bench.end()


def test_a_worker_is_found_again_without_being_told(bench):
    for name in ("fills", "one"):
        bench.send(name, WINDOW)
    bench.prefills[0].client.connected = False
    bench.leave("fills")
    assert bench.started == ["fills"]
    bench.prefills[0].client.connected = True
    bench.look_again()
    assert bench.started == ["fills", "one"]
    bench.look_again()
    assert not bench.later, "nothing waits any more"


def test_a_draining_worker_gets_nothing(bench):
    bench.add(a_worker("prefill-1"))
    bench.prefills[0].status = WorkerStatus(worker_id="prefill-0", draining=True)
    bench.send("one", 10)
    assert bench.worker_of("one") == "prefill-1"


# --- what admission reads


def test_the_wait_is_known_once_full_workers_were_measured(bench):
    assert bench.queue.wait_s("a", 100) is None
    bench.send("one", 2000)
    bench.send("two", 2000)
    bench.send("three", 2000)
    bench.clock.now_s += 8
    bench.finish("one")
    assert bench.queue.tokens_per_s == pytest.approx(250)
    assert bench.queue.wait_s("a", 100) == pytest.approx((2000 + 2000) / 250)
    assert bench.queue.wait_s("b", 100) == pytest.approx((2000 + 2000) / 250), "what is there already, and one prompt"
    bench.send("four", 2000)
    assert bench.queue.wait_s("a", 100) == pytest.approx(6000 / 250)
    assert bench.queue.wait_s("b", 100) == pytest.approx((2000 + 2100) / 250)


def test_an_idle_pool_is_not_measured_by_a_short_prompt(bench):
    bench.send("one", 20)
    bench.clock.now_s += 2
    bench.finish("one")
    assert bench.queue.tokens_per_s is None


def test_more_workers_make_the_wait_shorter():
    bench = Bench(prefill=2)
    for name in ("one", "two", "three"):
        bench.send(name, 2000)
    bench.clock.now_s += 8
    bench.finish("one")
    assert bench.queue.tokens_per_s == pytest.approx(500)
    bench.prefills[1].client.connected = False
    assert bench.queue.tokens_per_s == pytest.approx(250)
    bench.end()


def test_what_a_worker_would_take_at_once_does_not_wait_however_slow_it_was(bench):
    for name in ("one", "two"):
        bench.send(name, WINDOW)
    bench.clock.now_s += 1000.0
    bench.finish("one")
    bench.clock.now_s += 1000.0
    bench.finish("two")
    assert bench.queue.tokens_per_s == pytest.approx(1.0)
    assert bench.queue.wait_s("a", 100) == 0.0
    bench.send("three", WINDOW - 1)
    assert bench.queue.wait_s("a", 100) == 0.0, "its window has room"
    bench.send("four", WINDOW)
    assert bench.queue.wait_s("a", 100) > WINDOW


def test_a_worker_that_is_usable_again_takes_what_waits_without_being_told():
    bench = Bench(prefill=2)
    bench.prefills[1].client.connected = False
    bench.send("one", WINDOW)
    bench.send("two", WINDOW)
    assert bench.started == ["one"]
    bench.prefills[1].client.connected = True
    bench.look_again()
    assert bench.started == ["one", "two"]
    bench.end()


class Whole:
    """A chooser that takes the first worker that a prompt's router reaches, however full, as predictions may."""

    def __init__(self, bench):
        self.bench = bench

    def choose(self, demand, waited_s, roomy):
        worker = next(one for one in self.bench().prefills if one.worker_id not in demand.avoided)
        return Choice(worker) if worker in roomy else None

    def least_s(self, demand):
        return None


@pytest.mark.parametrize("by_prediction", [False, True])
def test_a_prompt_of_a_router_that_reaches_only_full_workers_holds_up_no_others_and_is_next_there(by_prediction):
    bench = Bench(prefill=2)
    if by_prediction:
        bench.queue._choosers = [Whole(lambda: bench)]
    bench.send("fills", WINDOW, avoided=["prefill-1"])
    bench.send("cut off", 10, client="b", avoided=["prefill-1"])
    bench.send("left", 10, client="b", avoided=["prefill-1"])
    bench.send("later", 10, client="b", avoided=["prefill-0"])
    assert bench.started == ["fills", "later"]
    assert (bench.queue.waiting, bench.queue.now().waiting.tokens) == (2, 20)
    bench.leave("left")
    bench.finish("fills")
    assert bench.started == ["fills", "later", "cut off"]
    assert bench.worker_of("cut off") == "prefill-0"
    assert bench.queue.waiting == 0
    bench.end()


def test_prompts_that_were_set_aside_and_the_others_go_in_turn_once_there_is_room():
    bench = Bench(prefill=2)
    bench.send("fills", WINDOW, "greedy", avoided=["prefill-1"])
    for number in range(4):
        bench.send(f"aside {number}", 900, "greedy", avoided=["prefill-1"])
    bench.send("fills too", WINDOW, "polite", avoided=["prefill-0"])
    for number in range(4):
        bench.send(f"polite {number}", 900, "polite", avoided=["prefill-1"] * (number > 1))
    assert bench.started == ["fills", "fills too"]
    bench.finish("fills")
    for name in ("aside 0", "polite 0", "aside 1", "polite 1", "aside 2", "polite 2", "aside 3", "polite 3"):
        assert name in bench.started
        bench.finish(name)
    assert bench.started[2:] == [f"{who} {number}" for number in range(4) for who in ("aside", "polite")]
    bench.end()


def test_the_estimated_wait_counts_prompts_that_were_set_aside_as_those_of_their_clients():
    bench = Bench(prefill=2)
    bench.send("measured", 10 * WINDOW, avoided=["prefill-1"])
    bench.clock.now_s += 10
    bench.finish("measured")
    bench.send("fills", WINDOW, avoided=["prefill-1"])
    for number in range(5):
        bench.send(f"aside {number}", 700, "greedy", avoided=["prefill-1"])
    assert bench.queue.wait_s("other", 100) == 0.0, "the other worker would take it"
    bench.send("fills too", WINDOW, avoided=["prefill-0"])
    per_s = bench.queue.tokens_per_s
    assert bench.queue.wait_s("other", 100) == pytest.approx((2 * WINDOW + 700 + 100) / per_s)
    assert bench.queue.wait_s("greedy", 100) == pytest.approx((2 * WINDOW + 5 * 700) / per_s)
    assert bench.queue.now().waiting.prompts == 5
    bench.end()


def test_a_prompt_that_was_set_aside_goes_the_new_way_with_the_others():
    bench = Bench(prefill=2)
    bench.send("fills", WINDOW, avoided=["prefill-1"])
    bench.send("cut off", 10, avoided=["prefill-1"])
    assert bench.started == ["fills"]
    for worker in bench.prefills:
        worker.client.connected = False
    bench.look_again()
    bench.clock.now_s += 2
    bench.look_again()
    assert bench.worker_of("cut off") == "decode-0"
    bench.end()


class Faulty:
    """A chooser whose predictions fail."""

    def choose(self, demand, waited_s, roomy):
        raise ZeroDivisionError

    def least_s(self, demand):
        return None


def test_while_predictions_fail_prompts_go_to_the_least_loaded_worker():
    bench = Bench(prefill=2, chooser=Faulty())
    for name in ("one", "two"):
        bench.send(name, 100)
    assert {name: place.prompt_worker[0] for name, place in bench.places.items()} == {
        "one": "prefill-0",
        "two": "prefill-1",
    }
    bench.end()


def test_a_request_whose_first_token_makes_room_is_not_ended_by_the_fault_of_the_choice_for_the_next():
    bench = Bench()
    bench.queue._choosers = [Asking(lambda tokens: 0 // (tokens - 10))]
    for name, tokens in (("fills", WINDOW), ("fault", 10), ("next", 20)):
        bench.send(name, tokens)
    bench.finish("fills")
    assert bench.denied["fault"].reason == "failed"
    assert bench.started == ["fills", "next"]
    bench.end()


@pytest.mark.parametrize("fault", ["route_of", "_look_for_decode"])
def test_a_fault_of_ours_ends_only_the_prompt_that_was_asked_about(bench, monkeypatch, fault):
    with monkeypatch.context() as faulty:
        faulty.setattr(bench.state, fault, lambda *_: 1 / 0)
        bench.send("fault", 10)
    assert bench.denied["fault"].reason == "failed"
    assert "(ZeroDivisionError: division by zero)" in bench.denied["fault"].sentence
    bench.send("next", 10)
    assert bench.started == ["next"]


def faulty_for(bench, monkeypatch, tokens):
    """Have prompts of this length end with an error of ours when they enter a queue."""
    for queue in bench.state.queues.values():

        def push(waiter, push=queue.push):
            if waiter.demand.prompt_tokens == tokens:
                raise ZeroDivisionError
            push(waiter)

        monkeypatch.setattr(queue, "push", push)


def the_mode_changes(bench):
    bench.fleet.mode = "colocated"
    bench.state.mode_changed()


def prefill_is_lost(bench):
    bench.prefills[0].client.connected = False
    bench.look_again()
    bench.clock.now_s += 2
    bench.look_again()


@pytest.mark.parametrize("happens", [the_mode_changes, prefill_is_lost])
def test_a_fault_of_ours_for_one_of_the_prompts_that_go_another_way_ends_none_of_the_others(monkeypatch, happens):
    bench = Bench()
    bench.add(a_worker("colocated-0"))
    for name, tokens in (("fills", WINDOW), ("fault", 13), ("next", 400)):
        bench.send(name, tokens)
    faulty_for(bench, monkeypatch, 13)
    happens(bench)
    assert bench.denied["fault"].reason == "failed"
    assert bench.started == ["fills", "next"]
    bench.end()


def the_doubt_ends(bench):
    bench.fleet.get("decode-0").client.failed_s = float("-inf")
    bench.fleet.on_news()  # in the task that asks a worker, with which the server would end


def all_have_joined(bench):
    bench.state.resume()


@pytest.mark.parametrize("happens", [the_doubt_ends, all_have_joined])
def test_a_fault_of_ours_for_one_of_the_prompts_that_were_not_queued_yet_ends_none_of_the_others(monkeypatch, happens):
    bench = Bench(paused=happens is all_have_joined)
    if happens is the_doubt_ends:
        bench.fleet.get("decode-0").client.has_failed()
    for name, tokens in (("fault", 13), ("next", 400)):
        bench.send(name, tokens)
    faulty_for(bench, monkeypatch, 13)
    happens(bench)
    assert bench.denied["fault"].reason == "failed"
    assert bench.started == ["next"]
    bench.end()


class Patient:
    """A chooser that goes by limits, and always takes the first worker that it is shown."""

    def __init__(self):
        self.asked = []
        self.is_picky = True

    def choose(self, demand, waited_s, roomy):
        self.asked.append((demand.client, waited_s))
        if self.is_picky and demand.client == "picky":
            return None
        return Choice(roomy[0], assignment=Assignment("prefill-0", "prefill-0", "fewest_prompt_tokens"))

    def least_s(self, demand):
        return 1.0


def test_a_clients_prompts_go_by_their_limits_and_the_late_ones_last():
    bench = Bench(chooser=Patient())
    bench.send("fills", WINDOW)
    bench.send("late", 10, limit_s=2.0)
    bench.send("relaxed", 10, limit_s=60.0)
    bench.send("hurried", 10, limit_s=20.0)
    bench.send("whenever", 10)
    bench.clock.now_s += 5
    bench.finish("fills")
    assert bench.started == ["fills", "hurried", "relaxed", "whenever", "late"]


def test_a_chooser_is_told_how_long_a_request_has_waited_and_may_have_it_wait_on():
    chooser = Patient()
    bench = Bench(chooser=chooser)
    bench.send("one", 10, client="picky", waited_s=3.0)
    bench.clock.now_s += 4
    bench.state.look()
    assert bench.started == []
    assert chooser.asked[-1] == ("picky", 7.0)
    bench.end()


def test_the_time_for_which_a_prompt_was_held_back_is_told_with_the_assignment():
    chooser = Patient()
    bench = Bench(chooser=chooser)
    bench.send("fills", WINDOW)
    bench.send("one", 10, client="picky")
    bench.clock.now_s += 4  # no worker has room, so it is not held back
    bench.finish("fills")
    bench.clock.now_s += 2
    bench.state.look()
    bench.clock.now_s += 1
    bench.send("urgent", WINDOW, urgent=True)
    bench.clock.now_s += 8  # no worker has room again
    bench.finish("urgent")
    bench.clock.now_s += 0.5
    chooser.is_picky = False
    bench.state.look()
    held_s = {name: place.assignment.held_s for name, place in bench.places.items()}
    assert held_s == {"fills": 0.0, "urgent": 0.0, "one": 3.5}
    bench.end()


class Counting:
    """A chooser that has one client's prompts wait, and counts how often it is asked."""

    def __init__(self):
        self.asked = 0

    def choose(self, demand, waited_s, roomy):
        self.asked += 1
        return None if demand.client == "picky" else Choice(roomy[0])

    def least_s(self, demand):
        return None


def test_no_decision_is_made_when_a_prompt_leaves_for_which_no_other_waited():
    bench = Bench(chooser=(chooser := Counting()))
    for number in range(20):
        bench.send(str(number), 10, "picky")
    asked = chooser.asked
    for number in range(19, 0, -1):
        bench.leave(str(number))
    assert chooser.asked == asked
    bench.send("next", 10)
    assert bench.started == []
    bench.leave("0")
    assert bench.started == ["next"], "it waited for that one"
    bench.end()


def test_no_decision_is_made_when_a_sequence_leaves_prefill_that_was_computed_before():
    bench = Bench(chooser=(chooser := Counting()))
    bench.send("one", 10)
    bench.send("waits", 10, "picky")
    bench.first_token("one")
    asked = chooser.asked
    bench.tell("one", "prompt_left")
    assert chooser.asked == asked
    bench.end()


# --- a request that needs a worker of each pool


def test_nothing_is_computed_while_it_is_not_known_whether_there_is_a_worker_to_decode(bench):
    decode = bench.fleet.get("decode-0")
    decode.client.has_failed()
    bench.send("one", 10)
    assert (bench.started, bench.queue.waiting) == ([], 0)
    decode.client.failed_s = float("-inf")
    bench.fleet.on_news()
    assert bench.started == ["one"]


def test_nobody_waits_longer_for_a_worker_in_doubt_than_is_said(bench):
    bench.fleet.get("decode-0").client.has_failed()
    bench.send("one", 10)
    bench.clock.now_s += 60
    bench.look_again()
    assert bench.denied["one"].sentence == "no decode worker has been usable for 60 s"


def test_a_worker_that_is_lost_while_it_is_in_doubt_ends_the_wait_and_prefill_decodes(bench):
    decode = bench.fleet.get("decode-0")
    decode.client.has_failed()
    bench.send("one", 10)
    decode.client.connected = False
    bench.fleet.on_news()
    assert (bench.worker_of("one"), bench.places["one"].decode_worker) == ("prefill-0", None)


def test_who_leaves_while_a_worker_is_in_doubt_is_not_answered(bench):
    bench.fleet.get("decode-0").client.has_failed()
    bench.send("one", 10)
    bench.leave("one")
    bench.fleet.get("decode-0").client.failed_s = float("-inf")
    bench.state.look()
    assert (bench.started, bench.denied) == ([], {})


def test_a_workers_answer_that_ends_no_doubt_makes_no_prompt_look_again(monkeypatch):
    bench = Bench(prefill=2)
    bench.fleet.get("decode-0").client.has_failed()
    for number in range(20):
        bench.send(str(number), 10)
    with monkeypatch.context() as nobody:
        nobody.setattr(bench.state, "route_of", lambda _: pytest.fail("it looked"))
        bench.fleet.on_news()
        bench.look_again()
    bench.fleet.get("decode-0").client.failed_s = float("-inf")
    bench.fleet.on_news()
    assert len(bench.started) == 20
    bench.end()


def test_prompts_whose_turn_comes_while_the_worker_that_decodes_is_in_doubt_wait_until_it_has_answered():
    bench = Bench()
    for name in ("fills", "one", "two"):
        bench.send(name, WINDOW)
    decode = bench.fleet.get("decode-0")
    decode.client.has_failed()  # it has refused a request, say
    bench.finish("fills")
    assert (bench.started, bench.denied, bench.queue.waiting) == (["fills"], {}, 2)
    decode.client.failed_s = float("-inf")
    bench.fleet.on_news()
    assert bench.started == ["fills", "one"]
    bench.finish("one")
    assert bench.started == ["fills", "one", "two"]
    bench.end()


def test_a_prompt_in_the_queue_waits_no_longer_for_a_worker_in_doubt_than_is_said(bench):
    for name in ("fills", "one"):
        bench.send(name, WINDOW)
    bench.fleet.get("decode-0").client.has_failed()
    bench.finish("fills")
    bench.clock.now_s += 59
    bench.look_again()
    assert bench.denied == {}
    bench.clock.now_s += 1
    bench.look_again()
    assert bench.denied["one"].reason == "no_worker"


def test_a_worker_is_not_doubted_for_what_its_former_incarnation_has_failed(bench):
    former = bench.fleet.get("decode-0").description
    newer = bench.add(a_worker("decode-0", incarnation="newer"))
    bench.state.apply(bench.router, Doubts("decode-0", former.incarnation))
    assert newer.takes_work
    bench.state.apply(bench.router, Doubts("decode-0", "newer"))
    assert not newer.takes_work


async def test_a_router_that_serves_alone_dates_no_doubt_anew_when_the_request_that_failed_ends(bench, monkeypatch):
    monkeypatch.setattr("ridgeline.router.fleet.worker.Worker.reached", True)
    placement = own_placement(bench.state, bench.fleet, router_settings(min_remote_prefill_tokens=0))
    decode = bench.fleet.get("decode-0")

    async def fails():
        async with placement.place(Demand(10)):
            decode.client.failed_s = 0.5
            raise EngineFailed("")

    with pytest.raises(EngineFailed):
        await fails()
    assert decode.client.failed_s == 0.5


@pytest.mark.parametrize(("draining", "reason"), [(True, "draining"), (False, "lost")])
def test_when_the_decode_workers_go_while_the_prompt_waits_it_is_told_whether_they_drain(bench, draining, reason):
    for name in ("fills", "one"):
        bench.send(name, WINDOW)
    decode = bench.fleet.get("decode-0")
    if draining:
        decode.status = WorkerStatus(worker_id="decode-0", draining=True)
    else:
        decode.client.connected = False
    bench.first_token("fills")
    assert bench.denied["one"].reason == reason


# --- routers that come and go, and the mode


def test_all_that_a_router_had_is_free_when_it_has_gone(bench):
    for name in ("fills", "waits"):
        bench.send(name, WINDOW)
    bench.state.left(bench.router)
    assert (bench.outstanding(), bench.queue.waiting, bench.router.by_number) == ([0], 0, {})
    assert bench.started == ["fills"]


def test_what_another_scheduler_had_placed_counts_with_all_that_has_happened_since(bench):
    bench.send("as it is", 640)
    bench.tell("as it is", "prompt_done")
    bench.tell("as it is", "prompt_left")
    told = bench.places["as it is"]
    before = [msgspec.structs.replace(worker.outstanding) for worker in bench.fleet.workers]
    bench.leave("as it is")
    demand = Demand(640, client="a")
    steps = ("prompt_done", "prompt_left")
    bench.state.apply(bench.router, Keeps(0, demand, told.route, "prefill-0", "decode-0", steps))
    assert [worker.outstanding for worker in bench.fleet.workers] == before
    bench.end()


class PlacementOf:
    """A router's requests, and the scheduler that it has joined."""

    def __init__(self, bench):
        self.join(bench)
        self.placement = Placement(bench.fleet, router_settings(min_remote_prefill_tokens=0), self.tell)
        self.began, self.tasks = [], {}

    def join(self, bench):
        self.bench, self.requests = bench, RouterRequests(lambda answer: self.placement.take(answer))

    def tell(self, event):
        self.bench.state.apply(self.requests, event)

    async def send(self, name, tokens, urgent=False):
        self.tasks[name] = asyncio.create_task(self._hold(name, Demand(tokens, urgent=urgent)))
        await turns()

    async def _hold(self, name, demand):
        async with self.placement.place(demand):
            self.began.append(name)
            await asyncio.Event().wait()

    async def leave(self, name):
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.wait((task,))
        await turns()


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_prompt_that_waits_does_not_start_before_the_next_scheduler_knows_what_runs(monkeypatch):
    monkeypatch.setattr("ridgeline.router.fleet.worker.Worker.reached", True)
    former, newer = Bench(), Bench()
    router = PlacementOf(former)
    for name in ("fills", "waits"):
        await router.send(name, WINDOW)
    await router.send("urgent", WINDOW, urgent=True)
    await router.leave("fills")
    router.join(newer)
    for message in router.placement.state():
        router.tell(message)
    await turns()
    assert router.began == ["fills", "urgent"]
    assert newer.outstanding() == [WINDOW]
    await router.leave("urgent")
    assert router.began == ["fills", "urgent", "waits"]
    await router.leave("waits")
    newer.end()


def test_a_place_on_a_worker_that_is_gone_is_not_kept(bench):
    bench.state.apply(bench.router, Keeps(0, Demand(640), SPLIT, "prefill-9", "decode-0", ()))
    assert bench.router.by_number == {}


def test_no_prompt_starts_before_all_routers_have_told_what_they_hold():
    bench = Bench(paused=True)
    bench.send("left", 10)
    bench.send("one", 10)
    bench.leave("left")
    bench.state.look()
    assert (bench.started, bench.denied) == ([], {})
    bench.state.resume()
    assert bench.started == ["one"]
    bench.end()


def test_prompts_that_wait_go_the_new_way_when_the_mode_changes(bench):
    for name, tokens in (("fills", WINDOW), ("one", 400), ("two", 400)):
        bench.send(name, tokens)
    bench.add(a_worker("colocated-0"))
    bench.fleet.mode = "colocated"
    assert bench.state.mode_changed() == 2
    assert [bench.worker_of(name) for name in ("one", "two")] == ["colocated-0", "colocated-0"]


# --- LoRA adapters, of which a step has only so many


def test_a_prompt_whose_adapter_has_no_place_in_a_step_waits_and_holds_up_nobody():
    bench = Bench(max_loras=1)
    bench.send("sql", 10, adapter="sql@1")
    bench.send("chat", 10, adapter="chat@1")
    bench.send("sql again", 10, adapter="sql@1")
    bench.send("model", 10)
    assert bench.started == ["sql", "sql again", "model"]
    bench.finish("sql")
    assert bench.started == ["sql", "sql again", "model"]
    bench.finish("sql again")
    assert bench.started == ["sql", "sql again", "model", "chat"]
    bench.send("lost", 10, adapter="sql@1", urgent=True)
    assert bench.started[-1] == "lost", "its client has half of its answer already"
    bench.end()


def test_an_adapter_that_has_waited_for_long_gets_the_next_place():
    bench = Bench(max_loras=1)
    bench.send("sql 1", 10, adapter="sql@1")
    bench.send("chat", 10, adapter="chat@1")
    bench.clock.now_s += ADAPTER_WAITS_S
    bench.send("sql 2", 10, adapter="sql@1")
    bench.send("model", 10)
    assert bench.started == ["sql 1", "model"], "what keeps it waiting does not go on for ever"
    bench.finish("sql 1")
    assert bench.started == ["sql 1", "model", "chat"]
    bench.finish("chat")
    assert bench.started == ["sql 1", "model", "chat", "sql 2"]
    bench.end()


def test_an_adapter_goes_where_a_step_has_a_place_for_it():
    bench = Bench(decode=2, max_loras=1)
    for worker in bench.fleet.workers:
        for key in ("sql@1", "chat@1"):
            worker.adapters.loaded.add(key)
    bench.send("sql", 10, adapter="sql@1")
    bench.tell("sql", "prompt_done")
    bench.tell("sql", "prompt_left")
    bench.send("chat", 10, adapter="chat@1")
    bench.tell("chat", "prompt_done")
    bench.tell("chat", "prompt_left")
    bench.send("sql again", 10, adapter="sql@1")
    at = {name: place.decode_worker[0] for name, place in bench.places.items()}
    assert at["sql"] == at["sql again"] != at["chat"]
    bench.end()
