"""A later turn's prefill fetches what the decode worker of the turn before has cached: fake engines, real gRPC."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from vllm.sampling_params import SamplingParams

from ridgeline.contracts.errors import EngineFailed
from ridgeline.contracts.handoff import TransferResult
from ridgeline.router.dispatch.request import SequenceRequest
from ridgeline.router.front.sampling import sampling_of
from tests.components.router.dispatch.test_adaptive import MODEL, PROMPT, Serving, expected
from tests.components.router.dispatch.test_modes import addresses
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT, TIMING, router_settings
from tests.support.several_routers import a_dispatcher, routers
from tests.support.small_fleet import a_fleet, hosts

LAYOUTS = dict.fromkeys(("prefill", "decode"), LAYOUT)
TURN = [*PROMPT, *expected(30), *range(900, 940)]
FETCHED = TransferResult(outcome="ok", num_bytes=4096, wait_s=0.01, wire_s=0.02, num_tokens=32)


class Turns(Serving):
    """A conversation whose first turn has been answered."""

    def __init__(self, started, fleet, **overrides):
        super().__init__(started, fleet, **overrides)
        self.prefill, self.decode = self.engines
        self.released = []
        self.orchestrator._legs._release_handoff = lambda handoff, after_s: self.released.append(handoff)

    async def turn(self, prompt=TURN, tokens=5):
        sent, ending = self.ask(tokens, prompt)
        await self.step_until(ending)
        assert sent == expected(tokens, prompt)

    def fetched(self, result):
        self.prefill.timing = replace(TIMING, transfer_result=result)

    @property
    def transfer(self):
        """What the prefill engine was told of the latest turn."""
        return self.prefill.calls[-1].transfer

    def counted(self):
        samples = {
            (one.name, *one.labels.values()): one.value for family in self.registry.collect() for one in family.samples
        }
        return {
            name.removeprefix("ridgeline_reused_kv_").removesuffix("total").rstrip("_") + f" {label}".rstrip(): value
            for (name, label, *_), value in ((key, value) for key, value in samples.items() if len(key) > 1)
            if name.startswith("ridgeline_reused_kv")
        }


@asynccontextmanager
async def turns(reuses=True, **overrides):
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(**LAYOUTS) as started,
        a_fleet(addresses(started), reuses_decode_kv=reuses) as fleet,
    ):
        one = Turns(started, fleet, reuse_decode_kv=reuses, **overrides)
        await one.learn()
        await one.turn(PROMPT, 30)
        assert "handoff" not in one.transfer
        assert one.decode.asked == []
        yield one


async def test_prefill_gets_what_the_decode_worker_still_has_and_both_are_counted():
    async with turns() as one:
        one.decode.cached_tokens = 96
        one.fetched(FETCHED)
        await one.turn()
        assert one.decode.asked == [(TURN, None, None)]
        assert (one.transfer["handoff"]["num_tokens"], one.transfer["reuses_cached_kv"]) == (96, True)
        assert one.counted() == {" ok": 1, "tokens prefill": 32}
        assert one.released == []


@pytest.mark.parametrize(
    ("cached_tokens", "result", "counted"),
    [
        (96, replace(FETCHED, outcome="failed", reason="lease_expired"), " lease_expired"),
        (96, None, " already_cached"),
        (0, None, " not_cached"),
    ],
)
async def test_a_failed_fetch_a_question_in_vain_and_what_prefill_has_are_told_apart(cached_tokens, result, counted):
    async with turns() as one:
        one.decode.cached_tokens = cached_tokens
        one.fetched(result)
        await one.turn()
        assert ("handoff" in one.transfer) is (cached_tokens > 0)
        assert one.counted() == {counted: 1}


async def test_a_record_that_promises_what_is_not_there_is_corrected():
    async with turns() as one:
        before = one.learned.prefixes.blocks_of("decode-0")
        await one.turn()
        assert one.counted() == {" not_cached": 1}
        assert one.learned.prefixes.expected_tokens_total == 96
        assert one.learned.prefixes.confirmed_tokens_total == 0
        assert one.learned.prefixes.blocks_of("decode-0") > before, "it has this turn now"


async def test_a_turn_that_saves_less_than_a_decode_step_is_asked_for_while_nothing_decodes():
    async with turns() as one:
        for engine in one.engines:
            engine.stats.step_model = replace(engine.stats.step_model, per_prefill_token_s=0.001)
        await one.fleet.refresh()
        with one.fleet.get("decode-0").reserve(decode_context_tokens=10):
            await one.turn(TURN, 40)
            assert one.decode.asked == []
        await one.turn([*TURN, *expected(40, TURN), *range(60)])
        assert len(one.decode.asked) == 1


async def test_a_decode_worker_that_does_not_answer_costs_no_more_than_computing_would():
    async with turns() as one:
        one.decode.cached_tokens, one.decode.offers = 96, asyncio.Event()
        for engine in one.engines:
            engine.stats.step_model = replace(engine.stats.step_model, per_prefill_token_s=0.002)
        await one.fleet.refresh()
        await one.turn()
        assert "handoff" not in one.transfer
        assert one.counted() == {" no_answer": 1}
        one.decode.offers.set()


@pytest.mark.proves("later turns fetch KV from decode", "after a lost worker")
async def test_an_offer_whose_prefill_fails_is_released():
    async with turns() as one:
        one.decode.cached_tokens, one.prefill.error = 96, EngineFailed("it is gone")
        sent, ending = one.ask(5, TURN)
        await eventually(lambda: one.released or one.prefill.step())
        assert one.released[0].num_tokens == 96
        one.prefill.error = None
        await one.step_until(ending)
        assert sent == expected(5, TURN)


async def test_nobody_is_asked_for_a_prompt_that_is_computed_whole_for_its_log_probabilities():
    async with turns() as one:
        one.decode.cached_tokens = 96
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
        request = SequenceRequest("scored", list(TURN), sampling_of(params), reasoning_ended=True)
        await one.step_until(asyncio.create_task(one.orchestrator.run(request, lambda _: False)))
        assert one.decode.asked == []


async def test_a_turn_at_one_router_fetches_what_a_turn_at_another_has_left():
    settings = router_settings(routers=2)
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        for host in started:
            host._engine.stats.step_model = MODEL
        prefill, decode = (host._engine for host in started)
        decode.cached_tokens = 96
        async with (
            a_dispatcher(addresses(started), settings) as (_, at),
            routers(2, addresses(started), at, settings) as pair,
        ):
            for router, prompt, tokens in zip(pair, (PROMPT, TURN), (30, 5), strict=True):
                sent, params = [], SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
                request = SequenceRequest(router.name, list(prompt), sampling_of(params), reasoning_ended=True)
                await router.orchestrator.run(request, lambda delta, sent=sent: sent.extend(delta.token_ids))
                assert sent == expected(tokens, prompt)
    assert decode.asked == [(TURN, None, None)]
    assert prefill.calls[-1].transfer["handoff"]["num_tokens"] == 96


@pytest.mark.parametrize("overrides", [{"reuses": False}, {"prefix_routing": False}])
async def test_nobody_is_asked_if_it_is_switched_off(overrides):
    async with turns(**overrides) as one:
        one.decode.cached_tokens = 96
        await one.turn()
        assert one.decode.asked == []
        assert one.counted() == {}
