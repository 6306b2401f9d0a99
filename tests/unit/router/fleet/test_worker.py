"""What a router counts against a worker, as predictions read it."""

import math
from contextlib import ExitStack

from ridgeline.router.fleet.worker import Worker
from tests.support.samples import LAYOUT, worker_description


class Client:
    connected = True
    failed_s = float("-inf")


def a_worker():
    return Worker(Client(), worker_description(worker_id="worker-0", pool="adaptive", layout=LAYOUT))


def test_a_worker_is_bound_by_the_least_limit_of_what_it_decodes_and_by_none_of_what_it_only_prefills():
    worker = a_worker()
    with worker.reserve(100, tpot_limit_s=0.01), worker.reserve(decode_context_tokens=50, tpot_limit_s=0.2):
        assert worker.tpot_limit_s(0.0) == 0.2
        with worker.reserve(decode_context_tokens=50, tpot_limit_s=0.1):
            assert (worker.tpot_limit_s(0.0), worker.outstanding.decodes) == (0.1, 2)
        assert worker.tpot_limit_s(0.0) == 0.2
    assert (worker.tpot_limit_s(0.0), worker.outstanding.decodes) == (math.inf, 0)


def test_a_limit_that_no_step_can_keep_does_not_count():
    worker = a_worker()
    limits_s = (1e-6, 0.1, 0.2)
    with ExitStack() as held:
        for limit_s in limits_s:
            held.enter_context(worker.reserve(decode_context_tokens=50, tpot_limit_s=limit_s))
        assert worker.tpot_limit_s(0.05) == 0.1
        assert worker.tpot_limit_s(0.3) == math.inf


def test_a_sequence_decodes_from_its_first_token_on():
    worker = a_worker()
    with worker.reserve(100, decode_context_tokens=120) as reservation:
        assert (worker.outstanding.decodes, worker.outstanding.decoding) == (1, 0)
        reservation.prompt_done()
        reservation.prompt_done()
        assert (worker.outstanding.decoding, worker.outstanding.prompt_tokens) == (1, 0)
    assert worker.outstanding.decoding == 0


def test_a_sequence_whose_first_token_another_worker_made_decodes_before_its_kv_is_there():
    worker = a_worker()
    with worker.reserve(promised_blocks=4, decode_context_tokens=120) as reservation:
        reservation.first_token_made()
        reservation.first_token_made()
        assert (worker.outstanding.decoding, worker.outstanding.promised_blocks) == (1, 4)
        reservation.prompt_done()
        assert (worker.outstanding.decoding, worker.outstanding.promised_blocks) == (1, 0)
    reservation.first_token_made()  # of a request that was cancelled meanwhile
    assert worker.outstanding.decoding == 0


def test_prompts_are_known_in_their_order_and_by_their_last_block_until_their_first_token():
    worker = a_worker()
    with worker.reserve(100, last_block=7) as first, worker.reserve(30, last_block=8):
        assert worker.prompts_ahead()[0] == [100, 30]
        assert 7 in worker.last_blocks
        first.prompt_done()
        assert worker.prompts_ahead()[0] == [30]
        assert set(worker.last_blocks) == {8}
    assert worker.prompts_ahead() == ([], 0.0)
    assert not worker.last_blocks


def test_a_prompt_that_two_sequences_share_is_known_until_both_are_computed():
    worker = a_worker()
    with worker.reserve(100, last_block=7) as first, worker.reserve(100, last_block=7):
        first.prompt_done()
        assert 7 in worker.last_blocks
    assert not worker.last_blocks
