"""The measured rate of prompts."""

import pytest

from ridgeline.router.flow.rates import ServiceRate
from tests.support.clock import FakeClock


class Bench:
    def __init__(self):
        self.clock = FakeClock()
        self.rate = ServiceRate(self.clock, window_tokens=100)

    def prompt(self, tokens, seconds, full=True, worker="w"):
        self.rate.begin(worker, full)
        self.clock.now_s += seconds
        self.rate.finished(worker, tokens)


SHORT_FIRST = [(10, 1.2), (290, 1.2)]
"""One step of 1.2 s has 10 tokens and half a window of a long prompt, which is counted later."""


@pytest.mark.parametrize(
    ("prompts", "tokens_per_s"),
    [
        pytest.param([(100, 0.75)], None, id="less than a second was measured"),
        pytest.param([(100, 0.75), (500, 0.75)], 400, id="tokens by time"),
        pytest.param(SHORT_FIRST[:1], None, id="a short prompt beside the first chunk of a long one"),
        pytest.param(SHORT_FIRST, 125, id="with the rest of it"),
        pytest.param([(300, 1.0, True, "a"), (10, 2.0, True, "b")], None, id="not several windows of each worker"),
        pytest.param([(300, 1.0, True, "a"), (10, 2.0, True, "b"), (290, 0.0, True, "b")], 200, id="of each worker"),
        pytest.param([(100, 1.0), (100, 0.0)] * 4, 200, id="prompts that end in one step"),
        pytest.param([(10, 5.0, False)], None, id="a worker with little to do"),
    ],
)
def test_the_rate_is_tokens_by_time_of_fully_loaded_workers(prompts, tokens_per_s):
    bench = Bench()
    for prompt in prompts:
        bench.prompt(*prompt)
    found = bench.rate.tokens_per_s
    assert found == tokens_per_s or found == pytest.approx(tokens_per_s, rel=0.02)


def test_an_interval_in_which_a_prompt_was_given_up_says_nothing():
    bench = Bench()
    bench.rate.begin("w", True)
    bench.clock.now_s += 5
    bench.rate.dropped("w")
    bench.rate.finished("w", 10)
    assert bench.rate.tokens_per_s is None


def test_a_pool_that_slows_down_is_followed_within_its_half_life():
    bench = Bench()
    for _ in range(60):
        bench.prompt(1000, 1.0)
    for _ in range(60):
        bench.prompt(100, 1.0)
    assert 100 < bench.rate.tokens_per_s < 400


def test_workers_are_measured_side_by_side():
    bench = Bench()
    bench.rate.begin("a", True)
    bench.rate.begin("b", True)
    bench.clock.now_s += 2
    bench.rate.finished("a", 400)
    bench.rate.finished("b", 400)
    assert bench.rate.tokens_per_s == pytest.approx(200, rel=0.05)


def test_workers_that_have_left_are_forgotten_and_the_rate_stays():
    bench = Bench()
    bench.prompt(400, 2, worker="a")
    bench.prompt(400, 2, worker="b")
    rate = bench.rate.tokens_per_s
    bench.rate.forget_all_but(["b"])
    assert list(bench.rate._counted_tokens) == ["b"]
    assert bench.rate.tokens_per_s == rate
