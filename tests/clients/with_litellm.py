"""litellm, which many gateways are made of."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import litellm

URL, MODEL = sys.argv[1:3]
ROUTES: dict[str, dict[str, Any]] = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "hosted_vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL},
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 10,
    "temperature": 0,
    "api_key": "none",
    "num_retries": 0,
}


def answers(route: dict[str, Any]) -> None:
    whole = litellm.completion(**route, **CHAT)
    text = whole.choices[0].message.content
    assert text
    assert 0 < whole.usage.completion_tokens <= 10
    chunks = list(litellm.completion(**route, **CHAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


async def some_leave(route: dict[str, Any]) -> None:
    tasks = [asyncio.create_task(litellm.acompletion(**route, **CHAT)) for _ in range(8)]
    await asyncio.sleep(0.1)
    for task in tasks[::2]:
        task.cancel()
    for answer in await asyncio.gather(*tasks[1::2]):
        assert answer.choices[0].message.content


def error(route: dict[str, Any]) -> None:
    try:
        litellm.completion(**route, **CHAT | {"messages": [{"role": "user", "content": "word " * 5000}]})
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no ContextWindowExceededError")


litellm.suppress_debug_info = True
for each in ROUTES.values():
    answers(each)
    asyncio.run(some_leave(each))
error(ROUTES["openai"])
