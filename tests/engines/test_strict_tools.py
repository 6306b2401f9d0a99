"""Strict tools with schemas that dice made, and JSON of plain ones: no answer breaks its schema, and each one ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from tests.engines.harness import Engines, Figure
from tests.engines.test_modes import change
from tests.support import strict_tools

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

MODES = ("disaggregated", "colocated")
AT_ONCE = 16
PLAIN: dict[str, dict[str, Any]] = {
    "a list of two or three": {"p": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}},
    "a tuple": {"t": {"type": "array", "prefixItems": [{"type": "boolean"}] * 2, "items": False, "minItems": 2}},
    "an empty object": {},
    "a number": {"n": {"type": "number"}},
}


@pytest_asyncio.fixture(loop_scope="session", params=MODES)
async def serving(request: pytest.FixtureRequest, engines: Engines) -> AsyncIterator[Engines]:
    """The deployment in each mode, disaggregated again afterwards."""
    await change(engines, request.param)
    yield engines
    await change(engines, "disaggregated")


async def verdict(engines: Engines, seed: int) -> str:
    """How a strict tool was answered; raises AssertionError for arguments that break its schema."""
    schema = strict_tools.parameters(Random(seed))
    response = await engines.http.post(
        "/v1/chat/completions",
        json={
            "model": engines.model,
            "messages": [{"role": "user", "content": "Call the tool note with any values."}],
            "tools": [{"type": "function", "function": {"name": "note", "strict": True, "parameters": schema}}],
            "tool_choice": "required",
            "temperature": 1.0,
            "max_tokens": 90,
            "seed": seed,
        },
    )
    if response.status_code == 400:
        return "refused: " + response.json()["error"]["message"].partition(": ")[2].partition(":")[0][:40]
    assert response.status_code == 200, (seed, response.text)
    choice = response.json()["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut off by max_tokens"
    for call in choice["message"]["tool_calls"]:
        arguments = call["function"]["arguments"]
        assert strict_tools.broken(schema, arguments) is None, (seed, arguments, schema)
    return "valid"


@pytest.mark.proves("forced and strict tools", MODES)
@pytest.mark.parametrize(
    "tools", [20, pytest.param(strict_tools.TOOLS, marks=pytest.mark.long)], ids=lambda tools: f"{tools} tools"
)
async def test_no_arguments_of_a_strict_tool_break_its_schema(serving: Engines, figure: Figure, tools: int):
    free = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> str:
        async with free:
            return await verdict(serving, seed)

    verdicts = Counter(await asyncio.gather(*(one(seed) for seed in range(tools))))
    figure(", ".join(f"{count} {name}" for name, count in verdicts.most_common()))
    assert verdicts["valid"] > tools / 5


@pytest.mark.parametrize("name", PLAIN)
async def test_a_json_answer_of_a_small_model_ends(engines: Engines, name: str):
    schema = {"type": "object", "properties": PLAIN[name], "required": list(PLAIN[name]), "additionalProperties": False}
    response = await engines.http.post(
        "/v1/chat/completions",
        json={
            "model": engines.model,
            "messages": [{"role": "user", "content": "Give me an example answer as JSON."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            "temperature": 0,
            "max_tokens": 200,
        },
    )
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    assert strict_tools.broken(schema, choice["message"]["content"]) is None
