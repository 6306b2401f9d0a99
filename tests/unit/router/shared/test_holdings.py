"""Each router knows what the others hold together, though it is told differences only."""

import random

from ridgeline.router.flow.admission import Held, Holdings
from ridgeline.router.shared.holdings import Changes, Parts


class Router:
    """What a router holds, and what it knows of the others, as `ridgeline.router.decisions` keeps it."""

    def __init__(self, parts):
        self.parts = parts
        self.holds = {}
        self.join()

    def join(self):
        self.part = self.parts.enter()
        self.changes, self.known = Changes(), Holdings()
        self.parts.take(self.part, self.changes.everything(Holdings(of_client=dict(self.holds))))

    def tell(self):
        if (changes := self.changes.since_told(Holdings(of_client=dict(self.holds)))) is not None:
            self.parts.take(self.part, changes)

    def hear(self):
        others = self.parts.differences(self.part)
        if others is None:
            return 0
        if others.whole:
            self.known = Holdings()
        for client, held in others.changed.items():
            self.known.put(client, held)
        return len(others.changed)


def sum_of(routers):
    total = Holdings()
    for router in routers:
        for client, held in router.holds.items():
            total.put(client, total.of(client).plus(held))
    return total


def test_after_any_course_each_router_knows_exactly_what_the_others_hold():
    for seed in range(30):
        draw, parts = random.Random(seed), Parts()
        routers = [Router(parts) for _ in range(4)]
        for _ in range(400):
            router = draw.choice(routers)
            match draw.randrange(6):
                case 0 | 1:
                    client = f"client-{draw.randrange(9)}"
                    router.holds[client] = Held(draw.randrange(1, 5), draw.randrange(99), draw.randrange(2048) / 1024)
                case 2 if router.holds:
                    del router.holds[draw.choice(list(router.holds))]
                case 3:
                    router.tell()
                case 4:
                    router.hear()
                case 5 if not draw.randrange(20):  # its connection breaks and comes back
                    parts.leave(router.part)
                    router.join()
        for router in routers:
            router.tell()
        for router in routers:
            router.hear()
            others = sum_of(one for one in routers if one is not router)
            assert router.known == others, seed


def test_only_what_has_changed_is_told_and_only_to_those_for_whom_it_has():
    parts = Parts()
    routers = [Router(parts) for _ in range(3)]
    for number in range(500):
        routers[0].holds[f"client-{number}"] = Held(1, 10)
    routers[0].tell()
    assert [router.hear() for router in routers] == [0, 500, 500]
    routers[0].holds["client-7"] = Held(2, 20)
    routers[0].tell()
    assert [router.hear() for router in routers] == [0, 1, 1]
    routers[1].holds["client-7"] = Held(1, 10)
    routers[1].tell()
    assert [router.hear() for router in routers] == [1, 0, 1]
    assert [parts.differences(router.part) for router in routers] == [None] * 3


def test_what_changed_often_while_a_router_did_not_read_is_told_once():
    parts = Parts()
    slow, other = Router(parts), Router(parts)
    slow.hear()
    for number in range(1000):
        other.holds["a"] = Held(number + 1, 0)
        other.tell()
    del other.holds["a"]
    other.holds["b"] = Held(1, 1)
    other.tell()
    assert slow.hear() == 1, "a is gone again, and was never told of"
    assert slow.known.of_client == {"b": Held(1, 1)}
