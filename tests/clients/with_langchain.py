"""langchain-openai."""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
ASKED = "What is the weather in Oslo?"
OPTIONS: dict[str, Any] = {
    "base_url": f"{URL}/v1",
    "model": MODEL,
    "api_key": "none",
    "temperature": 0,
    "max_retries": 0,
}


class Weather(BaseModel):
    """Look up the weather of a city."""

    city: Literal["Oslo", "Rome"]


def chats() -> None:
    chat = ChatOpenAI(**OPTIONS, max_tokens=12, stream_usage=True)
    whole = chat.invoke(ASKED)
    chunks = list(chat.stream(ASKED))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    assert (
        sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
        == (whole.usage_metadata or {})["output_tokens"]
    )
    assert [answer.content for answer in chat.batch([ASKED, ASKED])] == [whole.content] * 2


def structured() -> None:
    chat = ChatOpenAI(**OPTIONS, max_tokens=60)
    assert isinstance(chat.with_structured_output(Weather, method="json_schema").invoke(ASKED), Weather)
    assert isinstance(
        chat.with_structured_output(Weather, method="function_calling", strict=True).invoke(ASKED), Weather
    )


def tools() -> None:
    forced: dict[str, Any] = {"tool_choice": "required", "strict": True, "parallel_tool_calls": False}
    calls: Any = ChatOpenAI(**OPTIONS, max_tokens=60).bind_tools([Weather], **forced).invoke(ASKED)
    assert calls.tool_calls[0]["args"]["city"] in ("Oslo", "Rome")
    short: Any = ChatOpenAI(**OPTIONS, max_tokens=14).bind_tools([Weather], **forced)
    cut = short.invoke(ASKED)
    assert cut.response_metadata["finish_reason"] == "length"
    assert not cut.content
    streamed = None
    for chunk in short.stream(ASKED):
        streamed = chunk if streamed is None else streamed + chunk
    assert not streamed.content
    whole = [call["name"] for call in (*cut.tool_calls, *cut.invalid_tool_calls)]
    assert [chunk["name"] for chunk in streamed.tool_call_chunks] == whole


for use in (chats, structured, tools):
    use()
