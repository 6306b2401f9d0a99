"""Which way a request goes, and the room that it needs."""

import pytest

from ridgeline.router.fleet.request_route import (
    SHORT_PROMPT,
    SPLIT,
    WHOLE_REPLICA,
    WITHOUT_DECODE,
    WITHOUT_PREFILL,
    Demand,
    answer_pool,
    blocks_needed,
    pools_of,
    route_for,
)
from tests.support.samples import LAYOUT

BOTH = {"prefill", "decode"}


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


def test_half_of_an_answer_counts_for_what_a_sequence_will_need():
    assert (LAYOUT.block_size, blocks_needed(Demand(64), LAYOUT), blocks_needed(Demand(64, 127), LAYOUT)) == (32, 2, 4)
