"""What a router counts against a worker, as predictions read it."""

import pytest

from ridgeline.contracts.workers import StepModel, WorkerStatus
from tests.support.lone_worker import lone_worker
from tests.support.samples import LAYOUT

SLOW = StepModel(
    base_s=1e6, per_prefill_token_s=1e6, per_sequence_s=0.0, per_context_token_s=0.0, per_attended_token_s=0.0
)


def a_worker():
    return lone_worker(layout=LAYOUT)


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
        assert worker.prompts.left(SLOW) == pytest.approx((130, 100**2 / 2 + 30**2 / 2))
        assert 7 in worker.prompts.last_blocks
        first.prompt_done()
        assert worker.prompts.left(SLOW) == pytest.approx((30, 30**2 / 2))
        assert set(worker.prompts.last_blocks) == {8}
    assert worker.prompts.left(SLOW) == (0.0, 0.0)
    assert not worker.prompts.last_blocks


def test_a_prompt_that_two_sequences_share_is_known_until_both_are_computed():
    worker = a_worker()
    with worker.reserve(100, last_block=7) as first, worker.reserve(100, last_block=7):
        first.prompt_done()
        assert 7 in worker.prompts.last_blocks
    assert not worker.prompts.last_blocks


@pytest.mark.parametrize(
    ("free", "promised", "has_room"), [(35, 0, True), (34, 0, False), (100, 75, True), (100, 76, False)]
)
def test_prompts_hold_blocks_during_their_prefill_only_while_a_quarter_stays_free_for_decode(free, promised, has_room):
    worker = a_worker()
    worker.status = WorkerStatus(worker_id="w", kv_blocks_free=free)
    with worker.reserve(promised_blocks=promised):
        assert worker.has_room_to_overlap(10) is has_room
