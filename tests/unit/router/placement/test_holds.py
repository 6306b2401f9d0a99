"""No client alone fills decode, and what a placed request counts as ends once."""

import time

import pytest

from ridgeline.contracts.workers import WorkerStatus
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.fleet.worker import Outstanding
from ridgeline.router.placement.holds import DecodePlaces, Hold
from ridgeline.router.placement.pool_queue import RouterRequests
from tests.unit.router.placement.bench import WINDOW, Bench, a_worker


def places_of(*workers):
    return DecodePlaces(lambda: workers)


def decodes(number=1):
    """Decode workers that run eight sequences each."""
    return [a_worker(f"decode-{index}", max_num_seqs=8) for index in range(number)]


def test_one_client_alone_has_seven_eighths_and_whoever_comes_is_let_in():
    [worker] = decodes()
    places = places_of(worker)
    places.add("greedy", worker, 7)
    assert not places.as_of_now()("greedy")
    assert places.as_of_now()("polite")
    places.add("polite", worker, 1)
    places.add("greedy", worker, -1)
    assert not places.as_of_now()("greedy"), "it may have seven eighths of seven"
    places.add("greedy", worker, -1)
    assert places.as_of_now()("greedy")


def test_two_that_are_as_greedy_have_half_each_and_one_is_still_free():
    workers = decodes(2)
    places, held = places_of(*workers), {"a": 0, "b": 0}
    for number in range(20):
        for client in held:
            if places.as_of_now()(client):
                places.add(client, workers[number % 2], 1)
                held[client] += 1
    assert sum(held.values()) < 16
    assert abs(held["a"] - held["b"]) <= 1


def test_a_client_with_nothing_is_let_in_whatever_the_others_hold():
    [worker] = decodes()
    places = places_of(worker)
    for number in range(30):
        places.add(f"client-{number}", worker, 1)
    assert places.as_of_now()("another")


def test_what_runs_on_a_worker_that_leaves_takes_no_place_from_the_others():
    stays, leaves = decodes(2)
    places = places_of(stays, leaves)
    places.add("a", leaves, 7)
    leaves.status = WorkerStatus(worker_id=leaves.worker_id, draining=True)
    assert places.as_of_now()("a")
    places.add("a", stays, 7)
    assert not places.as_of_now()("a")


def test_a_look_takes_as_long_with_thousands_of_clients_as_with_a_few():
    workers = decodes(64)

    def look_s(clients):
        places = places_of(*workers)
        for number in range(5000):
            places.add(f"client-{number % clients}", workers[number % 64], 1)
        took_s = []
        for _ in range(20):
            began_s = time.process_time()
            for _ in range(5):
                places.as_of_now()("client-0")
            took_s.append(time.process_time() - began_s)
        return min(took_s)

    assert look_s(5000) < 4 * look_s(1), "it was 30 times as long when each client's places were added up"


DEMAND = Demand(640, 64)


def test_a_whole_request_promises_blocks_until_its_first_token_and_holds_them_until_its_end():
    worker = a_worker("colocated-0")
    hold = Hold(DEMAND, worker, worker, cached_tokens=100)
    assert not hold.splits
    at_first = Outstanding(
        prompt_tokens=540, promised_blocks=20, held_blocks=20, running=1, decodes=1, context_tokens=672
    )
    assert worker.outstanding == at_first
    for _ in range(2):
        hold.prompt_done()
        hold.prompt_left()
    assert worker.outstanding == Outstanding(held_blocks=20, running=1, decodes=1, decoding=1, context_tokens=672)
    for _ in range(2):
        hold.close()
    assert worker.outstanding == Outstanding()


def test_a_split_request_leaves_prefill_when_its_prompt_has_and_promises_blocks_until_decode_begins():
    prefill, decode = a_worker("prefill-0"), a_worker("decode-0")
    hold = Hold(DEMAND, prefill, decode)
    assert hold.splits
    assert prefill.outstanding == Outstanding(prompt_tokens=640, running=1)
    assert decode.outstanding == Outstanding(
        promised_blocks=21, held_blocks=20, running=1, decodes=1, context_tokens=672
    )
    hold.prompt_done()
    assert (prefill.outstanding, decode.outstanding.decoding) == (Outstanding(running=1), 1)
    for _ in range(2):
        hold.prompt_left()
        hold.decode_began()
    assert prefill.outstanding == Outstanding()
    assert decode.outstanding == Outstanding(held_blocks=20, running=1, decodes=1, decoding=1, context_tokens=672)
    for _ in range(2):
        hold.close()
    assert decode.outstanding == Outstanding()


