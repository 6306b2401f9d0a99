"""A complete call is told whole, though its answer, or another choice, ended at the limit."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from tests.components.router.front.test_tools import make_model
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
from types import SimpleNamespace

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from ridgeline.router.front.vllm_workarounds import cut_off_calls

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"at": {"type": "string"}}}}}
    for name in ("look", "go")
]
BOTH = json.dumps([{"name": "look", "arguments": {"at": "a"}}, {"name": "go", "arguments": {"at": "b"}}])
ONE = json.dumps({"name": "look", "parameters": {"at": "a"}})
SAID = {
    "internlm": (f"<|action_start|><|plugin|>{ONE}<|action_end|>", ["look"]),
    "xlam": (BOTH, ["look", "go"]),
    "hunyuan_a13b": (f"<tool_calls>{BOTH}</tool_calls>", ["look", "go"]),
}


@pytest.mark.parametrize("at_limit", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("parser", SAID)
async def test_calls_that_are_complete_are_told_whole_whichever_choices_ended_at_the_limit(parser, at_limit, tmp_path):
    """They were read as one part of a stream, in which these parsers show a name, or the first call alone."""
    make_model(tmp_path)
    text, names = SAID[parser]
    made = ParserManager.get_parser(tool_parser_name=parser, reasoning_parser_name=None, enable_auto_tools=True)
    wish = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    async def outputs():
        ends = ["length" if index in at_limit else "stop" for index in range(2)]
        yield SimpleNamespace(
            outputs=[SimpleNamespace(index=i, finish_reason=end, token_ids=[i]) for i, end in enumerate(ends)]
        )

    async def whole(request, given):
        [output] = [one async for one in given]
        return [
            cut_off_calls._parse_also_cut_off(made(tokenizer, request.tools), text, request, True, one.token_ids)
            for one in output.outputs
        ]

    for _, content, calls in await cut_off_calls._noting_the_end(whole)(wish, outputs()):
        assert (content or "", [call.name for call in calls]) == ("", names)
        assert [json.loads(call.arguments) for call in calls] == [{"at": at} for at in ("a", "b")[: len(names)]]
