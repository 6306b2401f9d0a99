"""Tells vLLM that a model of texts has no chat template beside its tokenizer's.

Before vLLM takes the tokenizer's, it asks transformers for the model's processor, for which transformers loads a second
tokenizer if there is none: a second of the start, when everything else is ready. vLLM remembers the answer, so it is
given here.
"""

from __future__ import annotations

from typing import Any

import vllm.renderers.hf
from vllm.config import ModelConfig
from vllm.transformers_utils.processor import get_processor_config


def note_that_there_is_no_processor(tokenizer: Any, model_config: ModelConfig) -> None:
    """Note it for a model that takes texts alone and whose files name no processor; leave every other to vLLM."""
    if tokenizer is None or model_config.is_multimodal_model or get_processor_config(model_config.tokenizer):
        return
    code_revision = model_config.code_revision if model_config.tokenizer == model_config.model else None
    key = (tokenizer.name_or_path, model_config.tokenizer_revision, code_revision, model_config.trust_remote_code)
    vllm.renderers.hf._PROCESSOR_CHAT_TEMPLATES.setdefault(key, None)
