"""A tokenizer and the backend of grammars with it, without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
from ridgeline.engine.vllm_workarounds.bounded_grammars import BoundedGuidance

TEXT = Path(__file__).parents[4] / "loadtest" / "data" / "opticks.txt"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level pairs of a book, as the models' tokenizers have them."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    pairs = ByteLevelBPETokenizer()
    pairs.train_from_iterator(TEXT.read_text()[:200_000].splitlines(), vocab_size=2000, special_tokens=["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=pairs._tokenizer, eos_token="<eos>")


@pytest.fixture(scope="module")
def backend(tokenizer: Any) -> BoundedGuidance:
    options = SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False)
    config = SimpleNamespace(
        structured_outputs_config=options,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
        speculative_config=None,
    )
    return BoundedGuidance(config, tokenizer, len(tokenizer))
