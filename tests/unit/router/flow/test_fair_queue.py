"""Whose prompt is next, which of a client's prompts, and how long one waits at most, by simulation."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.router.flow.fair_queue import FairQueue

QUANTUM = 512
LEAST = 64


def popped(queue, now_s=0.0):
    return [queue.pop(now_s=now_s).item for _ in range(len(queue))]


@pytest.mark.parametrize(
    ("pushed", "now_s", "order"),
    [
        pytest.param(
            [("whenever", None), ("late", 9.0), ("soon", 3.0), ("any time", None), ("next", 5.0)],
            0.0,
            ["soon", "next", "late", "whenever", "any time"],
            id="the earliest deadline, then as they came",
        ),
        pytest.param([(n, 4.0) for n in range(6)], 0.0, [*range(6)], id="of one deadline the first that came"),
        pytest.param(
            [("hopeless", 5.0, 2.0), ("whenever", None), ("hopeful", 6.0, 3.0)],
            2.5,
            ["hopeful", "whenever", "hopeless"],
            id="a hopeless one costs none that can be saved",
        ),
        pytest.param([("over", 5.0), ("later", 6.0)], 5.5, ["later", "over"], id="hope ends with the deadline"),
        pytest.param([("a", 3.0), ("b", 1.0), ("c", 2.0)], 9.0, ["a", "b", "c"], id="hopeless ones as they came"),
    ],
)
def test_the_order_of_one_clients_prompts(pushed, now_s, order):
    queue = FairQueue()
    for item, deadline_s, *latest_s in pushed:
        queue.push("a", 100, item, deadline_s=deadline_s, latest_start_s=latest_s[0] if latest_s else None)
    assert popped(queue, now_s=now_s) == order


def test_a_prompt_may_start_at_its_latest_start_and_hope_does_not_come_back():
    queue = FairQueue()
    queue.push("a", 100, "first", deadline_s=5.0, latest_start_s=2.0)
    queue.push("a", 100, "second", deadline_s=6.0)
    assert [queue.peek(now_s=now_s).item for now_s in (2.0, 2.5, 2.0)] == ["first", "second", "second"]


def test_a_latest_start_is_for_a_deadline_and_none_waiting_an_index_error():
    with pytest.raises(ValueError, match="deadline"):
        FairQueue().push("a", 100, None, latest_start_s=3.0)
    with pytest.raises(IndexError):
        FairQueue().pop()


def test_being_in_a_hurry_gets_a_client_nothing_from_others():
    hurried, patient = FairQueue(), FairQueue()
    for number in range(60):
        hurried.push("a", 300, None, deadline_s=number / 7 % 3)
        patient.push("a", 300, None)
        for queue in (hurried, patient):
            queue.push("b", 200, None)
    assert [hurried.pop(now_s=1.0).client for _ in range(120)] == [patient.pop().client for _ in range(120)]


# --- the same, and clients, as the rules define it


@dataclass(eq=False)
class Waiter:
    client: str
    tokens: int
    number: int
    deadline_s: float | None
    latest_start_s: float
    hopeless: bool = False


@dataclass
class NaiveClient:
    waiting: list = field(default_factory=list)
    deficit: int = 0
    has_turn: bool = False
    passed: Counter = field(default_factory=Counter)

    def kind(self, kind):
        of_kind = {
            "timely": [one for one in self.waiting if one.deadline_s is not None and not one.hopeless],
            "undated": [one for one in self.waiting if one.deadline_s is None],
            "hopeless": [one for one in self.waiting if one.hopeless],
        }[kind]
        return sorted(of_kind, key=lambda one: (one.deadline_s if kind == "timely" else 0, one.number))

    def next(self):
        due = [kind for kind, after in (("hopeless", 4), ("undated", 3)) if self.passed[kind] >= after]
        return next(of_kind[0] for kind in [*due, "timely", "undated", "hopeless"] if (of_kind := self.kind(kind)))

    def goes(self, chosen):
        for kind in ("hopeless", "undated"):
            of_kind = self.kind(kind)
            self.passed[kind] = self.passed[kind] + 1 if of_kind and chosen not in of_kind else 0
        self.waiting.remove(chosen)


class NaiveQueue:
    """Walks from turn to turn, and looks at every prompt each time."""

    def __init__(self):
        self.clients, self.turns, self.number, self.urgent = {}, deque(), 0, []

    def push(self, client, tokens, deadline_s, latest_start_s, urgent):
        if urgent:
            self.urgent.append(Waiter("", tokens, self.number, deadline_s, latest_start_s))
            return self.urgent[-1]
        if client not in self.clients:
            self.clients[client] = NaiveClient()
            self.turns.append(client)
        one = Waiter(client, tokens, self.number, deadline_s, latest_start_s)
        self.number += 1
        self.clients[client].waiting.append(one)
        return one

    def removed(self, client):
        if not self.clients[client].waiting:
            del self.clients[client]
            self.turns.remove(client)

    def remove(self, one):
        if one in self.urgent:
            self.urgent.remove(one)
            return
        self.clients[one.client].waiting.remove(one)
        self.removed(one.client)

    def pop(self, eligible, now_s):
        if self.urgent:
            return self.urgent.pop(0)
        may = [name for name in self.turns if name in eligible]
        if not may:
            return None
        for client in self.clients.values():
            for one in client.waiting:
                one.hopeless = one.hopeless or one.latest_start_s < now_s
        while True:
            name = self.turns[0]
            client = self.clients[name]
            if name in may:
                if not client.has_turn:
                    client.has_turn = True
                    client.deficit += QUANTUM
                one = client.next()
                if (weight := max(one.tokens, LEAST)) <= client.deficit:
                    client.deficit -= weight
                    client.goes(one)
                    self.removed(name)
                    return one
            client.has_turn = False
            self.turns.rotate(-1)


CLIENTS = "abc"
WHO = st.frozensets(st.sampled_from(CLIENTS))
DEADLINES = st.one_of(st.none(), st.integers(0, 40))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from(CLIENTS), st.integers(1, 3000), DEADLINES, st.integers(0, 99)),
        st.tuples(st.just("peek"), WHO),
        st.tuples(st.just("pop"), st.one_of(WHO, st.just(frozenset(CLIENTS)))),
        st.tuples(st.just("remove"), st.integers(0, 99)),
        st.tuples(st.just("wait"), st.integers(1, 8)),
    ),
    max_size=150,
)


@given(steps=STEPS)
def test_the_order_is_that_of_the_rules_whatever_comes_goes_and_passes(steps):
    naive, queue, inside, now_s = NaiveQueue(), FairQueue(QUANTUM, LEAST), {}, 0.0

    def pop_both(eligible):
        looked = queue.peek(eligible.__contains__, now_s)
        expected = naive.pop(eligible, now_s)
        if expected is None:
            assert looked is None
            with pytest.raises(IndexError):
                queue.pop(eligible.__contains__, now_s)
            return
        assert queue.pop(eligible.__contains__, now_s) is looked
        assert inside.pop(looked) is expected

    for step, *rest in steps:
        if step == "push":
            client, tokens, deadline_s, chance = rest
            latest_s, urgent = None if deadline_s is None else deadline_s - chance % 10, chance > 90
            entry = queue.push(client, tokens, None, urgent=urgent, deadline_s=deadline_s, latest_start_s=latest_s)
            inside[entry] = naive.push(client, tokens, deadline_s, math.inf if latest_s is None else latest_s, urgent)
        elif step == "remove" and inside:
            entry = list(inside)[rest[0] % len(inside)]
            naive.remove(inside.pop(entry))
            queue.remove(entry)
            queue.remove(entry)
        elif step == "wait":
            now_s += rest[0]
        elif step == "peek":  # changes nothing
            queue.peek(rest[0].__contains__)
        elif step == "pop":
            pop_both(rest[0])
        assert (len(queue), queue.waiting.tokens) == (len(inside), sum(entry.tokens for entry in inside))
    while inside:
        pop_both(frozenset(CLIENTS))
    assert not queue.waiting.of_client


@given(
    floods=st.lists(
        st.lists(st.tuples(st.integers(1, 4000), DEADLINES), min_size=1, max_size=20), min_size=1, max_size=4
    ),
    tokens=st.integers(1, 3000),
    deadline_s=DEADLINES,
    new=st.lists(DEADLINES, min_size=1, max_size=9),
)
def test_a_lone_prompt_waits_no_longer_because_others_have_deadlines(floods, tokens, deadline_s, new):
    queue = FairQueue(QUANTUM)
    for number, flood in enumerate(floods):
        for size, when_s in flood:
            queue.push(f"flood-{number}", size, None, deadline_s=when_s)
    mine = queue.push("mine", tokens, None, deadline_s=deadline_s)
    ahead, grants = Counter(), 0
    while (entry := queue.pop(now_s=grants / 3)) is not mine:
        ahead[entry.client] += entry.tokens
        grants += 1
        again_s = new[grants % len(new)]
        queue.push(entry.client, entry.tokens, None, deadline_s=None if again_s is None else grants / 3 + again_s)
    for number, flood in enumerate(floods):
        longest = max(size for size, _ in flood)
        assert ahead[f"flood-{number}"] <= -(-tokens // QUANTUM) * (QUANTUM + longest)


# --- without deadlines


def test_a_short_prompt_passes_the_long_ones_of_another_client():
    queue = FairQueue()
    for index in range(50):
        queue.push("flood", 2000, f"long-{index}")
    queue.push("short", 40, "short")
    assert popped(queue).index("short") <= 1


def test_clients_get_equal_prompt_tokens_and_not_equal_numbers_of_prompts():
    queue = FairQueue()
    for _ in range(200):
        queue.push("long", 2000, None)
        queue.push("short", 100, None)
    served = Counter()
    while served["short"] < 150 * 100:
        entry = queue.pop()
        served[entry.client] += entry.tokens
    assert abs(served["long"] - served["short"]) <= QUANTUM + 2000


def test_a_short_prompt_counts_as_much_as_the_work_that_every_prompt_is():
    queue = FairQueue()
    for _ in range(1000):
        queue.push("tiny", 1, "tiny")
    for _ in range(5):
        queue.push("long", 500, "long")
    order = popped(queue)
    assert order[:60].count("long") == 5, "else a thousand prompts of one token would go before two of 500"


def test_tokens_ahead_are_ones_own_and_a_fair_share_of_the_others():
    queue = FairQueue()
    for _ in range(20):
        queue.push("flood", 2000, None)
    assert queue.waiting.tokens_ahead("flood", 2000) == 40_000
    assert queue.waiting.tokens_ahead("new", 100) == 2100, "as many as it sends itself, and one prompt"
    queue.push("new", 300, None)
    assert queue.waiting.tokens_ahead("new", 100) == 300 + 2400
    assert queue.waiting.tokens_ahead("flood", 100) == 40_300
    queue.push("health-probe", 40, None, urgent=True)
    assert queue.waiting.tokens_ahead("new", 100) == 40 + 300 + 2400


@given(
    waiting=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 3000), st.booleans()), max_size=25),
    pops=st.integers(0, 12),
    asked=st.tuples(st.sampled_from("abcz"), st.integers(1, 3000)),
)
def test_sums_that_are_kept_are_those_of_the_prompts_that_wait(waiting, pops, asked):
    queue = FairQueue(QUANTUM)
    here = [queue.push(client, tokens, None, urgent=urgent) for client, tokens, urgent in waiting]
    for _ in range(min(pops, len(here))):
        here.remove(queue.pop())
    if here:
        queue.remove(entry := here.pop())
        queue.remove(entry)

    client, tokens = asked
    each = {}
    for entry in here:
        if not entry.urgent:
            each.setdefault(entry.client, []).append(entry.tokens)
    own = sum(each.pop(client, []))
    urgent = sum(entry.tokens for entry in here if entry.urgent)
    others = sum(min(sum(theirs), own + tokens + max(QUANTUM, theirs[0])) for theirs in each.values())

    assert (len(queue), queue.waiting.tokens) == (len(here), sum(entry.tokens for entry in here))
    assert queue.waiting.tokens_ahead(client, tokens) == urgent + own + others
