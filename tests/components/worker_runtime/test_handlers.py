"""The two roles: what each asks of its engine for a task, and what it passes on."""

import asyncio
from contextlib import aclosing

import msgspec
import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from ridgeline.contracts.errors import EngineFailed, HandoffLost, InvalidTask
from ridgeline.contracts.tasks import Adapter
from ridgeline.decode_worker.handler import DecodeHandler
from ridgeline.engine.request import sampling
from ridgeline.engine.vllm_engine import require_in_vocabulary
from ridgeline.prefill_worker.handler import PrefillHandler
from tests.support.fake_engine import FakeEngine, make_task
from tests.support.patience import eventually
from tests.support.samples import TIMING, make_handoff, next_token

PROMPT = [5, 6, 7]
T1 = next_token(PROMPT)
GRAMMAR = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(choice=["yes"]))


async def deltas_of(handler, engine, task):
    async with aclosing(handler.run(engine, task)) as stream:
        return [delta async for delta in stream]


@pytest.fixture
def prefill():
    return FakeEngine("prefill")


@pytest.fixture
def decode():
    return FakeEngine("decode")


# --- prefill


async def test_prefill_gives_the_first_token_and_a_hand_off_and_leaves_the_request_open(prefill):
    [delta] = await deltas_of(PrefillHandler(), prefill, make_task(leg="prefill", cache_salt="a"))
    assert (delta.token_ids, delta.finished, delta.finish_reason) == ([T1], True, None)
    assert delta.handoff == make_handoff(delta.handoff.handoff_id, 3)
    assert delta.timing == TIMING
    [call] = prefill.calls
    assert (call.request_id, call.prompt_token_ids, call.cache_salt) == ("r", PROMPT, "a")
    assert call.params.max_tokens == 1
    assert call.transfer == {"do_remote_decode": True, "handoff_id": delta.handoff.handoff_id}


@pytest.mark.parametrize(
    ("first_token", "keeps_every_token", "asked", "computed"),
    [
        ("resample", True, PROMPT, PROMPT),
        ("resample", False, PROMPT, PROMPT[:-1]),
        ("resample", False, PROMPT[:1], PROMPT[:1]),  # decode computes it itself
        ("continue", False, PROMPT, PROMPT),
    ],
)
async def test_a_token_that_decode_computes_again_is_left_out_of_windows_and_states(
    prefill, first_token, keeps_every_token, asked, computed
):
    prefill.keeps_every_token = keeps_every_token
    task = make_task(leg="prefill", first_token=first_token, prompt_token_ids=asked)
    [delta] = await deltas_of(PrefillHandler(), prefill, task)
    assert prefill.calls[0].prompt_token_ids == computed
    assert delta.handoff.num_tokens == len(computed)


@pytest.mark.parametrize("max_tokens", [1, 3])
async def test_prefill_fetches_the_beginning_of_a_prompt_that_another_worker_has_cached(prefill, max_tokens):
    cached = make_handoff("cached", 2)
    task = make_task(leg="prefill", handoff=cached, max_tokens=max_tokens)
    [delta] = await deltas_of(PrefillHandler(), prefill, task)
    reuse = {"do_remote_prefill": True, "handoff": cached.to_params(), "reuses_cached_kv": True}
    publish = {"do_remote_decode": True, "handoff_id": delta.handoff.handoff_id} if max_tokens > 1 else {}
    assert prefill.calls[0].transfer == {**publish, **reuse}


async def test_two_handoffs_never_share_an_id(prefill):
    ids = {(await deltas_of(PrefillHandler(), prefill, make_task(leg="prefill")))[0].handoff.handoff_id for _ in "ab"}
    assert len(ids) == 2


SQL = Adapter(name="sql", digest="v1", path="/adapters/sql")


async def test_an_adapter_reaches_the_engine_of_both_legs_and_is_part_of_the_hand_off(prefill, decode):
    [delta] = await deltas_of(PrefillHandler(), prefill, make_task(leg="prefill", adapter=SQL))
    assert delta.handoff.adapter == SQL.key
    await deltas_of(DecodeHandler(), decode, make_task(handoff=delta.handoff, emitted_token_ids=[T1], adapter=SQL))
    assert [call.adapter for call in (*prefill.calls, *decode.calls)] == [SQL, SQL]


