"""Parsers of thinking and of tool calls in the real router: what engines write comes as each API has it."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from ridgeline.contracts.errors import EngineFailed
from ridgeline.engine.passed_args import front
from tests.components.router.dispatch.test_modes import ROLES
from tests.support import fake_engine
from tests.support.fake_engine import FakeEngine
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
THOUGHT = ["<think>", "hm", "so", "</think>"]
CALLS = {
    "hermes": ["<tool_call>", '{"name": "look", "arguments": {"at":', '"me"}}', "</tool_call>"],
    "qwen3_coder": [
        "<tool_call>",
        "<function=look>",
        "<parameter=at>",
        "me",
        "</parameter>",
        "</function>",
        "</tool_call>",
    ],
}
WORDS = ["<eos>", "w1", *dict.fromkeys([*THOUGHT, *CALLS["hermes"], *CALLS["qwen3_coder"]])]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
CUT_OFF_TOKENS = 6
"""A limit at which half of the call's arguments have been said."""
MODES = ("colocated", "adaptive")
FORCED: Any = {"type": "function", "function": {"name": "look"}}


def make_model(directory: Any) -> None:
    """One whole utterance is one token."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "w1": 1}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS[2:]])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    LlamaConfig(architectures=["LlamaForCausalLM"], vocab_size=len(WORDS), eos_token_id=0, **sizes).save_pretrained(
        directory
    )


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=product(("deepseek_r1", "qwen3"), CALLS), ids=" ".join
)
async def served(request, tmp_path_factory):
    """(HTTP client, decode engine) of a router with these parsers."""
    reasoning, calling = request.param
    said = [*THOUGHT, *CALLS[calling], "<eos>"]
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fake_engine, "next_token", lambda context: WORDS.index(said[len(context) - 1]))
        async with serving(
            directory,
            (FakeEngine("prefill"), FakeEngine("decode")),
            roles=ROLES.by_mode,
            engine_args={"reasoning_parser": reasoning, "max_logprobs": 3},
            server_args=front({"tool_call_parser": calling, "chat_template": "{{ messages[0].content }}"}),
        ) as (client, _, _, decode):
            yield client, decode


@pytest_asyncio.fixture(loop_scope="module")
async def in_mode(served, request):
    """The router in another mode while a test runs."""
    for mode in (request.param, "disaggregated"):
        changed = await served[0].post("/ridgeline/mode", json={"mode": mode})
        assert changed.status_code == 200, changed.text
        if mode == request.param:
            yield mode


with_hermes = pytest.mark.parametrize("served", [("deepseek_r1", "hermes")], indirect=True, ids=" ".join)


async def chat(http: Any, **fields: Any) -> tuple[list[Any], dict[str, str], list[Any]]:
    """What a chat is told, whole or streamed: (choices, texts, calls). The fake engine knows no end but a token."""
    body = {"model": "m", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 20, "stop_token_ids": [0]}
    answer = await http.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.text]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    parts = [choice.get("message") or choice["delta"] for choice in choices]
    told = {key: "".join(part.get(key) or "" for part in parts).strip() for key in ("reasoning", "content")}
    return choices, told, [call["function"] for part in parts for call in part.get("tool_calls") or []]


async def is_told_apart(http: Any, **fields: Any) -> None:
    choices, told, calls = await chat(http, tools=[TOOL], **fields)
    thought = told["reasoning"].removeprefix("<think>").split()  # vLLM tells it too if it comes with the next token
    assert (thought, told["content"]) == (["hm", "so"], "")
    assert [call["name"] for call in calls if call.get("name")] == ["look"]
    assert json.loads("".join(call.get("arguments") or "" for call in calls))["at"].strip() == "me"
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.proves("reasoning parsers", "disaggregated")
@pytest.mark.parametrize("at_a_time", [None, 1, 2, 3, 5, 7])
async def test_a_call_after_thinking_is_told_apart(served, at_a_time):
    await is_told_apart(served[0], **({} if at_a_time is None else {"stream": True, "stream_interval": at_a_time}))


@pytest.mark.proves("reasoning parsers", MODES)
@pytest.mark.parametrize("in_mode", MODES, indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_is_told_apart_in_every_mode(served, in_mode, stream):
    await is_told_apart(served[0], stream=stream)


@pytest.mark.proves("reasoning parsers", "after a lost worker")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [2, 3, 4, 5, 6])
async def test_thinking_is_told_apart_if_the_engine_fails_after_some_words(served, monkeypatch, words, stream):
    http, decode = served
    say, before = fake_engine.next_token, len(decode.calls)

    def say_and_fail(context):
        decode.error = EngineFailed("it is gone") if len(context) == words else None
        return say(context)

    monkeypatch.setattr(fake_engine, "next_token", say_and_fail)
    await is_told_apart(http, stream=stream)
    assert len(decode.calls) == before + 2, "nothing was lost"


@with_hermes
@pytest.mark.parametrize("choice", ["required", FORCED], ids=str)
async def test_a_forced_call_reaches_decode_as_a_grammar_with_no_token_of_prefills(served, choice):
    http, decode = served
    _, _, (called,) = await chat(http, tools=[TOOL], tool_choice=choice)
    assert (called["name"], json.loads(called["arguments"])) == ("look", {"at": "me"})
    assert len(decode.calls[-1].prompt_token_ids) == 1
    tag = decode.calls[-1].params.structured_outputs.structural_tag
    assert ("look" in tag, '"json_schema": {"type": "object"}' in tag) == (True, True), "arguments are an object"
    await chat(http, tools=[TOOL | {"function": TOOL["function"] | {"strict": True}}], tool_choice=choice)
    assert '"at": {"type": "string"}' in decode.calls[-1].params.structured_outputs.structural_tag


@with_hermes
@pytest.mark.parametrize("choice", ["required", FORCED, "auto"], ids=str)
async def test_a_call_that_is_cut_off_after_its_thinking_is_told_neither_whole_nor_streamed(served, choice):
    for stream in (False, True):
        wish = {"tools": [TOOL], "tool_choice": choice, "max_tokens": CUT_OFF_TOKENS, "stream": stream}
        choices, told, calls = await chat(served[0], **wish)
        assert (choices[-1]["finish_reason"], told["reasoning"].removeprefix("<think>").split(), calls) == (
            "length",
            ["hm", "so"],
            [],
        )
        assert ("look" in told["content"]) is (choice == "auto")  # what was asked for as a call is no text


@with_hermes
async def test_anthropics_client_reads_an_answer_whose_call_was_cut_off_whole_and_streamed_alike(served):
    wish: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "w1"}],
        "max_tokens": CUT_OFF_TOKENS,
        "tools": [{"name": "look", "input_schema": TOOL["function"]["parameters"]}],
        "tool_choice": {"type": "any"},
    }
    async with AsyncAnthropic(base_url=str(served[0].base_url), api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**wish)
        async with client.messages.stream(**wish) as stream:
            streamed = await stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert [part for part in (*whole.content, *streamed.content) if part.type == "tool_use"] == []


@with_hermes
async def test_without_tools_the_same_words_are_the_answer(served):
    _, told, calls = await chat(served[0])
    assert (told["reasoning"].split(), "<tool_call>" in told["content"], calls) == (["hm", "so"], True, [])


@with_hermes
async def test_the_limit_of_logprobs_is_the_configured_one(served):
    body = {"model": "m", "messages": [{"role": "user", "content": "w1"}], "logprobs": True, "top_logprobs": 4}
    refused = await served[0].post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "3" in refused.json()["error"]["message"]
