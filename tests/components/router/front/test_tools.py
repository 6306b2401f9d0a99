"""Parsers of tool calls and of thinking in the real router: what engines write comes as the API has it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from ridgeline.engine.passed_args import front
from tests.support import fake_engine
from tests.support.fake_engine import FakeEngine
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAID = [
    "<think>",
    "hm",
    "</think>",
    "<tool_call>",
    '{"name": "look", "arguments": {"at":',
    '"me"}}',
    "</tool_call>",
    "<eos>",
]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
PROMPT_TOKENS = 2
CUT_OFF_TOKENS = 5
"""A limit at which half of the call's arguments have been said."""


def make_model(directory: Any) -> None:
    """One whole utterance is one token."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "w1": 1, "w2": 2}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in SAID if word != "<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=3 + len(SAID),
        max_position_embeddings=4096,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        eos_token_id=0,
    ).save_pretrained(directory)


def as_said(context: list[int]) -> int:
    """The next token of what every engine says, which depends on nothing else."""
    place = len(context) - PROMPT_TOKENS
    return 0 if place >= len(SAID) - 1 else 3 + place


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    """(HTTP client, decode engine)"""
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fake_engine, "next_token", as_said)
        async with serving(
            directory,
            (FakeEngine("prefill"), FakeEngine("decode")),
            engine_args={"reasoning_parser": "deepseek_r1", "max_logprobs": 3},
            server_args=front({"tool_call_parser": "hermes", "chat_template": TEMPLATE}),
        ) as (client, _, _, decode):
            yield client, decode


@pytest.fixture
def http(served):
    return served[0]


def chat(**fields: Any) -> dict[str, Any]:
    """The fake engine knows no end but a token that is asked for."""
    messages = [{"role": "user", "content": "w1 w2"}]
    return {"model": "m", "messages": messages, "max_tokens": 20, "temperature": 0, "stop_token_ids": [0], **fields}


async def test_thinking_and_a_tool_call_come_apart(http):
    response = await http.post("/v1/chat/completions", json=chat(tools=[TOOL], tool_choice="auto"))
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == PROMPT_TOKENS
    (choice,) = response.json()["choices"]
    assert choice["message"]["reasoning"].strip() == "hm"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"at": "me"}
    assert choice["finish_reason"] == "tool_calls"


async def test_a_stream_has_them_apart_too(http):
    response = await http.post("/v1/chat/completions", json=chat(tools=[TOOL], stream=True))
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("reasoning") or "" for delta in deltas).strip() == "hm"
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    assert [call["name"] for call in calls if call.get("name")] == ["look"]
    assert json.loads("".join(call.get("arguments") or "" for call in calls)) == {"at": "me"}
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_a_forced_call_reaches_decode_as_a_grammar_with_no_token_of_prefills(served, choice):
    http, decode = served
    response = await http.post("/v1/chat/completions", json=chat(tools=[TOOL], tool_choice=choice))
    assert response.status_code == 200, response.text
    call = decode.calls[-1]
    assert len(call.prompt_token_ids) == PROMPT_TOKENS
    assert "look" in call.params.structured_outputs.structural_tag
    (called,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == ("look", {"at": "me"})


FORCED: Any = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize("choice", ["required", FORCED, "auto"])
async def test_a_call_that_is_cut_off_after_its_thinking_is_told_neither_whole_nor_streamed(http, choice):
    wish = chat(tools=[TOOL], tool_choice=choice, max_tokens=CUT_OFF_TOKENS)
    (whole,) = (await http.post("/v1/chat/completions", json=wish)).json()["choices"]
    response = await http.post("/v1/chat/completions", json=wish | {"stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    streamed = {
        key: "".join(one["delta"].get(key) or "" for one in choices).strip() for key in ("content", "reasoning")
    }
    assert whole["finish_reason"] == choices[-1]["finish_reason"] == "length"
    assert (whole["message"]["reasoning"] or "").strip() == streamed["reasoning"] == "hm"
    assert (whole["message"]["content"] or "").strip() == streamed["content"]
    assert ("look" in streamed["content"]) is (choice == "auto")  # what was asked for as a call is no text
    assert not whole["message"].get("tool_calls")
    assert '"tool_calls"' not in response.text


async def test_anthropics_client_reads_an_answer_whose_call_was_cut_off_whole_and_streamed_alike(http):
    wish: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "w1 w2"}],
        "max_tokens": CUT_OFF_TOKENS,
        "tools": [{"name": "look", "input_schema": TOOL["function"]["parameters"]}],
        "tool_choice": {"type": "any"},
    }
    async with AsyncAnthropic(base_url=str(http.base_url), api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**wish)
        async with client.messages.stream(**wish) as stream:
            streamed = await stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert [part for part in (*whole.content, *streamed.content) if part.type == "tool_use"] == []


async def test_arguments_that_no_schema_binds_are_an_object(served):
    http, decode = served
    await http.post("/v1/chat/completions", json=chat(tools=[TOOL], tool_choice="required"))
    assert '"json_schema": {"type": "object"}' in decode.calls[-1].params.structured_outputs.structural_tag
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    await http.post("/v1/chat/completions", json=chat(tools=[strict], tool_choice="required"))
    assert '"at": {"type": "string"}' in decode.calls[-1].params.structured_outputs.structural_tag


async def test_without_tools_the_same_words_are_the_answer(http):
    message = (await http.post("/v1/chat/completions", json=chat())).json()["choices"][0]["message"]
    assert message["reasoning"].strip() == "hm"
    assert "<tool_call>" in message["content"]
    assert not message.get("tool_calls")


async def test_the_limit_of_logprobs_is_the_configured_one(http):
    refused = await http.post("/v1/chat/completions", json=chat(logprobs=True, top_logprobs=4))
    assert refused.status_code == 400
    assert "3" in refused.json()["error"]["message"]