@pytest.mark.parametrize("asked", [None, msgspec.structs.replace(SQL, digest="v2")], ids=["none", "other files"])
async def test_kv_of_another_adapter_is_not_taken(decode, asked):
    handoff = msgspec.structs.replace(make_handoff(), adapter=SQL.key)
    with pytest.raises(InvalidTask, match=SQL.key):
        await deltas_of(DecodeHandler(), decode, make_task(handoff=handoff, emitted_token_ids=[T1], adapter=asked))


async def test_a_long_prefill_says_first_that_its_handoff_can_be_followed():
    engine = FakeEngine("prefill", stepping="manual")
    stream = PrefillHandler().run(engine, make_task(leg="prefill"))
    first = asyncio.ensure_future(anext(stream))
    await eventually(lambda: engine.running)
    handoff_id = engine.calls[0].transfer["handoff_id"]
    partial = msgspec.structs.replace(make_handoff(handoff_id, 3), complete=False)
    engine.transfer_events.deliver([{"handoff_id": handoff_id, "handoff": partial.to_params(), "failed": ""}])
    announced = await first
    assert (announced.token_ids, announced.finished, announced.handoff) == ([], False, partial)
    engine.step()
    [last] = [delta async for delta in stream]
    assert (last.token_ids, last.finished, last.handoff.complete) == ([T1], True, True)


async def test_a_long_prefill_that_is_aborted_after_its_event_leaves_nothing():
    engine = FakeEngine("prefill", stepping="manual")
    stream = PrefillHandler().run(engine, make_task(leg="prefill"))
    first = asyncio.ensure_future(anext(stream))
    await eventually(lambda: engine.running)
    handoff_id = engine.calls[0].transfer["handoff_id"]
    engine.transfer_events.deliver([{"handoff_id": handoff_id, "handoff": make_handoff(handoff_id).to_params()}])
    await first
    await stream.aclose()
    assert (engine.aborted, engine.running) == (["r"], set())


async def test_prefill_that_resamples_gives_a_hand_off_and_no_token(prefill):
    task = make_task(leg="prefill", params=GRAMMAR, first_token="resample")
    [delta] = await deltas_of(PrefillHandler(), prefill, task)
    assert (delta.token_ids, delta.logprobs, delta.finished, delta.finish_reason) == ([], None, True, None)
    assert delta.handoff is not None
    assert prefill.calls[0].params.ignore_eos is True


async def test_an_answer_of_one_token_ends_at_prefill_and_pins_nothing(prefill):
    [delta] = await deltas_of(PrefillHandler(), prefill, make_task(leg="prefill", max_tokens=1))
    assert (delta.token_ids, delta.finish_reason, delta.handoff) == ([T1], "length", None)
    assert prefill.calls[0].transfer is None


async def test_one_token_that_decode_must_sample_is_still_handed_over(prefill):
    params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(choice=["yes"]))
    [delta] = await deltas_of(
        PrefillHandler(), prefill, make_task(leg="prefill", params=params, first_token="resample")
    )
    assert delta.handoff is not None
    assert delta.token_ids == []


async def test_an_answer_that_stops_at_its_first_token_is_passed_on_as_it_is(prefill):
    params = SamplingParams(max_tokens=9, stop_token_ids=[T1])
    [delta] = await deltas_of(PrefillHandler(), prefill, make_task(leg="prefill", params=params))
    assert (delta.token_ids, delta.finish_reason, delta.handoff) == ([T1], "stop", None)


async def test_prefill_of_a_request_that_goes_on_elsewhere_has_the_emitted_tokens_in_its_prompt(prefill):
    task = make_task(leg="prefill", max_tokens=3, emitted_token_ids=[40, 41])
    [delta] = await deltas_of(PrefillHandler(), prefill, task)
    assert prefill.calls[0].prompt_token_ids == [*PROMPT, 40, 41]
    assert delta.handoff is None, "two of three tokens are out: this is the last one"
    assert delta.finish_reason == "length"


