"""Clients that leave in the middle leave nothing behind on any worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engines.harness import Engines, Figure, Increase
from tools.chaos.stress import Clients, one_round, plan

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

NUM_REQUESTS = 300
LONGEST_PROMPT_TOKENS = 60
CONCURRENCY = 16


class LeftEarly(Exception):
    """This client closed its connection on purpose."""


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


async def test_300_requests_of_which_half_may_leave_hold_nothing_two_seconds_later(
    engines: Engines, text: list[int], figure: Figure
):
    """The small one of `make stress`, with this model: every kind of request, left at every moment of its life."""
    plans = [plan(300, number, text, LONGEST_PROMPT_TOKENS) for number in range(NUM_REQUESTS)]
    before = await engines.metrics()
    clients = Clients(engines.http, engines.model)
    tally = await one_round(clients, engines, plans, CONCURRENCY, say=lambda _: None)
    counted = Increase(before, await engines.metrics())
    outcomes = counted.by_label("ridgeline_requests_total", "outcome")
    recomputed = counted.by_label("ridgeline_recompute_total", "reason")
    figure(f"clients {dict(tally.ends)}, sequences {outcomes}, recomputed {recomputed}, still held {tally.held}")
    assert tally.held == {}, tally.lives
    assert tally.errors == []
    assert tally.ends.total() == NUM_REQUESTS
    assert tally.ends["left"] >= NUM_REQUESTS / 5
    assert outcomes.keys() == {"finished", "cancelled"}
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
