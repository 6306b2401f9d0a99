"""Where a request may go from where it is, and what its client has."""

import pytest
from msgspec.structs import replace

from ridgeline.contracts.handoff import TransferResult
from ridgeline.contracts.tasks import Adapter, LegTiming, TokenDelta
from ridgeline.router.dispatch.request import IllegalTransition, RequestProgress, Sampling, SequenceRequest
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.observe.timeline import RequestTimeline
from tests.support.clock import FakeClock
from tests.support.failure_table import STATES

LEGAL = {
    ("queued", "queued"),
    ("queued", "prefilling"),
    ("prefilling", "queued"),
    ("prefilling", "handoff"),
    ("prefilling", "decoding"),
    ("handoff", "queued"),
    ("handoff", "decoding"),
    ("decoding", "queued"),
    ("decoding", "decoding"),
}
WAY_TO = {
    "queued": [],
    "prefilling": ["prefilling"],
    "handoff": ["prefilling", "handoff"],
    "decoding": ["prefilling", "handoff", "decoding"],
}
PAIRS = [(state, to) for state in STATES for to in STATES]


def in_state(state, clock=None, emit=lambda delta: False):
    progress = RequestProgress(
        None, emit, RequestTimeline(clock or FakeClock(), "r", 70, "disaggregated"), RequestMetrics(None)
    )
    for step in WAY_TO[state]:
        progress.advance(step)
    return progress


@pytest.mark.parametrize(("state", "to"), [pair for pair in PAIRS if pair in LEGAL])
def test_a_request_goes_where_it_may(state, to):
    progress = in_state(state)
    progress.advance(to)
    assert progress.state == to


@pytest.mark.parametrize(("state", "to"), [pair for pair in PAIRS if pair not in LEGAL])
def test_a_request_that_may_not_go_there_stays_where_it_is(state, to):
    progress = in_state(state)
    with pytest.raises(IllegalTransition, match=f"'{state}' cannot become '{to}'"):
        progress.advance(to)
    assert progress.state == state


def test_nobody_sets_the_state_past_the_check():
    with pytest.raises(AttributeError):
        in_state("queued").state = "decoding"


@pytest.mark.parametrize("state", STATES)
def test_a_request_that_is_taken_from_its_worker_is_queued_again_and_its_pause_names_where_it_was(state):
    clock = FakeClock()
    progress = in_state(state, clock)
    clock.now_s += 1.0
    progress.migrate()
    clock.now_s += 2.0
    progress.send(TokenDelta(request_id="r", token_ids=[1]), "decode")
    assert progress.state == "queued"
    assert progress.timeline.pauses_s == [(state, 3.0)]


def test_what_the_client_has_is_kept_for_the_next_worker_and_ends_with_the_last_delta_or_a_stop():
    progress = in_state("decoding")
    assert not progress.send(TokenDelta(request_id="r", token_ids=[1, 2]), "prefill")
    assert (progress.token_ids, progress.ended) == ([1, 2], False)
    progress.send(TokenDelta(request_id="r", token_ids=[3], finished=True), "decode")
    assert (progress.token_ids, progress.ended) == ([1, 2, 3], True)
    stopped = in_state("decoding", emit=lambda delta: True)
    assert stopped.send(TokenDelta(request_id="r", token_ids=[1]), "prefill")
    assert stopped.ended


def test_a_timeline_that_is_told_of_another_way_changes_nothing_of_where_the_request_is():
    progress = in_state("handoff")
    result = TransferResult(outcome="failed", reason="timeout")
    progress.timeline.decode_reported(LegTiming(queue_s=0.0, first_token_s=0.0, compute_s=0.0, transfer_result=result))
    progress.timeline.interrupted("prefilling")
    assert progress.state == "handoff"


def test_prompts_share_a_prefix_only_with_the_same_adapter_and_salt():
    def prefix(**fields):
        request = SequenceRequest("r", list(range(70)), Sampling(b"", 4, None), **fields)
        timeline = RequestTimeline(FakeClock(), "r", 70, "disaggregated")
        return RequestProgress(request, lambda _: False, timeline, RequestMetrics(None), 32).demand().prefix

    sql = Adapter(name="sql", digest="v1", path="/sql")
    kinds = [{}, {"adapter": sql}, {"adapter": replace(sql, digest="v2")}, {"adapter": sql, "cache_salt": "a"}]
    assert len({prefix(**kind) for kind in kinds}) == len(kinds)
    assert prefix(adapter=sql) == prefix(adapter=replace(sql, path="/elsewhere"))
