"""The sampling parameters of a request's two legs."""

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from ridgeline.contracts.errors import InvalidTask
from ridgeline.engine.request.sampling import (
    decode,
    decode_leg,
    encode,
    prefill_leg,
    resample_reason,
    with_transfer,
    without_client_transfer_keys,
)
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
EOS = 2


def wish(**fields):
    """As the router holds it after vLLM's input processor: end-of-sequence ids filled in."""
    params = SamplingParams(**{"max_tokens": 64} | fields)
    params.update_from_generation_config({"eos_token_id": [EOS, 9]}, EOS)
    return params


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"structured_outputs": StructuredOutputsParams(json=SCHEMA)}, "structured_output"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"seed": 0, "temperature": 0.7}, "seed"),
        ({"thinking_token_budget": 8}, "thinking_budget"),
    ],
)
def test_what_depends_on_earlier_output_tokens_makes_decode_sample_the_first_one(fields, reason):
    assert resample_reason(wish(**fields)) == reason


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"repetition_penalty": 1.2},  # counts prompt tokens as well: the first token is among them either way
        {"seed": 7, "temperature": 0.0},  # greedy draws nothing from the seeded stream
        {"stop": ["x"], "stop_token_ids": [5], "min_tokens": 3, "ignore_eos": True},
        {"logprobs": 5, "prompt_logprobs": 2},
        {"logit_bias": {5: 1.0}, "allowed_token_ids": [5, 6]},
    ],
)
def test_what_does_not_depend_on_them_goes_on_from_prefills_token(fields):
    assert resample_reason(wish(**fields)) is None


@pytest.mark.parametrize("resample", [False, True])
def test_both_legs_are_tokens_in_tokens_out_one_sequence_one_delta_a_step(resample):
    params = wish(stop=["x"], n=3, output_kind=RequestOutputKind.FINAL_ONLY, stream_interval=1000)
    for leg in (
        prefill_leg(params, emitted_token_ids=[], resample=resample),
        decode_leg(params, emitted_token_ids=[], has_handoff=True),
    ):
        assert (leg.detokenize, leg.stop, leg.n) == (False, [], 1)
        assert (leg.output_kind, leg.stream_interval) == (RequestOutputKind.DELTA, None)


def test_prefill_makes_one_token_and_may_end_there():
    leg = prefill_leg(wish(min_tokens=5, stop_token_ids=[7], logprobs=3), emitted_token_ids=[], resample=False)
    assert (leg.max_tokens, leg.min_tokens, leg.logprobs) == (1, 1, 3)
    assert leg.ignore_eos is False
    assert set(leg.stop_token_ids) == {7, 9}
    assert leg.all_stop_token_ids == {EOS, 9, 7}
    assert prefill_leg(wish(), emitted_token_ids=[], resample=False).min_tokens == 0


def test_a_prefill_whose_token_is_thrown_away_cannot_end_before_the_hand_off():
    params = wish(
        min_tokens=5,
        stop_token_ids=[7],
        logprobs=3,
        prompt_logprobs=2,
        structured_outputs=StructuredOutputsParams(json=SCHEMA),
        bad_words=["no"],
    )
    leg = prefill_leg(params, emitted_token_ids=[], resample=True)
    assert (leg.max_tokens, leg.min_tokens, leg.ignore_eos) == (1, 0, True)
    assert leg.stop_token_ids == []
    assert leg.all_stop_token_ids == set()
    assert leg.eos_token_id is None
    assert (leg.structured_outputs, leg.bad_words, leg.logprobs) == (None, None, None)
    assert leg.prompt_logprobs == 2, "only prefill can tell these"


def test_making_a_leg_leaves_the_clients_wish_as_it_was():
    params = wish(min_tokens=5, stop_token_ids=[7], stop=["x"], structured_outputs=StructuredOutputsParams(json=SCHEMA))
    before = encode(params)
    prefill_leg(params, emitted_token_ids=[], resample=True)
    with_transfer(decode_leg(params, emitted_token_ids=[1], has_handoff=True), {"do_remote_prefill": True})
    assert encode(params) == before


@pytest.mark.parametrize(
    ("emitted", "max_tokens", "min_tokens"), [([], 10, 4), ([1], 9, 3), ([1, 2, 3, 4, 5, 6], 4, 0)]
)
def test_decode_has_what_is_left_after_the_emitted_tokens(emitted, max_tokens, min_tokens):
    leg = decode_leg(wish(max_tokens=10, min_tokens=4), emitted_token_ids=emitted, has_handoff=True)
    assert (leg.max_tokens, leg.min_tokens) == (max_tokens, min_tokens)


def test_decode_that_makes_the_emitted_tokens_once_more_has_the_whole_answer_to_make():
    params = wish(max_tokens=10, min_tokens=4, seed=7, temperature=0.7)
    leg = decode_leg(params, emitted_token_ids=[1, 2], has_handoff=True, repeats=True)
    assert (leg.max_tokens, leg.min_tokens, leg.seed) == (10, 4, 7)


def test_decode_without_a_limit_stays_without_one():
    assert decode_leg(wish(max_tokens=None), emitted_token_ids=[1], has_handoff=True).max_tokens is None


