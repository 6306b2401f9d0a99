"""A sequence whose prompt is not complete loses its token, and its random generator must be where it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.engine.vllm_workarounds.model_runner import put_generators_back


def generator(seed: int) -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(seed)
    return made


class Runner:
    """The parts of vLLM's runner that matter: it samples for everybody, then winds back as vLLM does."""

    device = "cpu"

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(num_reqs=3, generators={0: generator(1), 2: generator(2)})
        self.discard_request_mask = SimpleNamespace(np=np.array([True, True, False, True]))

    def _sample(self) -> dict[int, float]:
        generators = self.input_batch.generators
        return {index: float(torch.rand(1, generator=one)) for index, one in generators.items()}

    def _bookkeeping_sync(self, answer: str) -> str:
        for index in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
            one: Any = self.input_batch.generators.get(int(index))
            if one is not None:
                one.set_offset(one.get_offset() - 4)
        return answer


def test_vllm_cannot_wind_a_cpu_generator_back():
    with pytest.raises(RuntimeError, match="offset"):
        Runner()._bookkeeping_sync("")


def test_an_unfinished_prompt_draws_the_same_again_and_a_finished_one_goes_on():
    runner = Runner()
    generators = runner.input_batch.generators
    put_generators_back(runner)
    first = runner._sample()
    assert runner._bookkeeping_sync("done") == "done"
    second = runner._sample()
    assert second[0] == first[0]
    assert second[2] != first[2]
    assert runner.input_batch.generators is generators


def test_a_gpu_runner_is_left_as_it_is():
    runner = Runner()
    runner.device = "cuda"
    put_generators_back(runner)
    assert "_sample" not in vars(runner)
