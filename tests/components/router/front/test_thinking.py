"""Where thinking ends and a tool call begins, whatever parsers there are and however many tokens come at a time."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import pytest_asyncio

from ridgeline.engine.passed_args import front
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
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "w1"}],
    "tools": [TOOL],
    "max_tokens": 20,
    "stop_token_ids": [0],
}


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
async def http(request, tmp_path_factory):
    reasoning, calling = request.param
    said = [*THOUGHT, *CALLS[calling], "<eos>"]
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fake_engine, "next_token", lambda context: WORDS.index(said[len(context) - 1]))
        async with serving(
            directory,
            (FakeEngine("prefill"), FakeEngine("decode")),
            engine_args={"reasoning_parser": reasoning},
            server_args=front({"tool_call_parser": calling, "chat_template": "{{ messages[0].content }}"}),
        ) as (client, *_):
            yield client


@pytest.mark.parametrize("at_a_time", [None, 1, 2, 3, 5, 7])
async def test_a_call_after_thinking_is_told_apart(http, at_a_time):
    body = CHAT if at_a_time is None else CHAT | {"stream": True, "stream_interval": at_a_time}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    lines = (
        [answer.text]
        if at_a_time is None
        else [one[6:] for one in answer.text.splitlines() if one.startswith("data: {")]
    )
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    parts = [choice.get("message") or choice["delta"] for choice in choices]
    told = {key: "".join(part.get(key) or "" for part in parts).split() for key in ("reasoning", "content")}
    calls = [call["function"] for part in parts for call in part.get("tool_calls") or []]
    assert told == {"reasoning": ["hm", "so"], "content": []}
    assert [call["name"] for call in calls if call.get("name")] == ["look"]
    assert json.loads("".join(call.get("arguments") or "" for call in calls))["at"].strip() == "me"
    assert choices[-1]["finish_reason"] == "tool_calls"