SEEDED = SamplingParams(max_tokens=4, seed=3, temperature=0.8, prompt_logprobs=1)


@pytest.mark.parametrize(("emitted", "asked"), [([], 1), ([40, 41], None)])
async def test_a_second_attempt_does_not_ask_prefill_again_for_prompt_log_probabilities_that_the_client_has(
    prefill, emitted, asked
):
    task = make_task(leg="prefill", params=SEEDED, first_token="resample", emitted_token_ids=emitted)
    await deltas_of(PrefillHandler(), prefill, task)
    [call] = prefill.calls
    assert (call.prompt_token_ids, call.params.prompt_logprobs) == (PROMPT, asked)


async def test_a_second_attempt_on_decode_alone_does_not_ask_again_either(decode):
    task = make_task(params=SEEDED, first_token="resample", emitted_token_ids=[40, 41])
    await deltas_of(DecodeHandler(), decode, task)
    assert decode.calls[0].params.prompt_logprobs is None
    assert decode.calls[0].params.skip_reading_prefix_cache is False


# --- decode


async def test_decode_attaches_the_hand_off_and_goes_on_after_the_first_token(decode):
    handoff = make_handoff(num_tokens=3)
    task = make_task(handoff=handoff, emitted_token_ids=[T1], reasoning_ended=True, cache_salt="a")
    deltas = await deltas_of(DecodeHandler(), decode, task)
    [call] = decode.calls
    assert call.transfer == {"do_remote_prefill": True, "handoff": handoff.to_params()}
    assert call.prompt_token_ids == [*PROMPT, T1]
    assert (call.params.max_tokens, call.reasoning_ended, call.cache_salt) == (2, True, "a")
    assert [delta.token_ids for delta in deltas] == [[next_token([*PROMPT, T1])], deltas[1].token_ids]
    assert [delta.finished for delta in deltas] == [False, True]
    assert deltas[-1].finish_reason == "length"


async def test_decode_that_resamples_makes_every_token_itself(decode):
    handoff = make_handoff(num_tokens=3)
    task = make_task(handoff=handoff, params=GRAMMAR, first_token="resample")
    deltas = await deltas_of(DecodeHandler(), decode, task)
    assert decode.calls[0].prompt_token_ids == PROMPT
    assert decode.calls[0].params.structured_outputs == GRAMMAR.structured_outputs
    assert sum(len(delta.token_ids) for delta in deltas) == 4


async def test_decode_without_a_hand_off_tells_the_connector_why(decode):
    await deltas_of(DecodeHandler(), decode, make_task(recompute_reason="short_prompt"))
    assert decode.calls[0].transfer == {"recompute_reason": "short_prompt"}


async def test_a_whole_replica_has_no_transfer_at_all(decode):
    await deltas_of(DecodeHandler(), decode, make_task())
    assert decode.calls[0].transfer is None


@pytest.mark.parametrize("handoff", [None, make_handoff("h1", 3)])
async def test_the_limit_of_a_task_reaches_the_engine_beside_what_else_its_decode_leg_carries(decode, handoff):
    limits = {"tpot_limit_s": 0.08, "sure_output_tokens": 20.0}
    await deltas_of(DecodeHandler(), decode, make_task(**limits, handoff=handoff, emitted_token_ids=[T1]))
    [call] = decode.calls
    assert call.params.extra_args[sampling.TPOT_LIMIT] == 0.08
    assert call.params.extra_args[sampling.SURE_TOKENS] == 19.0
    assert (call.transfer is not None) == (handoff is not None)


async def test_a_limit_that_a_client_put_into_its_request_does_not_reach_the_engine(decode):
    params = SamplingParams(max_tokens=2, extra_args={sampling.TPOT_LIMIT: 0.001, sampling.SURE_TOKENS: 9.0})
    await deltas_of(DecodeHandler(), decode, make_task(params=params))
    assert decode.calls[0].params.extra_args is None


async def test_transfer_instructions_of_a_client_do_not_reach_the_engine(decode):
    params = SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": {"do_remote_prefill": True, "handoff": {}}})
    await deltas_of(DecodeHandler(), decode, make_task(params=params))
    assert decode.calls[0].transfer is None


