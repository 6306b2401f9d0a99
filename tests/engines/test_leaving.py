"""Clients that leave in the middle leave nothing behind on any worker."""

from __future__ import annotations

import time

import pytest

from tests.engines.harness import Engines, Figure, Increase
from tools.chaos.stress import HELD_WITHIN_S, Clients, one_round, plan

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

NUM_REQUESTS = 120
LONGEST_PROMPT_TOKENS = 60
CONCURRENCY = 16
LAST_STEPS = 5
"""A prompt of the longest and two tokens, so many times: on a slow machine the last steps take longer than 2 s."""


async def test_120_requests_of_which_half_may_leave_hold_nothing_two_seconds_later(
    engines: Engines, text: list[int], figure: Figure
):
    """The small one of `make stress`, with this model: every kind of request, left at every moment of its life."""
    plans = [plan(NUM_REQUESTS, number, text, engines.model, LONGEST_PROMPT_TOKENS) for number in range(NUM_REQUESTS)]
    began_s = time.monotonic()
    await engines.tokens(text[69_000:][:LONGEST_PROMPT_TOKENS], 2)
    within_s = max(HELD_WITHIN_S, LAST_STEPS * (time.monotonic() - began_s))
    assert await engines.becomes_idle() == {}
    before = await engines.metrics()
    clients = Clients(engines.http)
    tally = await one_round(clients, engines, plans, CONCURRENCY, say=lambda _: None, held_within_s=within_s)
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
