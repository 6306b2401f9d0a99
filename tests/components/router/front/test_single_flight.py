"""One computation for many callers, on a fake clock."""

import asyncio

import pytest

from ridgeline.router.front.single_flight import BURST, SingleFlight


class Page:
    """Costly: counts how often it was made, and takes as long as the test lets it."""

    def __init__(self):
        self.now_s = 0.0
        self.made = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.error = None

    async def make(self):
        self.made += 1
        made = self.made
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return made


def shared(page):
    return SingleFlight(page.make, 0.5, lambda: page.now_s)


async def test_fifty_questions_a_second_are_two_computations_a_second():
    page = Page()
    ask = shared(page)
    for i in range(500):
        page.now_s = i / 50
        await ask()
    assert 20 <= page.made <= 20 + BURST


async def test_who_asks_seldom_has_a_new_answer_each_time_and_nobody_has_one_older_than_half_a_second():
    page = Page()
    ask = shared(page)
    assert [await ask() for _ in range(BURST + 3)] == [1, 2, 3, 4, 4, 4, 4]
    page.now_s = 0.6
    assert await ask() == 5
    page.now_s = 60.0
    assert [await ask() for _ in range(3)] == [6, 7, 8]


async def test_who_asks_meanwhile_waits_for_the_same_answer_whoever_leaves():
    page = Page()
    ask = shared(page)
    page.may_end.clear()
    leaver, *waiting = [asyncio.ensure_future(ask()) for _ in range(50)]
    await asyncio.sleep(0)
    leaver.cancel()
    page.now_s = 10.0
    waiting.append(asyncio.ensure_future(ask()))
    await asyncio.sleep(0)
    page.may_end.set()
    assert await asyncio.gather(*waiting) == [1] * 50


async def test_a_failure_is_everybodys_and_is_tried_again():
    page = Page()
    ask = shared(page)
    page.error = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        await ask()
    page.error = None
    page.now_s = 1.0
    assert await ask() == 2
