"""Anthropic's client."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from anthropic import Anthropic

URL, MODEL = sys.argv[1:3]
GREEDY = {"temperature": 0}
WISH: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 12,
    "system": "You are brief.",
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "extra_body": GREEDY,
}
TOOL: Any = {
    "name": "weather",
    "description": "Look up the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
}


def messages(client: Anthropic) -> None:
    whole = client.messages.create(**WISH)
    assert whole._request_id
    with client.messages.stream(**WISH) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert streamed.stop_reason == whole.stop_reason
    counted = client.messages.count_tokens(**{key: WISH[key] for key in ("model", "system", "messages")})
    assert counted.input_tokens == whole.usage.input_tokens == streamed.usage.input_tokens


def limit(client: Anthropic) -> None:
    """As Claude Code asks, of a context of 4,096 tokens."""
    with client.messages.stream(**WISH | {"max_tokens": 32_000, "stop_sequences": ["e", "a", "o"]}) as stream:
        assert stream.get_final_message().stop_reason in ("stop_sequence", "end_turn")


def tools(client: Anthropic) -> None:
    wish: dict[str, Any] = WISH | {
        "max_tokens": 60,
        "tools": [TOOL | {"strict": True}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    whole = client.messages.create(**wish)
    (call,) = [part for part in whole.content if part.type == "tool_use"]
    assert call.input["city"] in ("Oslo", "Rome")
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**wish) as stream:
        streamed = stream.get_final_message()
    assert [part.input for part in streamed.content if part.type == "tool_use"] == [call.input]
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]}
    history = [*WISH["messages"], {"role": "assistant", "content": whole.content}, result]
    assert client.messages.create(**WISH | {"messages": history, "tools": [TOOL]}).content

    for limit_tokens in (9, 16, 22):  # cut off before and in the arguments, which are free without `strict`
        cut = wish | {"max_tokens": limit_tokens, "tools": [TOOL]}
        whole = client.messages.create(**cut)
        with client.messages.stream(**cut) as stream:
            streamed = stream.get_final_message()
        inputs = [[part.input for part in each.content if part.type == "tool_use"] for each in (whole, streamed)]
        assert inputs[0] == inputs[1], (limit_tokens, inputs)
        assert whole.stop_reason == streamed.stop_reason


def raised(kind: type[anthropic.APIStatusError], client: Anthropic, wish: dict[str, Any]) -> anthropic.APIStatusError:
    try:
        client.messages.create(**wish)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def errors(client: Anthropic) -> None:
    long: Any = [{"role": "user", "content": "word " * 5000}]
    for changes, expected, kind in (
        ({"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
        ({"messages": long}, anthropic.BadRequestError, "invalid_request_error"),
        ({"max_tokens": -1}, anthropic.BadRequestError, "invalid_request_error"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, anthropic.BadRequestError, "invalid_request_error"),
    ):
        error = raised(expected, client, WISH | changes)
        body: Any = error.body
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert error.request_id


with Anthropic(base_url=URL, api_key="none", max_retries=0) as anthropic_client:
    for use in (messages, limit, tools, errors):
        use(anthropic_client)
