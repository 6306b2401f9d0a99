"""A sequence whose prompt is not complete loses its token, and its random generator must be where it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from vllm.platforms import current_platform
from vllm.utils.cpu_triton_utils import _rejection_greedy_sample_kernel_impl
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample import sampler as vllm_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode import ngram_proposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from ridgeline.engine.vllm_workarounds.model_runner import compile_drafts, keep_rows_apart, put_generators_back
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


def wishes(asked: dict[int, list[int]] | None, likeliest: int | None, sequences: int = len(LOGITS)) -> SamplingMetadata:
    zeros = torch.zeros(sequences)
    return SamplingMetadata(
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
        output_token_ids=[[] for _ in zeros],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        logprob_token_ids=asked,
    )


def table(asked: dict[int, list[int]] | None, likeliest: int | None) -> LogprobsTensors:
    sampler = vllm_sampler.Sampler()
    keep_rows_apart(SimpleNamespace(sampler=sampler, input_batch=SimpleNamespace(max_num_logprobs=likeliest)))
    tensors = sampler(LOGITS.clone(), wishes(asked, likeliest)).logprobs_tensors
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


DRAFTED = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(5))
"""Two sequences with a draft each, which the first one's row takes and the second one's does not."""


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch):
    """As vLLM chooses for an engine's process: its kernel in C++ in place of the one for GPUs."""
    if not current_platform.is_cpu():
        pytest.skip("needs vLLM's build for CPUs")
    current_platform.import_kernels()
    kernel = _rejection_greedy_sample_kernel_impl
    monkeypatch.setattr(kernel, "register_warmup", lambda **_: None, raising=False)
    monkeypatch.setattr(rejection_sampler, "_rejection_greedy_sample", kernel)


def drafted_table(asked: dict[int, list[int]] | None, likeliest: int | None, *, mended: bool) -> LogprobsTensors | None:
    rejection = rejection_sampler.RejectionSampler(vllm_sampler.Sampler())
    batch = SimpleNamespace(max_num_logprobs=likeliest)
    if mended:
        keep_rows_apart(SimpleNamespace(sampler=rejection.sampler, rejection_sampler=rejection, input_batch=batch))
    best = DRAFTED.argmax(-1)
    drafts = SpecDecodeMetadata.make_dummy([[int(best[0])], [int(best[2] + 1) % VOCABULARY]], torch.device("cpu"))
    drafts.target_logits_indices, drafts.bonus_logits_indices = torch.tensor([0, 2]), torch.tensor([1, 3])
    tensors: LogprobsTensors | None = rejection(
        drafts, None, DRAFTED.clone(), wishes(asked, likeliest, sequences=2)
    ).logprobs_tensors
    return tensors


@pytest.mark.usefixtures("on_cpu")
def test_vllm_makes_no_rows_of_named_ids_for_drafts_and_fails_beside_one_who_asks_for_the_likeliest():
    assert drafted_table({1: [8, 1]}, None, mended=False) is None
    with pytest.raises(RuntimeError):
        drafted_table({1: [8, 1]}, LIKELIEST, mended=False)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("likeliest", [LIKELIEST, None])
def test_drafted_tokens_have_the_named_ids_and_others_the_likeliest(likeliest: int | None):
    got = drafted_table({1: [8, 1]}, likeliest, mended=True)
    logprobs = DRAFTED.log_softmax(-1)
    assert got is not None
    assert got.logprob_token_ids[2].tolist() == [int(DRAFTED[2].argmax()), 8, 1]
    assert torch.allclose(got.logprobs[2, 1:], logprobs[2, [8, 1]])
    for row in (0, 1) if likeliest else ():
        best = logprobs[row].topk(LIKELIEST)
        assert got.logprob_token_ids[row, 1:].tolist() == best.indices.tolist()
        assert torch.allclose(got.logprobs[row, 1:], best.values)


LENGTH, SEQUENCES = 2048, 4


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner with vLLM's look-up of n-grams, which nothing has compiled yet."""
    monkeypatch.setattr(
        ngram_proposer, "batch_propose_numba", njit(parallel=True)(ngram_proposer.batch_propose_numba.py_func)
    )
    lookup = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3}
    speculation = SimpleNamespace(**lookup)
    config: Any = SimpleNamespace(
        speculative_config=speculation,
        model_config=SimpleNamespace(max_model_len=LENGTH),
        scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    batch = SimpleNamespace(
        num_tokens_no_spec=np.zeros(SEQUENCES, dtype=np.int32),
        token_ids_cpu=np.zeros((SEQUENCES, LENGTH), dtype=np.int32),
    )
    drafter = ngram_proposer.NgramProposer(config)
    return SimpleNamespace(drafter=drafter, input_batch=batch, speculative_config=speculation)


def test_vllm_compiles_the_look_up_of_n_grams_in_a_step(drafting: Any):
    assert ngram_proposer.batch_propose_numba.signatures == []


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")
def test_the_look_up_of_n_grams_is_compiled_before_the_first_step(drafting: Any):
    compile_drafts(drafting)
    compiled = [*ngram_proposer.batch_propose_numba.signatures]
    assert len(compiled) == 1
    batch = drafting.input_batch
    batch.token_ids_cpu[0, :5], batch.num_tokens_no_spec[0] = [7, 8, 9, 7, 8], 5
    assert drafting.drafter.propose(3, [[8]], batch.num_tokens_no_spec, batch.token_ids_cpu) == [[9, 7, 8]]
    assert ngram_proposer.batch_propose_numba.signatures == compiled
