"""Whose prompt is next, and how long a short one waits at most, by simulation without a clock."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.router.flow.fair_queue import FairQueue

QUANTUM = 512


def popped(queue):
    return [queue.pop().item for _ in range(len(queue))]


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


def test_a_client_that_may_have_no_more_is_passed_over_and_saves_nothing_up():
    queue = FairQueue(quantum_tokens=100)
    for number in range(10):
        queue.push("full", 100, f"full-{number}")
        queue.push("other", 100, f"other-{number}")
    assert [queue.pop(lambda client: client == "other").item for _ in range(6)] == [f"other-{n}" for n in range(6)]
    assert {queue.pop().client for _ in range(2)} == {"full", "other"}
    queue.push("health-probe", 1, "health-probe", urgent=True)
    assert queue.pop(lambda client: False).item == "health-probe"
    waiting = len(queue)
    with pytest.raises(IndexError):
        queue.pop(lambda client: False)
    assert len(queue) == waiting


def test_what_is_urgent_goes_first_and_among_itself_in_order():
    queue = FairQueue()
    queue.push("a", 10, "a")
    queue.push("health-probe", 40, "first", urgent=True)
    queue.push("health-probe", 40, "second", urgent=True)
    assert popped(queue) == ["first", "second", "a"]


@pytest.mark.parametrize("urgent", [False, True])
def test_one_that_is_removed_is_never_popped_and_may_be_removed_again(urgent):
    queue = FairQueue()
    gone = queue.push("a", 700, "gone", urgent=urgent)
    queue.push("b", 10, "b")
    queue.remove(gone)
    queue.remove(gone)
    assert (len(queue), queue.waiting.tokens) == (1, 10)
    assert popped(queue) == ["b"]
    assert (len(queue), queue.waiting.tokens) == (0, 0)


def test_a_client_that_leaves_the_queue_loses_what_it_had_saved():
    queue = FairQueue(quantum_tokens=10)
    queue.push("a", 1, None)
    queue.pop()
    queue.push("a", 100, "a")
    queue.push("b", 5, "b")
    assert popped(queue) == ["b", "a"], "nine tokens of credit would not matter, and are gone"


@given(
    floods=st.lists(st.lists(st.integers(1, 4000), min_size=1, max_size=30), max_size=6),
    turns=st.integers(0, 40),
    tokens=st.integers(1, 3000),
)
def test_a_lone_prompt_waits_for_a_quantum_and_a_prompt_of_each_other_client_per_quantum_of_its_own(
    floods, turns, tokens
):
    queue = FairQueue(QUANTUM)
    for number, flood in enumerate(floods):
        for size in flood:
            queue.push(f"flood-{number}", size, None)
    for _ in range(min(turns, len(queue))):
        queue.pop()
    mine = queue.push("mine", tokens, None)
    ahead = Counter()
    while (entry := queue.pop()) is not mine:
        ahead[entry.client] += entry.tokens
        queue.push(entry.client, entry.tokens, None)  # the others never run out
    rounds = -(-tokens // QUANTUM)
    for client, before in ahead.items():
        longest = max(floods[int(client.removeprefix("flood-"))])
        assert before <= rounds * (QUANTUM + longest)


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
