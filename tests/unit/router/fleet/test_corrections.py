"""How predictions of prompts are corrected by what was seen."""

import pytest

from ridgeline.router.fleet.corrections import DOUBT, FADES_S, LATEST, MOST, Corrections
from tests.support.clock import FakeClock


class Seen:
    def __init__(self):
        self.clock = FakeClock()
        self.corrections = Corrections(self.clock)

    def add(self, ratio, predicted_s=1.0, beside=True, number=1, worker_id="w"):
        for _ in range(number):
            self.corrections.add(worker_id, beside=beside, predicted_s=predicted_s, took_s=ratio * predicted_s)

    def ratio(self, beside=True, worker_id="w"):
        return self.corrections.ratio(worker_id, beside=beside)


@pytest.fixture
def seen():
    return Seen()


def test_a_kind_is_corrected_by_what_its_prompts_took_and_no_other_kind_is(seen):
    seen.add(2.4, number=LATEST)
    assert seen.ratio() == pytest.approx(1 + 1.4 * LATEST / (LATEST + DOUBT))
    assert seen.ratio(beside=False) == seen.ratio(worker_id="another") == 1.0


def test_a_few_prompts_correct_little_and_fewer_than_three_nothing(seen):
    seen.add(2.5, number=2)
    assert seen.ratio() == 1.0
    seen.add(2.5)
    assert seen.ratio() == pytest.approx(1 + 1.5 * 3 / (3 + DOUBT))
    seen.add(1.0, predicted_s=0.0)
    assert seen.ratio() == pytest.approx(1.9), "what was predicted to take nothing says nothing"


@pytest.mark.parametrize("ordinary", [0, 2, 6])
def test_one_long_prompt_that_was_held_up_makes_no_prediction_longer(seen, ordinary):
    """It was predicted to take 1 s and took 30, after prompts of 20 ms: all of the worker's counted four times."""
    seen.add(1.0, predicted_s=0.02, number=ordinary)
    seen.add(30.0, predicted_s=1.0)
    assert seen.ratio() == 1.0


def test_a_minority_of_prompts_that_something_else_held_up_changes_nothing(seen):
    seen.add(1.0, number=9)
    seen.add(100.0, number=7)
    assert seen.ratio() == 1.0


def test_short_prompts_in_which_other_things_count_hardly_change_what_is_predicted_for_long_ones(seen):
    seen.add(1.1, predicted_s=1.0, number=2)
    seen.add(5.0, predicted_s=0.01, number=14)
    assert seen.ratio() < 1.1


def test_corrections_are_bounded_and_none_makes_a_prediction_shorter(seen):
    seen.add(1000.0, number=LATEST)
    assert seen.ratio() == MOST
    seen.add(0.1, number=LATEST)
    assert seen.ratio() == 1.0


def test_a_kind_without_news_is_predicted_as_at_first_after_a_minute_and_old_prompts_no_longer_count(seen):
    seen.add(3.0, number=LATEST)
    before = seen.ratio()
    seen.clock.now_s += FADES_S / 2
    assert seen.ratio() == pytest.approx(1 + (before - 1) / 2)
    seen.clock.now_s += FADES_S / 2
    assert seen.ratio() == 1.0
    seen.add(1.0)
    assert seen.ratio() == 1.0


def test_workers_that_have_left_are_forgotten(seen):
    for worker_id in ("w", "stays"):
        seen.add(3.0, worker_id=worker_id, number=4)
    seen.corrections.forget_all_but({"stays"})
    assert seen.ratio() == 1.0 < seen.ratio(worker_id="stays")
    assert seen.corrections.workers == 1


def outside(seen, took_s, *, beside, number=LATEST):
    for _ in range(number):
        seen.corrections.add_outside(beside=beside, took_s=took_s)


def test_what_passes_outside_of_the_engine_is_the_median_of_the_latest_whichever_worker_it_was(seen):
    outside(seen, 0.02, beside=False, number=2)
    assert seen.corrections.outside_s(beside=False) == 0.0, "two say nothing yet"
    outside(seen, 0.02, beside=False)
    outside(seen, 9.0, beside=False, number=LATEST // 2 - 1)
    assert seen.corrections.outside_s(beside=False) == 0.02


def test_without_news_of_its_own_a_kind_is_taken_to_pass_as_long_outside_as_the_other_one(seen):
    outside(seen, 0.02, beside=False)
    assert seen.corrections.outside_s(beside=True) == 0.02
    outside(seen, 0.05, beside=True)
    assert [seen.corrections.outside_s(beside=beside) for beside in (False, True)] == [0.02, 0.05]
    seen.clock.now_s += FADES_S + 1
    outside(seen, 0.03, beside=False)
    assert seen.corrections.outside_s(beside=True) == 0.03
    seen.clock.now_s += FADES_S + 1
    assert seen.corrections.outside_s(beside=False) == 0.03, "nothing better is known"
