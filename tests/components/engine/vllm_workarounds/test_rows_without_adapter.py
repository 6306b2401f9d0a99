"""On CPUs an adapter adds nothing to the rows of other sequences."""

from types import SimpleNamespace

import pytest
import torch

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

RANK, WIDTH, TOKENS = 4, 6, 3
INDICES = [0, -1, 1]


@pytest.fixture
def linear(monkeypatch):
    """One layer with two adapters, computed by vLLM as a step of prompts or of decoding; vLLM's own functions again."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    from ridgeline.engine.vllm_workarounds.rows_without_adapter import EXPANDING

    for name in EXPANDING:
        for module in (lora_ops, punica_cpu):
            monkeypatch.setattr(module, name, getattr(lora_ops, name))
    torch.manual_seed(1)
    x, a, b = torch.randn(TOKENS, WIDTH), torch.randn(2, 1, RANK, WIDTH), torch.randn(2, 1, WIDTH, RANK)
    expected = torch.stack(
        [torch.zeros(WIDTH) if at < 0 else b[at, 0] @ (a[at, 0] @ x[row]) for row, at in enumerate(INDICES)]
    )

    def compute(*, is_prefill: bool):
        wrapper = punica_cpu.PunicaWrapperCPU(TOKENS, TOKENS, "cpu")
        ids = tuple(at + 1 for at in INDICES)
        wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=is_prefill), [1, 2], 2, 100)
        y = torch.zeros(TOKENS, WIDTH)
        wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (WIDTH,))
        return y

    return compute, expected


@pytest.mark.parametrize("is_prefill", [True, False])
def test_vllm_gives_the_last_adapter_to_rows_that_have_none(linear, is_prefill):
    compute, expected = linear
    y = compute(is_prefill=is_prefill)
    assert torch.allclose(y[0], expected[0], atol=1e-5)
    assert not torch.allclose(y[1], expected[1], atol=1e-5)


@pytest.mark.parametrize("is_prefill", [True, False])
def test_with_the_workaround_it_gives_them_none(linear, is_prefill):
    from ridgeline.engine.vllm_workarounds.rows_without_adapter import keep_adapters_apart

    compute, expected = linear
    keep_adapters_apart()
    keep_adapters_apart()
    assert torch.allclose(compute(is_prefill=is_prefill), expected, atol=1e-5)


class Model(torch.nn.Module):
    """Ends in vLLM's layer for adapters of the logits, of which each sequence of the step has another."""

    def __init__(self):
        from vllm.lora.layers import LogitsProcessorWithLoRA, LoRAMapping
        from vllm.lora.punica_wrapper import punica_cpu

        super().__init__()
        self.punica = punica_cpu.PunicaWrapperCPU(TOKENS * 2, TOKENS * 2, "cpu")
        self.punica.update_metadata(LoRAMapping((1,) * TOKENS + (2,) * TOKENS, (1, 2), is_prefill=True), [1, 2], 2, 100)
        self.head = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
        torch.nn.Module.__init__(self.head)
        self.head.punica_wrapper = self.punica
        torch.manual_seed(1)
        self.a, self.b = torch.randn(2, 1, RANK, WIDTH), torch.randn(2, 1, WIDTH, RANK)

    def compute_logits(self, rows):
        logits = torch.zeros(len(rows), WIDTH)
        self.punica.add_lora_logits(logits, rows, self.a, self.b, 1.0)
        return logits

    def expected(self, rows, adapter):
        return rows @ self.a[adapter, 0].T @ self.b[adapter, 0].T


def runner_of(model):
    """vLLM's, as far as it computes a prompt's logits: those of the second sequence."""
    prompt = slice(TOKENS, 2 * TOKENS)
    return SimpleNamespace(model=model, _get_prompt_logprobs_dict=lambda states: model.compute_logits(states[prompt]))


def test_vllm_cannot_compute_a_prompts_logits_beside_another_sequence():
    runner = runner_of(Model())
    with pytest.raises(RuntimeError):
        runner._get_prompt_logprobs_dict(torch.randn(2 * TOKENS, WIDTH))


def test_with_the_workaround_a_prompt_has_its_own_adapter_and_the_sampled_rows_have_theirs():
    from ridgeline.engine.vllm_workarounds.rows_without_adapter import give_prompts_their_adapters

    model, states = Model(), torch.randn(2 * TOKENS, WIDTH)
    runner = runner_of(model)
    give_prompts_their_adapters(runner)
    logits = runner._get_prompt_logprobs_dict(states)
    assert torch.allclose(logits, model.expected(states[TOKENS:], 1), atol=1e-4)
    sampled = model.compute_logits(states[[TOKENS - 1, -1]])
    assert torch.allclose(sampled[0], model.expected(states[TOKENS - 1], 0), atol=1e-4)
    assert torch.allclose(sampled[1], model.expected(states[-1], 1), atol=1e-4)
