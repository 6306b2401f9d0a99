"""Cancelled between first and second token, while the KV is on its way: a link on which every fetch hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import pytest

from tests.engines.cancelling import (
    CAUSES,
    DEADLINE_S,
    Target,
    Watch,
    assert_ended_by_deadline,
    cancelled,
    expired_leases,
    in_time,
)
from tests.engines.conftest import SHORT_STEPS, book, deployed
from tests.engines.harness import Engines, Figure

pytestmark = [pytest.mark.engines, pytest.mark.asyncio]

HANGING = "seed=1,drop=1,longest_drop_s=20"
PROMPT_TOKENS = 200


async def test_a_request_cancelled_in_its_hand_off_frees_the_blocks_of_both_workers(
    small_model: dict[str, str], figure: Figure
):
    async with deployed({"transfer.faults": HANGING, **SHORT_STEPS, **small_model}) as engines:
        text, starts = book(engines), count(0, 300)

        def fresh(num_tokens: int) -> list[int]:
            start = next(starts)
            return text[start : start + num_tokens]

        for cause in CAUSES:
            first_s = DEADLINE_S if cause == "deadline" else None

            async def attempt(number: int, first_s: float | None = first_s) -> Target:
                """A busy machine takes longer to the first token: it gets twice the time at each attempt."""
                return await in_handoff(engines, fresh, None if first_s is None else first_s * 2**number)

            target = await in_time(engines, attempt)
            freed = await cancelled(engines, target, cause, lambda held: not held)
            figure(f"hand-off, {cause}: free after {1e3 * freed.free_after_s:.0f} ms")
            if cause == "deadline":
                assert_ended_by_deadline(freed)
            assert freed.tokens_seen == 1, f"{cause}: it was not in its hand-off: {freed}"
            assert freed.tokens_after_cancel == freed.tokens_when_free == 0, cause
        assert await engines.becomes_idle() == {}
        assert await expired_leases(engines) == 0


async def in_handoff(engines: Engines, fresh: Callable[[int], list[int]], deadline_s: float | None) -> Target:
    """A request with its first token out and its fetch begun, which hangs. Raises TooLate."""
    prompt = fresh(PROMPT_TOKENS)
    target, watch = Target(f"cancel-{prompt[0]}-{prompt[-1]}"), Watch(engines)
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    target.start(engines, body, deadline_s)
    await watch.until(lambda: target.tokens == 1 and "worker-1.tasks" in watch.held, target)
    await asyncio.sleep(0.1)
    return target
