"""Which worker gets a request."""

from dataclasses import replace

import pytest

from router.policy import (
    NoWorker,
    WorkerLoad,
    blocks_needed,
    fewest_running_then_most_free,
    least_prompt_tokens,
    least_work,
    local_prefill_reason,
    pick,
    room_then_fewest_running,
)

IDLE = WorkerLoad(
    worker_id="idle",
    connected=True,
    draining=False,
    outstanding_prompt_tokens=0,
    running=0,
    kv_blocks_free=100,
    kv_blocks_total=100,
    max_running=64,
)
SCORES = [least_prompt_tokens, fewest_running_then_most_free, least_work]


def but(worker_id, **changes):
    return replace(IDLE, worker_id=worker_id, **changes)


@pytest.mark.parametrize("unusable", [{"connected": False}, {"draining": True}])
@pytest.mark.parametrize("score", SCORES)
def test_a_worker_that_is_gone_or_draining_gets_nothing_however_idle(score, unusable):
    busy = but("busy", outstanding_prompt_tokens=9000, running=50, kv_blocks_free=0)
    assert pick([but("x", **unusable), busy], score) == "busy"


def test_a_worker_whose_cache_is_too_small_for_the_request_is_left_out():
    assert pick([but("small", kv_blocks_total=9), but("large", running=5)], least_work, needed_blocks=10) == "large"


@pytest.mark.parametrize("loads", [[], [but("x", connected=False)], [but("x", draining=True)]])
def test_no_usable_worker_is_an_error_of_its_own(loads):
    with pytest.raises(NoWorker, match="no worker"):
        pick(loads, least_work)


@pytest.mark.parametrize("score", SCORES)
def test_a_tie_goes_to_the_first(score):
    assert pick([but("a"), but("b")], score) == "a"
    assert pick([but("b"), but("a")], score) == "b"


def test_prefill_goes_where_the_fewest_prompt_tokens_wait_then_the_fewest_sequences():
    many_short = but("many-short", outstanding_prompt_tokens=100, running=9)
    one_long = but("one-long", outstanding_prompt_tokens=4000, running=1)
    assert pick([one_long, many_short], least_prompt_tokens) == "many-short"
    assert pick([but("a", running=2), but("b", running=1)], least_prompt_tokens) == "b"


def test_decode_goes_where_the_fewest_sequences_run_then_the_most_blocks_are_free():
    assert pick([but("a", running=2, kv_blocks_free=90), but("b", running=1)], fewest_running_then_most_free) == "b"
    full = but("full", running=1, kv_blocks_free=3)
    empty = but("empty", running=1, kv_blocks_free=80, outstanding_prompt_tokens=500)
    assert pick([full, empty], fewest_running_then_most_free) == "empty"


def test_a_whole_replica_is_chosen_by_prompts_then_sequences_then_free_blocks():
    prompts = but("prompts", outstanding_prompt_tokens=10)
    assert pick([prompts, but("running", running=9)], least_work) == "running"
    assert pick([but("a", running=2), but("b", running=1, kv_blocks_free=0)], least_work) == "b"
    assert pick([but("a", kv_blocks_free=1), but("b", kv_blocks_free=2)], least_work) == "b"


def test_only_prompts_shorter_than_the_limit_are_prefilled_locally():
    assert local_prefill_reason(63, 64) == "short_prompt"
    assert local_prefill_reason(64, 64) is None
    assert local_prefill_reason(1, 0) is None


def test_decode_goes_where_the_blocks_are_and_not_where_fewest_run():
    full = but("full", running=10, kv_blocks_free=5)
    roomy = but("roomy", running=20, kv_blocks_free=60)
    assert pick([full, roomy], room_then_fewest_running(10)) == "roomy"
    assert pick([full, roomy], room_then_fewest_running(5)) == "full"
    assert pick([full, replace(roomy, kv_blocks_promised=55)], room_then_fewest_running(6)) == "full", (
        "one block is missing"
    )
    assert pick([replace(full, kv_blocks_promised=1), roomy], room_then_fewest_running(5)) == "roomy"
    assert pick([replace(full, max_running=10), roomy], room_then_fewest_running(5)) == "roomy", "its batch is full"


def test_half_of_an_answer_counts_for_what_a_sequence_will_need():
    assert blocks_needed(64, 0, 32) == 2
    assert blocks_needed(64, 127, 32) == 4