@pytest.mark.parametrize(
    ("emitted", "has_handoff", "kept"), [([], True, None), ([1], False, None), ([1], True, None), ([], False, 2)]
)
def test_decode_asks_for_the_prompts_log_probabilities_only_when_it_computes_the_prompt(emitted, has_handoff, kept):
    leg = decode_leg(wish(prompt_logprobs=2, logprobs=3), emitted_token_ids=emitted, has_handoff=has_handoff)
    assert (leg.prompt_logprobs, leg.logprobs) == (kept, 3)


LEGS_THAT_DO_NOT_ASK = {
    "decode with a hand-off": lambda params: decode_leg(params, emitted_token_ids=[1], has_handoff=True),
    "decode that follows, resampling": lambda params: decode_leg(params, emitted_token_ids=[], has_handoff=True),
    "decode that goes on alone": lambda params: decode_leg(params, emitted_token_ids=[1], has_handoff=False),
    "prefill of a second attempt": lambda params: prefill_leg(params, emitted_token_ids=[1], resample=False),
}


@pytest.mark.parametrize("leg", LEGS_THAT_DO_NOT_ASK)
def test_a_leg_that_does_not_ask_for_the_prompts_log_probabilities_may_use_what_is_computed_already(leg):
    params = wish(prompt_logprobs=1)
    assert params.skip_reading_prefix_cache is True, "vLLM's own doing: it would throw transferred KV away"
    made = LEGS_THAT_DO_NOT_ASK[leg](decode(encode(params)))
    assert (made.prompt_logprobs, made.skip_reading_prefix_cache) == (None, False)


def test_a_leg_that_asks_for_them_computes_the_whole_prompt():
    params = decode(encode(wish(prompt_logprobs=1)))
    for leg in (
        prefill_leg(params, emitted_token_ids=[], resample=False),
        prefill_leg(params, emitted_token_ids=[], resample=True),
        decode_leg(params, emitted_token_ids=[], has_handoff=False),
    ):
        assert (leg.prompt_logprobs, leg.skip_reading_prefix_cache) == (1, True)


def test_decode_reads_the_transferred_kv_of_a_request_that_wants_no_cached_prefix():
    params = wish(skip_reading_prefix_cache=True)
    assert prefill_leg(params, emitted_token_ids=[], resample=False).skip_reading_prefix_cache is True
    assert decode_leg(params, emitted_token_ids=[1], has_handoff=True).skip_reading_prefix_cache is False


@pytest.mark.parametrize(
    "make",
    [
        lambda params: prefill_leg(params, emitted_token_ids=[1, 2], resample=True),
        lambda params: decode_leg(params, emitted_token_ids=[1, 2], has_handoff=False, repeats=True),
    ],
    ids=["prefill", "decode"],
)
def test_an_answer_that_is_repeated_from_its_prompt_does_not_ask_again_for_what_came_with_its_first_token(make):
    made = make(wish(prompt_logprobs=1, seed=3))
    assert (made.prompt_logprobs, made.skip_reading_prefix_cache) == (None, False)


def test_decode_does_not_draw_the_noise_of_tokens_already_sampled():
    params = wish(seed=7, temperature=0.7)
    assert decode_leg(params, emitted_token_ids=[], has_handoff=True).seed == 7
    assert decode_leg(params, emitted_token_ids=[1, 2], has_handoff=True).seed == 9
    assert decode_leg(wish(), emitted_token_ids=[1, 2], has_handoff=True).seed is None


def test_decode_keeps_the_grammar_and_the_stop_tokens():
    structured = StructuredOutputsParams(json=SCHEMA)
    leg = decode_leg(wish(structured_outputs=structured, stop_token_ids=[7]), emitted_token_ids=[], has_handoff=True)
    assert leg.structured_outputs == structured
    assert leg.all_stop_token_ids == {EOS, 9, 7}


def test_only_our_own_transfer_instructions_reach_the_connector():
    client = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}, "vllm_xargs": {"a": 1}}
    params = wish(extra_args=client)
    assert without_client_transfer_keys(params).extra_args is None
    assert params.extra_args == client, "the client's own object is not touched"
    for leg in (
        prefill_leg(params, emitted_token_ids=[], resample=False),
        decode_leg(params, emitted_token_ids=[], has_handoff=True),
    ):
        assert leg.extra_args is None
        assert with_transfer(leg, {"ours": 1}).extra_args == {"kv_transfer_params": {"ours": 1}}


def test_a_request_from_which_transfer_keys_were_dropped_is_not_resampled_for_them():
    params = wish(extra_args={"kv_transfer_params": {"do_remote_prefill": True}})
    assert resample_reason(without_client_transfer_keys(params)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3, "min_tokens": 2},
        {"stop": ["a", "b"], "stop_token_ids": [3, 4], "include_stop_str_in_output": True},
        {"logprobs": 5, "prompt_logprobs": 1, "logit_bias": {5: 1.5}},
        {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])},
        {"structured_outputs": StructuredOutputsParams(regex="a+"), "bad_words": ["b"]},
        {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1},
    ],
)
def test_parameters_survive_the_wire(fields):
    params = wish(**fields)
    there = decode(encode(params))
    assert there == params
    assert there.all_stop_token_ids == params.all_stop_token_ids
    assert there.eos_token_id == params.eos_token_id
    assert there.structured_outputs == params.structured_outputs


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", encode(SamplingParams())[:-1]])
def test_bytes_that_are_no_parameters_are_refused(data):
    with pytest.raises(InvalidTask):
        decode(data)
