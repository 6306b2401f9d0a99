"""One client asks for structured outputs that do not end; a stream beside it goes on as if it were alone.

Quiet and disturbed stretches of one stream alternate, so that what else the machine does falls on both.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from tests.engines.harness import Engines, Figure

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

NESTED = "((a{0,200}){0,200}){0,200}"
STRETCH_TOKENS = 20
MOST_ROUNDS = 6
SENDERS = 2
PAUSE_S = 0.2
"""Between two tries of a sender, which shares the machine with the server that it attacks."""


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"x{number}": {"type": "string"} for number in range(count)}}


def forced_call(pattern: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    return {"tools": [tool], "tool_choice": "required"}


FORCED = "pattern of a forced call"
"""This one ends only if its text comes to where the pattern takes too long."""
ATTACKS: dict[str, dict[str, Any]] = {
    "nested regex": {"structured_outputs": {"regex": NESTED}, "min_tokens": 150},
    "long regex": {"structured_outputs": {"regex": "(.{0,500}x){0,20}"}, "max_tokens": 60},
    "ambiguous grammar": {"structured_outputs": {"grammar": 'root ::= root root | "a" | "b" | ""'}, "min_tokens": 150},
    "20,000 choices": {"structured_outputs": {"choice": [f"item number {number}" for number in range(20_000)]}},
    "3,000 choices": {"structured_outputs": {"choice": [f"item {number}" for number in range(3_000)]}},
    "large schema": {"structured_outputs": {"json": properties(1_000)}},
    FORCED: forced_call(f"^{NESTED}$"),
}
REFUSED = ("20,000 choices",)
ENDED = ("nested regex", "ambiguous grammar", "large schema")
SERVED: dict[str, dict[str, Any]] = {"long regex": {"max_tokens": 60}, "3,000 choices": {"max_tokens": 6}}
"""These are answered, so the stream shares its steps with them: it is compared to one beside plain answers as long."""


def chat(engines: Engines, **fields: Any) -> dict[str, Any]:
    return {"model": engines.model, "messages": [{"role": "user", "content": "Tell me a story."}], **fields}


class Polite:
    """Streams that follow one another, and when their tokens came."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._gaps_s: asyncio.Queue[float] = asyncio.Queue()

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[Polite]:
        reading = asyncio.create_task(self._read())
        try:
            yield self
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def longest_gap_s(self) -> float:
        """Of the next tokens."""
        while not self._gaps_s.empty():
            self._gaps_s.get_nowait()
        async with asyncio.timeout(60):
            return max([await self._gaps_s.get() for _ in range(STRETCH_TOKENS)])

    async def _read(self) -> None:
        while True:
            body = chat(self._engines, max_tokens=1500, temperature=0, ignore_eos=True, stream=True)
            times_s = list[float]()
            async with self._engines.http.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        times_s.append(time.perf_counter())
                        for earlier, later in pairwise(times_s[-2:]):
                            self._gaps_s.put_nowait(later - earlier)


class Hostile:
    """Sends one request again and again, as several senders."""

    def __init__(self, engines: Engines, fields: dict[str, Any]) -> None:
        self._engines = engines
        self._body = chat(engines, **{"max_tokens": 200, "temperature": 1, **fields})
        self.answers: Counter[int] = Counter()
        self.why = ""

    @asynccontextmanager
    async def sending(self, senders_count: int = SENDERS) -> AsyncIterator[None]:
        senders = [asyncio.create_task(self._send()) for _ in range(senders_count)]
        try:
            yield
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)

    async def once(self) -> None:
        response = await self._engines.http.post("/v1/chat/completions", json=self._body)
        self.answers[response.status_code] += 1
        if response.status_code != 200:
            self.why = json.loads(response.text)["error"]["message"]

    async def _send(self) -> None:
        while True:
            await self.once()
            await asyncio.sleep(PAUSE_S)


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_stream_beside_structured_outputs_that_do_not_end_has_at_most_twice_its_gap(
    engines: Engines, figure: Figure, name: str
):
    hostile, harmless = Hostile(engines, ATTACKS[name]), Hostile(engines, SERVED.get(name, {}) | {"ignore_eos": True})
    await hostile.once()  # the first grammar of all loads its libraries
    alone, beside = list[float](), list[float]()
    async with Polite(engines).streaming() as polite:
        for _ in range(MOST_ROUNDS):
            async with harmless.sending(SENDERS if name in SERVED else 0):
                alone.append(await polite.longest_gap_s())
            async with hostile.sending():
                beside.append(await polite.longest_gap_s())
                assert (await engines.http.get("/ready")).status_code == 200, "tokens flow"
            if median(beside) <= 2 * median(alone):
                break
    figure(
        f"{name}: longest gap {median(alone) * 1e3:.0f} ms alone, {median(beside) * 1e3:.0f} ms beside it; "
        f"answers {dict(hostile.answers)}; {hostile.why[:120]}"
    )
    assert median(beside) <= 2 * median(alone)
    if name in (*REFUSED, *ENDED):
        assert hostile.answers[400]
    assert hostile.answers.keys() <= {400, 200}
    assert ("server.max_grammar_bytes" in hostile.why) == (name == "20,000 choices")
    assert name == FORCED or hostile.why.startswith("structured output: this grammar") == (name in ENDED)


async def test_a_grammar_that_ends_its_request_does_not_end_those_beside_it(engines: Engines):
    asked = [
        engines.http.post("/v1/chat/completions", json=chat(engines, max_tokens=150, **fields))
        for fields in (
            ATTACKS["nested regex"],
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"structured_outputs": {"regex": "[a-d]{2,5}"}},
        )
    ]
    hostile, *polite = await asyncio.gather(*asked)
    assert hostile.status_code == 400, hostile.text
    assert [one.status_code for one in polite] == [200, 200]
    assert polite[0].json()["choices"][0]["message"]["content"] in ("yes", "no")
