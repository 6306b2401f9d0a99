"""Which worker gets a request."""

import pytest
from msgspec.structs import replace

from ridgeline.router.fleet.policy import (
    SHORT_PROMPT,
    SPLIT,
    WHOLE_REPLICA,
    WITHOUT_DECODE,
    WITHOUT_PREFILL,
    Demand,
    NoWorker,
    WorkerLoad,
    answer_pool,
    blocks_needed,
    distance,
    fewest_running_then_most_free,
    least_prompt_tokens,
    least_work,
    pick,
    pools_of,
    prompt_blocks,
    room_then_fewest_running,
    room_to_overlap,
    route_for,
)
from tests.support.samples import worker_description

BOTH = {"prefill", "decode"}
IDLE = WorkerLoad(
    worker_id="idle",
    connected=True,
    draining=False,
    outstanding_prompt_tokens=0,
    running=0,
    kv_blocks_free=100,
    kv_blocks_total=100,
    max_running=64,
    block_size_tokens=32,
)
ANY = Demand(100, 10)
SCORERS = [least_prompt_tokens, fewest_running_then_most_free, least_work]


def blocks(number):
    """A demand for so many blocks."""
    return Demand(32 * number)


def but(worker_id, **changes):
    return replace(IDLE, worker_id=worker_id, **changes)


@pytest.mark.parametrize("unusable", [{"connected": False}, {"draining": True}])
@pytest.mark.parametrize("scorer", SCORERS)
def test_a_worker_that_is_gone_or_draining_gets_nothing_however_idle(scorer, unusable):
    busy = but("busy", outstanding_prompt_tokens=9000, running=50, kv_blocks_free=0)
    assert pick(ANY, [but("x", **unusable), busy], scorer) == "busy"


@pytest.mark.parametrize("loads", [[], [but("x", connected=False)], [but("x", draining=True)]])
def test_no_usable_worker_is_an_error_of_its_own(loads):
    with pytest.raises(NoWorker, match="no worker"):
        pick(ANY, loads, least_work)


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_tie_goes_to_the_first(scorer):
    assert pick(ANY, [but("a"), but("b")], scorer) == "a"
    assert pick(ANY, [but("b"), but("a")], scorer) == "b"


def test_prefill_goes_where_the_fewest_prompt_tokens_wait_then_the_fewest_sequences():
    many_short = but("many-short", outstanding_prompt_tokens=100, running=9)
    one_long = but("one-long", outstanding_prompt_tokens=4000, running=1)
    assert pick(ANY, [one_long, many_short], least_prompt_tokens) == "many-short"
    assert pick(ANY, [but("a", running=2), but("b", running=1)], least_prompt_tokens) == "b"


def test_decode_goes_where_the_fewest_sequences_run_then_the_most_blocks_are_free():
    assert (
        pick(ANY, [but("a", running=2, kv_blocks_free=90), but("b", running=1)], fewest_running_then_most_free) == "b"
    )
    full = but("full", running=1, kv_blocks_free=3)
    empty = but("empty", running=1, kv_blocks_free=80, outstanding_prompt_tokens=500)
    assert pick(ANY, [full, empty], fewest_running_then_most_free) == "empty"


def test_a_whole_replica_is_chosen_by_prompts_then_sequences_then_free_blocks():
    prompts = but("prompts", outstanding_prompt_tokens=10)
    assert pick(ANY, [prompts, but("running", running=9)], least_work) == "running"
    assert pick(ANY, [but("a", running=2), but("b", running=1, kv_blocks_free=0)], least_work) == "b"
    assert pick(ANY, [but("a", kv_blocks_free=1), but("b", kv_blocks_free=2)], least_work) == "b"


def test_only_prompts_shorter_than_the_limit_are_prefilled_locally():
    assert route_for(Demand(63), "disaggregated", 64, BOTH) == SHORT_PROMPT
    assert route_for(Demand(64), "disaggregated", 64, BOTH) == SPLIT
    assert route_for(Demand(1), "disaggregated", 0, BOTH) == SPLIT


def test_a_prompt_that_prefill_should_have_computed_falls_back_and_a_short_one_does_not():
    assert route_for(Demand(64), "disaggregated", 64, {"decode"}) == WITHOUT_PREFILL
    assert route_for(Demand(63), "disaggregated", 64, {"decode"}) == SHORT_PROMPT


