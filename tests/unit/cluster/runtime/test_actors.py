"""An actor that is asked for news of its health, and what its process is told by the environment."""

import pytest

from ridgeline.cluster.runtime.actors import HOLD_S, LOOK_EVERY_S, engine_environment, other_than


class Clock:
    """Time passes only in `sleep`, which also makes the engine die when it is due."""

    def __init__(self, dies_at_s=float("inf")):
        self.now_s = 0.0
        self.dies_at_s = dies_at_s

    def __call__(self):
        return self.now_s

    async def sleep(self, seconds):
        self.now_s += seconds

    async def health(self):
        return "engine_died" if self.now_s >= self.dies_at_s else ""


@pytest.mark.parametrize(
    ("known", "dies_at_s", "answer", "after_s"),
    [
        (None, 60.0, "", 0.0),
        ("draining", 60.0, "", 0.0),
        ("", 0.7, "engine_died", 1.0),
        ("", 60.0, "", HOLD_S),
    ],
)
async def test_the_answer_comes_with_the_first_look_that_finds_news_or_when_there_is_none(
    known, dies_at_s, answer, after_s
):
    clock = Clock(dies_at_s)
    assert await other_than(known, clock.health, clock=clock, sleep=clock.sleep) == answer
    assert clock.now_s == after_s


def test_an_engine_that_died_is_found_within_half_a_second():
    assert LOOK_EVERY_S <= 0.5


def test_an_engine_on_cpus_compiles_if_it_was_asked_to():
    assert "TORCH_COMPILE_DISABLE" in engine_environment(1, 60, on_cpu=True)
    assert "TORCH_COMPILE_DISABLE" not in engine_environment(1, 60, on_cpu=True, compiles=True)


def test_an_engine_under_mps_is_told_its_share_of_the_gpu_and_others_are_not():
    share = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    assert engine_environment(4, 60, on_cpu=False, mps_percent=70)[share] == "70"
    assert share not in engine_environment(4, 60, on_cpu=False)
