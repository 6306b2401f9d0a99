"""A sequence whose prompt is not complete loses its token, and its random generator must be where it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample import sampler as vllm_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from ridgeline.engine.vllm_workarounds.model_runner import keep_rows_apart, put_generators_back
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly


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


# --- log-probabilities that were asked for


VOCABULARY = 9
LOGITS = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(4))
LIKELIEST = 2
"""What request 0 asks for; request 1 names ids; request 2 wants none."""


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch):
    def count(values: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        return (values >= least).sum(-1)

    monkeypatch.setattr(vllm_sampler, "batched_count_greater_than", count)  # else it is compiled, for 20 s


def table(asked: dict[int, list[int]] | None, likeliest: int | None) -> LogprobsTensors:
    sampler = vllm_sampler.Sampler()
    keep_rows_apart(SimpleNamespace(sampler=sampler, input_batch=SimpleNamespace(max_num_logprobs=likeliest)))
    zeros = torch.zeros(len(LOGITS))
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=likeliest,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros,
        output_token_ids=[[] for _ in LOGITS],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        logprob_token_ids=asked,
    )
    tensors = sampler(LOGITS.clone(), metadata).logprobs_tensors
    assert tensors is not None
    return tensors


@pytest.mark.parametrize("ids", [[5], [8, 1], [8, 1, 0, 3]], ids=len)
def test_who_asks_for_the_likeliest_tokens_gets_them_beside_one_that_names_ids(ids: list[int]):
    alone = table(None, LIKELIEST)
    named = table({1: ids}, None)
    both = table({1: ids}, LIKELIEST)
    for got, expected, row in ((both, alone, 0), (both, named, 1), (both, alone, 2)):
        width = expected.logprobs.shape[1]
        assert got.logprob_token_ids[row, :width].tolist() == expected.logprob_token_ids[row].tolist()
        assert torch.equal(got.logprobs[row, :width], expected.logprobs[row])
        assert got.selected_token_ranks[row] == expected.selected_token_ranks[row] == 1
        assert torch.isneginf(got.logprobs[row, width:]).all()


def test_without_named_ids_nothing_changes():
    assert table(None, LIKELIEST).logprobs.shape == (3, LIKELIEST + 1)
    assert table({1: [4]}, None).logprobs.shape == (3, 2)
