"""The default model as the package index has it becomes one that loads. Slow, so not among the unit tests."""

import pytest
from transformers import AutoConfig, AutoTokenizer

from ridgeline.cluster.model_store import prepare_model


@pytest.mark.engines
def test_the_converted_default_model_loads_with_its_chat_template():
    path = prepare_model("smollm2-135m")  # `make model` has converted it, or this does
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert AutoConfig.from_pretrained(path).architectures == ["LlamaForCausalLM"]
    assert (tokenizer.eos_token, len(tokenizer)) == ("<|im_end|>", 49152)
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n" in text
    assert (path / "model.safetensors").stat().st_size == pytest.approx(269e6, rel=0.01)
