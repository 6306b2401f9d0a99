"""What an idle server is measured to take, and the limits in the settings that it cannot keep."""

import asyncio
from types import SimpleNamespace

import pytest

from ridgeline.contracts.errors import EngineFailed
from ridgeline.contracts.tasks import TokenDelta
from ridgeline.router import idle_times
from ridgeline.router.front.health import HealthProbe
from ridgeline.router.idle_times import OUTPUT_TOKENS, IdleTimes, measure, too_short
from ridgeline.router.server import Router
from tests.components.router.dispatch.test_orchestrator import FIRST, split
from tests.support.clock import FakeClock
from tests.support.samples import router_settings
from tests.support.symptoms import is_quoted

COLD = [(9.0, 1), (2.0, 1), *[(0.5, 1)] * 6]
WARM = [(0.25, 1), (2.0, 1), *[(0.125, 1)] * 6]
TOGETHER = [(0.5, 1), (2.0, 1), (0.5, 4), (0.5, 2)]


class Server:
    """Answers each request with deltas: after so many seconds, so many tokens."""

    def __init__(self, *answers):
        self.clock, self._answers = FakeClock(), list(answers)

    async def send(self, emit):
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        for after_s, tokens in answer:
            self.clock.now_s += after_s
            emit(TokenDelta(request_id="r", token_ids=[7] * tokens))


async def test_the_fastest_of_some_requests_counts_and_not_the_travel_of_its_kv():
    server = Server(COLD, WARM, TOGETHER)
    assert await measure(server.send, server.clock) == IdleTimes(0.25, 0.125)


@pytest.mark.parametrize("error", [EngineFailed("the engine is gone"), TimeoutError()])
async def test_a_request_that_fails_ends_the_measurement_and_what_was_found_before_counts(error, caplog):
    server = Server(WARM, error)
    assert await measure(server.send, server.clock) == IdleTimes(0.25, 0.125)
    assert await measure(Server(error).send) is None
    assert caplog.messages == [f"an idle server was not measured well: {error or 'no answer within 20 s'}"] * 2


async def test_an_answer_that_is_cut_off_is_no_measurement():
    assert await measure(Server([(0.1, 1)]).send) is None


async def test_a_server_that_does_not_answer_holds_the_start_up_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(idle_times, "WITHIN_S", 0.01)
    assert await measure(lambda emit: asyncio.Event().wait()) is None


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "told"),
    [
        (None, None, []),
        (0.25, 0.042, []),
        (
            0.01,
            0.001,
            [
                "router.slo.ttft_ms is 10, which nothing can keep here: an idle server was measured to take 250 ms to "
                "the first token of a prompt of 40 tokens. Set it to 250 or more, or leave it out",
                "router.slo.tpot_ms is 1, which nothing can keep here: an idle server was measured to take 42 ms from "
                "one token to the next. Set it to 49 or more, or leave it out",
            ],
        ),
    ],
)
def test_a_limit_below_what_an_idle_server_takes_is_told_with_the_least_that_would_hold(ttft_s, tpot_s, told):
    assert too_short(ttft_s, tpot_s, IdleTimes(0.25, 0.042), 40) == told


def test_the_guide_quotes_it():
    (sentence,) = too_short(None, 0.001, IdleTimes(0.25, 0.042), 40)
    assert is_quoted(sentence)


async def test_a_router_measures_with_requests_through_both_pools_and_only_if_it_has_limits():
    last = [TokenDelta(request_id="r", token_ids=[7] * (OUTPUT_TOKENS - 1), finished=True, finish_reason="length")]
    bench = split(prefill=[FIRST], decode=last)

    async def told(**limits):
        return await Router.limits_too_short(SimpleNamespace(_settings=router_settings(**limits), _probe=probe))

    def probe():
        return HealthProbe(bench.orchestrator, vocabulary_size=100, prompt_tokens=40)

    assert await told() == []
    assert bench.client("prefill").tasks == []
    (sentence,) = await told(ttft_ms=1e-6)
    assert sentence.startswith("router.slo.ttft_ms is 1e-06, which nothing can keep here")
    assert [len(bench.client(name).tasks) for name in ("prefill", "decode")] == [3, 3]
    bench.assert_idle()