@pytest.mark.parametrize(
    "steps", [(), ("prompt_done",), ("prompt_left",), ("prompt_done", "prompt_left", "decode_began")]
)
def test_a_request_that_ends_in_any_state_leaves_nothing_behind(steps):
    prefill, decode = a_worker("prefill-0"), a_worker("decode-0")
    hold = Hold(DEMAND, prefill, decode)
    for step in steps:
        getattr(hold, step)()
    hold.close()
    assert (prefill.outstanding, decode.outstanding) == (Outstanding(), Outstanding())


# --- whose prompt starts


@pytest.fixture
def bench():
    bench = Bench(window=10 * WINDOW, max_num_seqs=8)
    yield bench
    bench.end()


def test_a_prompt_is_not_started_before_its_answer_has_a_place_and_others_pass_it(bench):
    for number in range(7):
        bench.send(f"greedy {number}", 10, client="greedy")
    bench.send("waits", 10, client="greedy")
    bench.send("passes", 10, client="polite")
    assert bench.started[7:] == ["passes"]
    bench.finish("greedy 0")  # seven eighths of what the polite one leaves
    assert bench.started[8:] == []
    bench.finish("greedy 1")
    assert bench.started[8:] == ["waits"]


def test_what_is_urgent_does_not_wait_for_a_place(bench):
    for number in range(7):
        bench.send(f"{number}", 10)
    bench.send("again", 10, urgent=True)
    assert bench.started[7:] == ["again"]


def test_who_may_start_is_counted_once_a_grant_however_many_clients_wait(bench):
    bench.send("first", 10 * WINDOW)
    for number in range(50):
        bench.send(f"waits {number}", 10, client=f"client-{number}")
    counted, workers = [], bench.state._places._workers
    bench.state._places._workers = lambda: counted.append(1) or workers()
    bench.finish("first")
    assert len(bench.started) == 51
    assert len(counted) <= len(bench.started) + 2, "once for each prompt that was started, and when none is left"


@pytest.fixture
def two_pools():
    """A prompt of up to 50 tokens is computed where it is decoded."""
    bench = Bench(window=100 * WINDOW, max_num_seqs=8, min_remote_prefill_tokens=50)
    yield bench
    bench.end()


def test_of_two_pools_whose_prompts_wait_for_places_each_gets_its_turn(two_pools):
    bench = two_pools
    for number in range(30):
        bench.send(f"long {number}", 60)
    for number in range(3):
        bench.send(f"short {number}", 10)
    assert bench.started == [f"long {number}" for number in range(7)]
    for name in tuple(bench.started):
        bench.finish(name)
    bench.finish(bench.started[7])
    assert {f"short {number}" for number in range(3)} <= {*bench.started}


def test_a_client_with_short_prompts_gets_its_part_of_the_places_beside_one_with_long_prompts(two_pools):
    bench = two_pools
    for number in range(60):
        bench.send(f"greedy {number}", 60, client="greedy")
    for number in range(60):
        bench.send(f"polite {number}", 10, client="polite")
    for number in range(30):
        bench.finish(bench.started[number])
    held = [name.split()[0] for name in bench.started[30:]]
    assert held.count("polite") >= 3, held


def test_places_that_become_free_at_once_go_to_prompts_of_both_pools_in_turn(two_pools):
    bench = two_pools
    gone = RouterRequests(bench._told)
    for number in range(7):
        bench.send(f"gone {number}", 60, router=gone)
    for kind, tokens in (("long", 60), ("short", 10)):
        for number in range(10):
            bench.send(f"{kind} {number}", tokens)
    bench.state.left(gone)
    started = [name.split()[0] for name in bench.started[7:]]
    assert min(started.count("long"), started.count("short")) >= 3, started
