"""The lag of the event loop: the worst of the last minute."""

import asyncio
import time

from ridgeline.router.observe.loop_lag import WINDOW_S, LoopLag
from tests.support.patience import eventually


def test_the_worst_of_the_last_minute_is_told():
    lag = LoopLag()
    assert lag.worst_s == 0.0
    for now_s, late_s in ((0.0, 0.1), (10.0, 0.5), (20.0, 0.2), (30.0, 0.3)):
        lag.note(now_s, late_s)
    assert lag.worst_s == 0.5
    lag.note(10.0 + WINDOW_S + 1.0, 0.01)
    assert lag.worst_s == 0.3
    [family] = lag.collect()
    assert family.samples[0].value == 0.3


async def test_a_blocked_loop_shows():
    lag, began_s = LoopLag(), time.monotonic()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    time.sleep(0.25)  # noqa: ASYNC251 - that is the point
    await eventually(lambda: lag.worst_s)
    watching.cancel()
    assert 0.1 < lag.worst_s < time.monotonic() - began_s
