"""A request that is cancelled gives everything back at once, whatever it was doing and whoever cancelled it.

The row "hand-off" needs a slow KV link and so a deployment of its own: `test_cancel_handoff.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.engines.cancelling import (
    CAUSES,
    DEADLINE_S,
    GIVE_UP_S,
    POLL_S,
    Cause,
    Freed,
    State,
    Target,
    TooLate,
    Watch,
    assert_ended_by_deadline,
    cancelled,
    expired_leases,
    in_time,
)
from tests.engines.harness import Engines, Figure

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

LONG_PROMPT_TOKENS = 1500
"""Three engine steps of prefill."""
STEP_TOKENS = 512
SHORT_PROMPT_TOKENS = 50
SHARE_OF_PREFILL = 0.4
"""Of the time that a long prompt takes unloaded: that long after its begin it is cancelled."""
TRIES = 3
"""A decode engine goes on while the end of a connection is on its way through processes that wait for a core."""
ABORT_PATH = "/inference/v1/abort_requests"
starts = count(90_000, 2_000)


@pytest.fixture
def fresh(text: list[int]) -> Callable[[int], list[int]]:
    """Prompts that no cache has seen."""

    def window(num_tokens: int) -> list[int]:
        start = next(starts) % (len(text) - 2 * LONG_PROMPT_TOKENS)
        return text[start : start + num_tokens]

    return window


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding"])
async def test_a_cancelled_request_frees_its_blocks_and_stops_its_engine(
    engines: Engines, fresh: Callable[[int], list[int]], figure: Figure, state: State, cause: Cause
):
    await engines.cold()
    expired = await expired_leases(engines)
    # A step that runs is not broken off: what it computes counts as one step more.
    most_tokens = 2 if state == "decoding" else 2 * STEP_TOKENS
    for _ in range(TRIES):
        freed = await in_state(engines, fresh, state, cause)
        assert await engines.becomes_idle() == {}
        if freed.tokens_after_cancel <= most_tokens:
            break
    figure(
        f"{state}, {cause}: free after {1e3 * freed.free_after_s:.0f} ms, tokens computed meanwhile "
        f"{freed.tokens_after_cancel:.0f}, then {freed.tokens_when_free:.0f}"
    )
    if cause == "deadline":
        assert_ended_by_deadline(freed)
    assert (freed.tokens_seen == 0) == (state != "decoding"), f"it was not {state}: {freed}"
    assert freed.tokens_after_cancel <= most_tokens
    assert freed.tokens_when_free == 0
    assert await expired_leases(engines) == expired


async def in_state(engines: Engines, fresh: Callable[[int], list[int]], state: State, cause: Cause) -> Freed:
    """One request, cancelled there."""
    # A longer deadline finds an answer still decoding, but a prompt computed.
    share_of_prefill_s = 0.0 if state == "decoding" else SHARE_OF_PREFILL * await _prefill_s(engines, fresh)

    async def attempt(number: int) -> Freed:
        if state == "prefilling":
            return await _prefilling(engines, fresh, cause, share_of_prefill_s)
        deadline_s = share_of_prefill_s if state == "queued" else DEADLINE_S * 2**number
        return await _in_state(engines, fresh, state, cause, deadline_s if cause == "deadline" else None)

    return await in_time(engines, attempt)


async def _prefill_s(engines: Engines, fresh: Callable[[int], list[int]]) -> float:
    """How long a long prompt takes to its first token on the idle server."""
    began_s = time.monotonic()
    request = {"model": engines.model, **body(fresh(LONG_PROMPT_TOKENS)), "max_tokens": 1}
    (await engines.http.post("/v1/completions", json=request)).raise_for_status()
    took_s = time.monotonic() - began_s
    assert await engines.becomes_idle() == {}
    return took_s


async def _prefilling(engines: Engines, fresh: Callable[[int], list[int]], cause: Cause, after_s: float) -> Freed:
    """A long prompt, cancelled so long after it was sent, or had begun. Raises TooLate if it was computed by then."""
    target, watch = Target(f"cancel-{next(starts)}"), Watch(engines)
    target.start(engines, body(fresh(LONG_PROMPT_TOKENS)), after_s if cause == "deadline" else None)
    await watch.until(lambda: any(name.endswith(".tasks") for name in watch.held), target)
    if cause == "client disconnect":
        await asyncio.sleep(after_s)
    freed = await cancelled(engines, target, cause, lambda held: not held, in_step=True)
    if freed.tokens_seen:
        raise TooLate
    return freed


async def _in_state(
    engines: Engines, fresh: Callable[[int], list[int]], state: State, cause: Cause, deadline_s: float | None
) -> Freed:
    """One request, cancelled in the router's queue or while it decodes. Raises TooLate."""
    target = Target(f"cancel-{next(starts)}")
    watch = Watch(engines)
    if state == "queued":
        return await _queued(engines, fresh, target, cause, deadline_s)
    target.start(engines, body(fresh(SHORT_PROMPT_TOKENS)), deadline_s)
    await watch.until(lambda: target.tokens >= 5, target)
    return await cancelled(engines, target, cause, lambda held: not held)


async def _queued(
    engines: Engines, fresh: Callable[[int], list[int]], target: Target, cause: Cause, deadline_s: float | None
) -> Freed:
    """In the router, behind a prompt that fills its worker; that one goes on, and must be all that is left."""
    watch, other = Watch(engines), Target(f"before-{next(starts)}")
    other.start(engines, {**body(fresh(2 * LONG_PROMPT_TOKENS)), "max_tokens": 1})
    await watch.until(lambda: any(name.endswith(".tasks") for name in watch.held))
    target.start(engines, body(fresh(SHORT_PROMPT_TOKENS)), deadline_s)
    try:
        await _waiting(engines, 1, target)
    except TooLate:
        await other.leave()
        raise
    forgotten = asyncio.create_task(_waiting(engines, 0))
    freed = await cancelled(engines, target, cause, lambda held: _tasks(held) == 1)
    free_after_s = await forgotten - (target.sent_s + freed.lived_s)
    assert other.tokens == 0, "it was not behind the other one any more"
    await watch.look()
    before = watch.computed_tokens
    await other.leave()
    await watch.until(lambda: not watch.held and watch.computed_tokens > before)  # the step it had begun
    # The tokens that were counted are the other one's.
    return replace(freed, free_after_s=max(0.0, free_after_s), tokens_after_cancel=0.0, tokens_when_free=0.0)


async def _waiting(engines: Engines, count: int, target: Target | None = None) -> float:
    """When so many prompts wait in the router, on the monotonic clock. Raises TooLate."""
    async with asyncio.timeout(GIVE_UP_S):
        while (await engines.latest_metrics()).sum("ridgeline_waiting_prompts") != count:
            if target is not None and target.is_too_late():
                raise TooLate
            await asyncio.sleep(POLL_S)
    return time.monotonic()


def _tasks(held: dict[str, float]) -> float:
    return held.get("worker-0.tasks", 0.0)


def body(prompt: list[int]) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


async def test_the_server_offers_no_abort_by_request_id_unless_it_says_so(engines: Engines, figure: Figure):
    paths = (await engines.http.get("/openapi.json")).json()["paths"]
    closed = await engines.http.post(ABORT_PATH, json={"request_ids": ["cmpl-nobody-0"]})
    background = {"model": engines.model, "input": "Name a colour.", "background": True, "store": True}
    refused = await engines.http.post("/v1/responses", json=background)
    unknown = await engines.http.post("/v1/responses/resp_nobody/cancel")
    figure(
        f"{ABORT_PATH}: {closed.status_code}; /v1/responses with background: {refused.status_code}; "
        f"/v1/responses/ID/cancel of an unknown one: {unknown.status_code}"
    )
    assert closed.status_code == (200 if ABORT_PATH in paths else 403)
    assert refused.status_code == 400
    assert unknown.status_code == 404
