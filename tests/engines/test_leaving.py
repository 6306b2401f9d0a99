"""Clients that leave in the middle leave nothing behind on any worker."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from harness import Engines, Figure, Increase

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

NUM_REQUESTS = 300
CONCURRENCY = 16
LEAVE_SHARE = 0.2


class LeftEarly(Exception):
    """This client closed its connection on purpose."""


def mixed_body(rng: random.Random, text: list[int]) -> dict[str, Any]:
    start = rng.randrange(len(text) - 100)
    body: dict[str, Any] = {
        "prompt": text[start : start + rng.randint(4, 60)],
        "max_tokens": rng.randint(1, 10),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    kind = rng.choice(["plain", "plain", "plain", "seeded", "penalty", "two", "logprobs", "stop"])
    extra: dict[str, dict[str, Any]] = {
        "plain": {},
        "seeded": {"temperature": 0.8, "seed": rng.randrange(1000)},
        "penalty": {"presence_penalty": 0.5},
        "two": {"n": 2, "temperature": 0.7},
        "logprobs": {"logprobs": 2},
        "stop": {"stop": ["e"]},
    }
    return {**body, **extra[kind]}


async def one_client(engines: Engines, body: dict[str, Any], leave_at: float | int | None) -> str:
    """Leave never, after so many seconds (a float), or after so many events (an int)."""
    try:
        async with asyncio.timeout(leave_at if isinstance(leave_at, float) else None):
            num_events = 0
            async for _ in engines.stream("/v1/completions", body):
                num_events += 1
                if num_events == leave_at:
                    raise LeftEarly
    except (TimeoutError, LeftEarly):
        return "left"
    return "finished"


async def test_300_requests_of_which_a_fifth_leave_hold_nothing_two_seconds_later(
    engines: Engines, text: list[int], figure: Figure
):
    rng = random.Random(300)
    plans: list[tuple[dict[str, Any], float | int | None]] = []
    for number in range(NUM_REQUESTS):
        body = mixed_body(rng, text)
        leave_at: float | int | None = None
        if number % 5 == 0:  # exactly a fifth; before the first token, at the hand-over, in mid-stream
            body["max_tokens"] = 40
            body.pop("stop", None)
            leave_at = rng.choice([rng.uniform(0.0, 1.5), 1, rng.randint(2, 6)])
        plans.append((body, leave_at))
    gate = asyncio.Semaphore(CONCURRENCY)

    async def gated(body: dict[str, Any], leave_at: float | int | None) -> str:
        async with gate:
            return await one_client(engines, body, leave_at)

    before = await engines.metrics()
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(gated(*plan)) for plan in plans]
    ends = Counter(client.result() for client in clients)
    left = await engines.becomes_idle()
    counted = Increase(before, await engines.metrics())
    outcomes = counted.by_label("ridgeline_requests_total", "outcome")
    recomputed = counted.by_label("ridgeline_recompute_total", "reason")
    figure(f"clients {dict(ends)}, sequences {outcomes}, recomputed {recomputed}, still held {left}")
    assert left == {}
    assert ends == {"finished": NUM_REQUESTS * (1 - LEAVE_SHARE), "left": NUM_REQUESTS * LEAVE_SHARE}
    assert outcomes.keys() == {"finished", "cancelled"}
    assert outcomes["cancelled"] >= NUM_REQUESTS * LEAVE_SHARE
    assert recomputed == {}
    assert counted.sum("ridgeline_expired_leases_total") == 0
    prompt = text[70_000:70_050]
    await engines.cold()
    answer = await engines.tokens(prompt, 6)
    await engines.cold()
    assert answer == (await engines.reference(prompt, 6)).token_ids


@pytest.mark.parametrize("moment", ["in prefill", "in decode"])
async def test_a_client_that_leaves_stops_the_work_for_it(engines: Engines, text: list[int], moment: str):
    body = {"prompt": text[71_000:71_100], "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    assert await one_client(engines, {**body, "return_token_ids": True}, 0.1 if moment == "in prefill" else 4) == "left"
    assert await engines.becomes_idle() == {}
    steps = (await engines.metrics()).sum("ridgeline_steps_total")
    await asyncio.sleep(0.5)
    assert (await engines.metrics()).sum("ridgeline_steps_total") == steps
