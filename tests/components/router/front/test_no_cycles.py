"""Answers leave nothing for Python's collector to find, so that it need not look through all streams for it."""

import asyncio
import gc
from collections import Counter

import pytest
import pytest_asyncio

from tests.support.patience import eventually
from tests.support.served_router import serving
from tests.support.talking_router import TalkingEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWERS = 30
KINDS = {
    "stream": {"stream": True},
    "whole": {},
    "two sequences": {"n": 2, "stream": True},
    "log-probabilities": {"logprobs": 2, "stream": True},
    "left by its client": {"stream": True, "max_tokens": 500},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model):
    """(HTTP client, router)."""
    engines = TalkingEngine("prefill"), TalkingEngine("decode")
    for engine in engines:
        engine.num_kv_blocks = 10_000
    async with serving(model, engines, max_concurrent_requests=100) as parts:
        yield parts[0], parts[1]


async def ask(http, fields):
    body = {"model": "m", "prompt": [5] * 40, "max_tokens": 5, "ignore_eos": True, **fields}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line and body["max_tokens"] > 100:
                return  # the client leaves


def ours(objects):
    """What of it is the router's, by class."""
    return Counter(type(one).__qualname__ for one in objects if type(one).__module__.startswith("ridgeline."))


async def answered(http, router, fields):
    for _ in range(ANSWERS):
        await ask(http, fields)
    await eventually(lambda: not router.streams)
    await asyncio.sleep(0.05)  # what ends a request has run


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_is_over_is_freed_without_the_collector(served, kind):
    http, router = served
    await answered(http, router, KINDS[kind])  # what a first one of its kind leaves for good
    gc.collect()
    gc.disable()
    try:
        await answered(http, router, KINDS[kind])
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = ours(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert {name: number for name, number in found.items() if number >= ANSWERS / 2} == {}
