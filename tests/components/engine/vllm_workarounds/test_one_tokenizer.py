"""The tokenizer of an engine's front end: vLLM's renderer copies it, unless it is told not to."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.renderers.hf import HfRenderer
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

from ridgeline.engine.vllm_workarounds.engine_process import one_tokenizer


@pytest.fixture
def rendered():
    """Make vLLM's renderer for a small tokenizer; returns the tokenizer that it holds."""
    made = []

    def make():
        model_config = SimpleNamespace(renderer_num_workers=1, hf_config=None, supports_multimodal_inputs=False)
        config = SimpleNamespace(model_config=model_config, parallel_config=SimpleNamespace(_api_process_rank=0))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
        made.append(HfRenderer(config, tokenizer))
        return made[-1].tokenizer

    yield make
    for renderer in made:
        renderer.shutdown()


def test_a_front_end_keeps_its_tokenizer_which_still_works(rendered):
    with one_tokenizer():
        tokenizer = rendered()
    assert not isinstance(tokenizer, ThreadSafeHFTokenizerMixin)
    assert tokenizer.convert_tokens_to_ids(["b", "a"]) == [1, 0]


def test_every_other_renderer_has_its_copies(rendered):
    with one_tokenizer():
        pass
    assert isinstance(rendered(), ThreadSafeHFTokenizerMixin)
