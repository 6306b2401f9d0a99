"""Sums of what routers counted never fall and count each router once, whichever of them go and come back."""

import random

import pytest

from ridgeline.router.settings import RouterStart
from ridgeline.router.shared.counts import Counts

ONE, TWO, ASKER = RouterStart("one"), RouterStart("two"), RouterStart("asker")


def finished(number, gauge=0.0):
    return [("requests_total", {"outcome": "finished"}, float(number)), ("in_flight", {}, gauge)]


async def total(counts, asker=ASKER):
    return {name: value for name, _, value in await counts.without(asker)}


async def test_what_a_router_counted_stays_when_it_goes_but_not_what_it_was_doing():
    counts = Counts()
    counts.told(ONE, finished(5, gauge=2))
    counts.told(TWO, finished(1, gauge=1))
    assert await total(counts) == {"requests_total": 6, "in_flight": 3}
    counts.left(ONE)
    assert await total(counts) == {"requests_total": 6, "in_flight": 1}
    counts.told(ONE, finished(7))
    assert await total(counts) == {"requests_total": 8, "in_flight": 1}


async def test_a_router_is_told_what_its_own_former_processes_had_counted():
    counts = Counts()
    counts.told(ONE, finished(5))
    counts.left(ONE)
    again = RouterStart("one", 2)
    counts.told(again, finished(2))
    assert await total(counts, again) == {"requests_total": 5}
    assert await total(counts) == {"requests_total": 7, "in_flight": 0}


@pytest.mark.parametrize("names", [1, 25], ids=["one router that ends again and again", "one of many names"])
async def test_a_dispatcher_that_comes_later_knows_of_those_that_had_gone_whoever_tells_it_first(names):
    former, told = Counts(), []
    for number in range(25):
        router = RouterStart(f"router-{number % names}", 1 + number // names)
        former.told(router, finished(1))
        former.left(router)
        told.append(former.ended())  # as the other routers know it, of which some hear less than others
    assert len(told[-1]) == names
    for order in (told, reversed(told), told[20:] + told[:20]):
        later = Counts()
        later.told(router, finished(3))  # the last one had only lost its connection
        for ended in order:
            later.remember(ended)
            later.remember(ended)
        assert (await total(later))["requests_total"] == 25 + 2


async def test_sums_never_fall_and_never_count_twice_over_any_course():
    for seed in range(20):
        draw, counts = random.Random(seed), Counts()
        made = {f"router-{number}": 0 for number in range(5)}
        starts, gone = dict.fromkeys(made, 1), 0
        remembered = {name: {} for name in made}  # what each router was told last; some are told late
        for step in range(400):
            name = draw.choice(list(made))
            router = RouterStart(name, starts[name])
            match draw.randrange(4):
                case 0 | 1:
                    made[name] += draw.randrange(3)
                case 2:
                    counts.left(router)  # its connection broke, and comes back
                    remembered |= {other: counts.ended() for other in made if other != name and draw.randrange(3)}
                    counts.remember(remembered[name])
                case 3 if not draw.randrange(3):
                    counts.left(router)
                    gone, made[name] = gone + made[name], 0
                    starts[name] += 1
                    remembered = {other: counts.ended() for other in made} | {name: {}}
                case 3 if not draw.randrange(3):
                    counts = Counts()
                    for one in draw.sample(list(made), len(made)):  # each joins, and tells what it knows
                        counts.told(RouterStart(one, starts[one]), finished(made[one]))
                        counts.remember(remembered[one])
            counts.told(RouterStart(name, starts[name]), finished(made[name]))
            now = (await total(counts))["requests_total"]
            assert now == gone + sum(made.values()), (seed, step)
