"""Which candidate is the best, and in which order candidates run."""

import pytest

from loadtest.choice import Score, best_of, order_of


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([("first", 0.8, 2.0), ("second", 0.9, 1.0)], "second"),
        ([("first", 0.9, 1.0), ("second", 0.9, 1.1)], "second"),
        ([("first", 0.9, 1.0), ("second", 0.9, 1.0)], "first"),
        ([("first", 0.1, 1.0), ("second", 0.9, 1.0), ("third", 0.9, 1.0)], "second"),
    ],
)
def test_attainment_decides_then_goodput_then_the_order_of_the_file(scores, best):
    assert best_of([Score(*each) for each in scores]).candidate == best


def test_the_order_has_each_candidate_once_is_drawn_from_the_seed_and_mixes_the_variants():
    candidates = {"a": ["one", "two", "three"], "b": ["one", "two", "three"]}
    orders = [order_of(candidates, seed) for seed in range(20)]
    assert orders[3] == order_of(candidates, 3)
    assert all(sorted(order) == [(side, place) for side in "ab" for place in range(3)] for order in orders)
    firsts = {order[0] for order in orders}
    assert {side for side, _ in firsts} == {"a", "b"}
    assert len(firsts) > 3
