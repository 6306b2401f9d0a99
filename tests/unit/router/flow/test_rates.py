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


def test_it_is_tokens_by_time_once_a_second_was_measured():
    bench = Bench()
    bench.prompt(100, 0.75)
    assert bench.rate.tokens_per_s is None
    bench.prompt(500, 0.75)
    assert bench.rate.tokens_per_s == pytest.approx(400, rel=0.02)


def test_a_short_prompt_that_ended_beside_the_first_chunk_of_a_long_one_does_not_make_the_pool_look_slow():
    bench = Bench()
    bench.prompt(10, 1.2)  # one step: these 10 tokens, and half a window of the long one
    assert bench.rate.tokens_per_s is None
    bench.prompt(290, 1.2)
    assert bench.rate.tokens_per_s == pytest.approx(125, rel=0.02)


def test_of_each_worker_several_windows_are_measured():
    bench = Bench()
    bench.prompt(300, 1.0, worker="a")
    assert bench.rate.tokens_per_s == pytest.approx(300)
    bench.prompt(10, 2.0, worker="b")
    assert bench.rate.tokens_per_s is None
    bench.prompt(290, 0.0, worker="b")
    assert bench.rate.tokens_per_s == pytest.approx(200, rel=0.02)


def test_prompts_that_end_in_one_step_count_together():
    bench = Bench()
    for _ in range(4):
        bench.prompt(100, 1.0)
        bench.prompt(100, 0.0)
    assert bench.rate.tokens_per_s == pytest.approx(200, rel=0.02)


def test_a_worker_with_little_to_do_is_not_measured():
    bench = Bench()
    bench.prompt(10, 5.0, full=False)
    assert bench.rate.tokens_per_s is None


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
