"""Measures what an idle server takes, and says which limits of `router.slo` are below it.

Installed at the start, in every mode, if there are such limits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ridgeline.contracts.errors import EngineError
from ridgeline.contracts.tasks import TokenDelta
from ridgeline.contracts.workers import DECODE_STEP_MARGIN, TPOT_LIMIT_USED
from ridgeline.router.dispatch.orchestrator import DeadlineExceeded
from ridgeline.router.dispatch.request import Emit
from ridgeline.router.fleet.request_route import NoWorker

REQUESTS = 3
"""The fastest of them counts: the first one pages code in, and others may have a busy moment of the machine."""
OUTPUT_TOKENS = 8
WITHIN_S = 20.0
"""Then the start goes on: where a request takes longer than that, a TPOT of seconds shows by itself."""
logger = logging.getLogger(__name__)


class IdleTimes(NamedTuple):
    """What one request alone takes at the least."""

    ttft_s: float
    tpot_s: float


async def measure(
    send: Callable[[Emit], Awaitable[None]], clock: Callable[[], float] = time.monotonic
) -> IdleTimes | None:
    """Send some requests of `OUTPUT_TOKENS`, one after the other; None if none ends in time."""
    found: list[IdleTimes] = []
    try:
        async with asyncio.timeout(WITHIN_S):
            for _ in range(REQUESTS):
                began_s, times_s = clock(), list[float]()

                def note(delta: TokenDelta, times_s: list[float] = times_s) -> bool:
                    times_s.extend([clock()] * len(delta.token_ids))
                    return False

                await send(note)
                if len(times_s) < OUTPUT_TOKENS:  # it was cut off
                    break
                # From the second token on: between a split request's first two, its KV travels.
                found.append(IdleTimes(times_s[0] - began_s, (times_s[-1] - times_s[1]) / (len(times_s) - 2)))
    except (TimeoutError, EngineError, NoWorker, DeadlineExceeded) as error:
        logger.warning("an idle server was not measured well: %s", error or f"no answer within {WITHIN_S:g} s")
    if not found:
        return None
    return IdleTimes(min(one.ttft_s for one in found), min(one.tpot_s for one in found))


def too_short(ttft_limit_s: float | None, tpot_limit_s: float | None, idle: IdleTimes, prompt_tokens: int) -> list[str]:
    """Return a sentence for each limit that an idle server cannot keep.

    On TPOT, a part of the limit is kept in reserve.
    """
    prompt = f"to the first token of a prompt of {prompt_tokens} tokens"
    reserved = DECODE_STEP_MARGIN / TPOT_LIMIT_USED
    known = (
        ("ttft_ms", ttft_limit_s, idle.ttft_s, 1.0, prompt),
        ("tpot_ms", tpot_limit_s, idle.tpot_s, reserved, "from one token to the next"),
    )
    return [
        f"router.slo.{name} is {1e3 * limit_s:g}, which nothing can keep here: an idle server was measured to take "
        f"{1e3 * takes_s:.3g} ms {what}. Set it to {_rounded_up(1e3 * takes_s * times):g} or more, or leave it out"
        for name, limit_s, takes_s, times, what in known
        if limit_s is not None and limit_s < takes_s
    ]


def _rounded_up(number: float) -> float:
    """Round up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit
