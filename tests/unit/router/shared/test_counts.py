"""Sums of what routers counted never fall and count each router once, whichever of them go and come back."""

import random

from router.shared.counts import APART, Counts


def finished(number, gauge=0.0):
    return [("requests_total", {"outcome": "finished"}, float(number)), ("in_flight", {}, gauge)]


async def total(counts, asker="asker"):
    return {name: value for name, _, value in await counts.without(asker)}


async def test_what_a_router_counted_stays_when_it_goes_but_not_what_it_was_doing():
    counts = Counts()
    counts.told("one", finished(5, gauge=2))
    counts.told("two", finished(1, gauge=1))
    assert await total(counts) == {"requests_total": 6, "in_flight": 3}
    counts.left("one")
    assert await total(counts) == {"requests_total": 6, "in_flight": 1}
    counts.told("one", finished(7))
    assert await total(counts) == {"requests_total": 8, "in_flight": 1}


async def test_a_dispatcher_that_comes_later_knows_of_those_that_had_gone_whoever_tells_it_first():
    former = Counts()
    for number in range(APART + 5):
        former.told(f"router-{number}", finished(1))
        former.left(f"router-{number}")
    told_of_all = former.ended()
    assert len(told_of_all) == APART + 1, "the oldest are summed up"
    later = Counts()
    later.told("router-20", finished(3))  # it had only lost its connection
    later.remember(told_of_all)
    later.remember(told_of_all)
    assert (await total(later))["requests_total"] == APART + 5 + 2


async def test_sums_never_fall_over_any_course():
    for seed in range(20):
        draw, counts = random.Random(seed), Counts()
        made = {f"router-{number}": 0 for number in range(5)}
        before = 0.0
        for step in range(300):
            name = draw.choice(list(made))
            match draw.randrange(4):
                case 0 | 1:
                    made[name] += draw.randrange(3)
                    counts.told(name, finished(made[name]))
                case 2:
                    counts.left(name)
                case 3 if not draw.randrange(10):
                    counts.left(name)
                    made[f"new-{step}"] = made.pop(name) * 0
                case 3 if not draw.randrange(10):
                    former, counts = counts, Counts()
                    for one in made:  # each joins, and tells what it knows and has counted
                        former.left(one)
                    counts.remember(former.ended())
            now = (await total(counts)).get("requests_total", 0.0)
            assert now >= before, (seed, step)
            before = now