# --- both


@pytest.mark.parametrize(("handler", "leg"), [(PrefillHandler(), "prefill"), (DecodeHandler(), "decode")])
@pytest.mark.parametrize("error", [EngineFailed("gone"), InvalidTask("no")])
async def test_an_engines_error_passes_through(handler, leg, error, decode):
    decode.error = error
    with pytest.raises(type(error), match=str(error)):
        await deltas_of(handler, decode, make_task(leg=leg))


async def test_closing_a_handler_aborts_its_request_in_the_engine_at_once(decode):
    async with aclosing(DecodeHandler().run(decode, make_task(max_tokens=50))) as stream:
        await anext(stream)
    assert decode.aborted == ["r"]


# --- following a prefill


def following(mode="continue"):
    handoff = msgspec.structs.replace(make_handoff(), complete=False)
    return make_task(handoff=handoff, first_token=mode, prompt_token_ids=[5, 6, 7])


async def test_following_gives_the_engine_a_placeholder_for_the_first_token():
    engine = FakeEngine()
    deltas = await deltas_of(DecodeHandler(), engine, following())
    [call] = engine.calls
    assert call.prompt_token_ids == [5, 6, 7, 7]
    assert (call.transfer["first_token_follows"], call.transfer["handoff"]["complete"]) == (True, False)
    assert call.params.max_tokens == 2, "the first of three is prefill's"
    assert len(deltas) == 2


@pytest.mark.parametrize("complete", [False, True], ids=["followed", "complete"])
@pytest.mark.parametrize("mode", ["continue", "resample"])
async def test_decode_reads_the_transferred_kv_of_a_prompt_whose_log_probabilities_were_asked_for(mode, complete):
    engine = FakeEngine()
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    handoff = msgspec.structs.replace(make_handoff(), complete=complete)
    await deltas_of(DecodeHandler(), engine, make_task(params=params, handoff=handoff, first_token=mode))
    [call] = engine.calls
    assert (call.params.prompt_logprobs, call.params.skip_reading_prefix_cache) == (None, False)


async def test_a_leg_that_would_throw_the_kv_away_is_not_followed(monkeypatch):
    engine = FakeEngine()
    made = sampling.decode_leg

    def that_skips(*args, **kwargs):
        leg = made(*args, **kwargs)
        leg.skip_reading_prefix_cache = True
        return leg

    monkeypatch.setattr(sampling, "decode_leg", that_skips)
    with pytest.raises(HandoffLost) as lost:
        await deltas_of(DecodeHandler(), engine, following())
    assert (lost.value.reason, engine.calls) == ("prefix_cache_skipped", [])


async def test_following_in_resample_needs_no_placeholder():
    engine = FakeEngine()
    await deltas_of(DecodeHandler(), engine, following("resample"))
    [call] = engine.calls
    assert (call.prompt_token_ids, "first_token_follows" in call.transfer) == ([5, 6, 7], False)


async def test_following_that_fails_raises_its_reason_and_aborts_the_engines_request():
    engine = FakeEngine(stepping="manual")
    stream = DecodeHandler().run(engine, following())
    first = asyncio.ensure_future(anext(stream))
    await eventually(lambda: engine.running)
    engine.transfer_events.deliver([{"handoff_id": "h1", "failed": "revoked"}])
    with pytest.raises(HandoffLost) as lost:
        await first
    assert lost.value.reason == "revoked"
    assert (engine.aborted, engine.running) == (["r"], set())


async def test_an_event_about_another_handoff_is_passed_over():
    engine = FakeEngine()
    engine.transfer_events.deliver([{"handoff_id": "somebody else's", "failed": "timeout"}])
    assert len(await deltas_of(DecodeHandler(), engine, following())) == 2


@pytest.mark.parametrize("token", [-1, 1000, 2**31, 2**63])
def test_a_token_outside_the_vocabulary_is_refused_before_it_breaks_the_engine(token):
    require_in_vocabulary([0, 999], 1000)
    with pytest.raises(InvalidTask, match=str(token)):
        require_in_vocabulary([5, token], 1000)
