"""Tools through the split: a parser is configured, and calls come as the API has them, streamed and not.

The model is too small to call a tool by itself. Grammars make it: vLLM's own for a named tool, and for `auto` one of
the request's, which writes a call as the model's format has it. `required` is asked for by the clients of others.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.engines.harness import Engines, Increase

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

CITIES = ["Paris", "Rome", "Oslo"]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name} of a city.",
            "strict": True,  # else a grammar holds the call and its name, and lets arguments be any JSON
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": CITIES}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "population")
]
NAMED: Any = {"type": "function", "function": {"name": "population"}}
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "(Paris|Rome|Oslo)"\}\}\n</tool_call>'
CHOICES: dict[str, dict[str, Any]] = {
    "auto": {"tool_choice": "auto", "extra_body": {"structured_outputs": {"regex": CALL}}},
    "named": {"tool_choice": NAMED},
}


@pytest_asyncio.fixture(loop_scope="session")
async def client(engines: Engines) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{engines.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def wish(engines: Engines, choice: str, **fields: Any) -> dict[str, Any]:
    """A chat of which a prompt of several blocks is made, so that KV is handed over."""
    content = "You can look things up about cities. What is the weather in Oslo, and how many people live there? " * 4
    messages = [{"role": "user", "content": content}]
    return {
        "model": engines.model,
        "messages": messages,
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 120,
        "parallel_tool_calls": False,
        **CHOICES[choice],
        **fields,
    }


def check(choice: str, name: str, arguments: str) -> None:
    assert name in (["population"] if choice == "named" else ["weather", "population"])
    parsed = json.loads(arguments)
    assert parsed.keys() == {"city"}
    assert parsed["city"] in CITIES


@pytest.mark.proves("forced and strict tools", "disaggregated")
@pytest.mark.parametrize("choice", CHOICES)
async def test_a_tool_is_called_through_the_split_whole_and_streamed_alike(
    client: AsyncOpenAI, engines: Engines, choice: str
):
    await engines.cold()
    before = await engines.metrics()
    reply = await client.chat.completions.create(**wish(engines, choice))
    counted = Increase(before, await engines.metrics())
    assert counted.sum("ridgeline_requests_total", path="disaggregated", outcome="finished") == 1
    assert counted.by_label("ridgeline_fetches_total", "result") == {"ok": 1}
    (call,) = reply.choices[0].message.tool_calls or []
    check(choice, call.function.name, call.function.arguments)  # type: ignore[union-attr]
    ends = "stop" if choice == "named" else "tool_calls"  # as OpenAI's API has it
    assert reply.choices[0].finish_reason == ends

    await engines.cold()  # else its steps have another shape, and bfloat16 may break a tie another way
    names, pieces, reasons = [], [], []
    async for chunk in await client.chat.completions.create(**wish(engines, choice, stream=True)):
        for part in chunk.choices:
            reasons.append(part.finish_reason)
            for delta in part.delta.tool_calls or []:
                names += [delta.function.name] if delta.function and delta.function.name else []
                pieces.append((delta.function and delta.function.arguments) or "")
    assert names == [call.function.name]  # type: ignore[union-attr]
    assert json.loads("".join(pieces)) == json.loads(call.function.arguments)  # type: ignore[union-attr]
    assert reasons[-1] == ends


async def test_tools_that_need_not_be_called_leave_a_plain_answer(client: AsyncOpenAI, engines: Engines):
    fields = {"max_tokens": 8, "tool_choice": "none"}
    reply = await client.chat.completions.create(**wish(engines, "auto", extra_body=None, **fields))
    assert reply.choices[0].message.content
    assert not reply.choices[0].message.tool_calls