@pytest.mark.parametrize("prompt_tokens", [1, 64])
def test_while_no_decode_worker_is_usable_prefill_workers_serve_whole_requests(prompt_tokens):
    assert route_for(Demand(prompt_tokens), "disaggregated", 64, {"prefill"}) == WITHOUT_DECODE
    assert answer_pool("disaggregated", {"prefill"}) == "prefill"


def test_while_no_worker_is_usable_requests_wait_for_decode_which_can_do_without_prefill():
    assert route_for(Demand(64), "disaggregated", 0, set()) == WITHOUT_PREFILL
    assert answer_pool("disaggregated", set()) == "decode"


@pytest.mark.parametrize("prompt_tokens", [1, 64])
@pytest.mark.parametrize("usable", [set(), {"colocated"}])
def test_a_replica_does_everything_as_intended_and_never_as_a_fallback(prompt_tokens, usable):
    assert route_for(Demand(prompt_tokens), "colocated", 64, usable) == WHOLE_REPLICA
    assert answer_pool("colocated", usable) == "colocated"


def test_the_last_pool_of_a_mode_decodes():
    assert (pools_of("disaggregated"), pools_of("colocated")) == (("prefill", "decode"), ("colocated",))


def test_workers_of_one_node_are_nearest_then_those_of_one_rack_and_the_unknown_are_far():
    here = worker_description(node="n1", rack="r1")
    assert distance(here, worker_description(node="n1", rack="r1")) == 0
    assert distance(here, worker_description(node="n2", rack="r1")) == 1
    assert distance(here, worker_description(node="n2", rack="r2")) == 2
    assert distance(worker_description(), worker_description()) == 2


def test_a_nearer_decode_worker_may_run_a_tenth_more_and_an_idle_one_is_always_taken():
    near, rack, far = (but(name, distance=number) for number, name in enumerate(("near", "rack", "far")))

    def chosen(*running):
        loads = [replace(load, running=number) for load, number in zip((near, rack, far), running, strict=True)]
        return pick(blocks(1), loads, room_then_fewest_running)

    assert chosen(0, 0, 0) == "near"
    assert chosen(1, 0, 0) == "rack"
    assert chosen(1, 1, 0) == "far"
    assert chosen(22, 20, 20) == "near"
    assert chosen(23, 20, 20) == "rack"
    assert chosen(23, 23, 20) == "near"
    assert chosen(25, 23, 20) == "far"


def test_room_comes_before_nearness():
    near, far = but("near", distance=0, kv_blocks_free=1), but("far", distance=2, kv_blocks_free=60, running=20)
    assert pick(blocks(10), [near, far], room_then_fewest_running) == "far"


def test_prompts_hold_blocks_during_their_prefill_only_while_a_quarter_stays_free_for_decode():
    assert room_to_overlap(but("free", kv_blocks_free=35), 10)
    assert not room_to_overlap(but("short", kv_blocks_free=34), 10)
    assert room_to_overlap(but("promised", kv_blocks_promised=75), 10)
    assert not room_to_overlap(but("begun since its last report", kv_blocks_promised=76), 10)


def test_decode_goes_where_the_blocks_are_and_not_where_fewest_run():
    full = but("full", running=10, kv_blocks_free=5)
    roomy = but("roomy", running=20, kv_blocks_free=60)
    assert pick(blocks(10), [full, roomy], room_then_fewest_running) == "roomy"
    assert pick(blocks(5), [full, roomy], room_then_fewest_running) == "full"
    assert pick(blocks(6), [full, replace(roomy, kv_blocks_promised=55)], room_then_fewest_running) == "full", (
        "one block is missing"
    )
    assert pick(blocks(5), [replace(full, kv_blocks_promised=1), roomy], room_then_fewest_running) == "roomy"
    assert pick(blocks(5), [replace(full, max_running=10), roomy], room_then_fewest_running) == "roomy", (
        "its batch is full"
    )


def test_half_of_an_answer_counts_for_what_a_sequence_will_need():
    assert blocks_needed(Demand(64), 32) == prompt_blocks(Demand(64, 127), 32) == 2
    assert blocks_needed(Demand(64, 127), 32) == 4


def test_a_scorer_sees_what_the_request_asks_for():
    def near(demand, load):
        return (load.worker_id != demand.client,)

    loads = [but("a"), but("b"), but("c")]
    assert [pick(Demand(1, client=client), loads, near) for client in "bca"] == ["b", "c", "a"]
