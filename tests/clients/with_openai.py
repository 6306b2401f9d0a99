"""OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Oslo? Answer in a sentence."}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Weather(BaseModel):
    """What a model is made to answer."""

    sky: Literal["clear", "cloudy"]


def chats(client: OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    assert whole._request_id
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 12
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].usage == whole.usage
    with client.chat.completions.stream(**CHAT) as stream:
        told = "".join(event.delta for event in stream if event.type == "content.delta")
    assert told == whole.choices[0].message.content
    named = client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"x-request-id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert named.parse().id == "chatcmpl-mine"
    assert client.completions.create(model=MODEL, prompt="Once", max_tokens=4).choices[0].text


def tools(client: OpenAI) -> None:
    wish: dict[str, Any] = CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    (call, *_) = client.chat.completions.create(**wish).choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")  # type: ignore[union-attr]
    with client.chat.completions.stream(**wish) as stream:
        (streamed, *_) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments  # type: ignore[union-attr]
    cut = client.chat.completions.create(**wish | {"max_tokens": 14}).choices[0]
    assert cut.finish_reason == "length"
    parts = list(client.chat.completions.create(**wish | {"max_tokens": 14}, stream=True))
    told = [part.delta.tool_calls or [] for chunk in parts for part in chunk.choices]
    assert len(cut.message.tool_calls or []) == len([one for calls in told for one in calls if one.id])
    parsed = client.chat.completions.parse(**CHAT | {"max_tokens": 30}, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)


def responses(client: OpenAI) -> None:
    wish: dict[str, Any] = {"model": MODEL, "input": "Name a colour.", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**wish, store=False)
    events = list(client.responses.create(**wish, store=False, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    parsed = client.responses.parse(**wish | {"max_output_tokens": 30}, store=False, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)


def raised(kind: type[openai.APIStatusError], ask: Callable[[], Any]) -> openai.APIStatusError:
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def errors(client: OpenAI) -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    for ask, kind, words in (
        (lambda: client.models.retrieve("org/other"), openai.NotFoundError, "org/other"),
        (lambda: client.chat.completions.create(**CHAT | {"model": "other"}), openai.NotFoundError, "other"),
        (lambda: client.chat.completions.create(**CHAT | {"temperature": -1}), openai.BadRequestError, "temperature"),
        (
            lambda: client.with_options(base_url=URL).chat.completions.create(**CHAT),
            openai.NotFoundError,
            "/v1/chat/completions",
        ),
    ):
        error = raised(kind, ask)
        assert words in error.message
        assert error.request_id


async def leaves() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**CHAT | {"max_tokens": 500}, stream=True)
        await anext(aiter(stream))
        await stream.close()
        waits = asyncio.create_task(client.chat.completions.create(**CHAT | {"max_tokens": 500}))
        await asyncio.sleep(0)
        waits.cancel()
        assert (await client.chat.completions.create(**CHAT)).choices[0].message.content


with OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as openai_client:
    for use in (chats, tools, responses, errors):
        use(openai_client)
asyncio.run(leaves())
