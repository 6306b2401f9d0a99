"""A router over HTTP with vLLM's app, and engines without a model that also give log-probabilities.

Import `fake_engine` before anything of vLLM.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import msgspec
from vllm.sampling_params import SamplingParams

from ridgeline.contracts.tasks import PositionLogprobs
from tests.support.fake_engine import FakeEngine
from tests.support.served_router import serving

WORDS = 1000
TEMPLATE = (
    "{% if documents %}w7 {% endif %}{% if tools %}w8 {% endif %}{% if reasoning_effort %}w9 {% endif %}"
    "{% if enable_thinking %}w10 {% endif %}{% if extra %}w11 {% endif %}"
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def make_model(directory: Path) -> None:
    """Write configuration and tokenizer of a model without weights, with a chat template that shows its inputs."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    names = {"<eos>": 0, "user": 1, "assistant": 2, "system": 3, "<bos>": 4}
    words = Tokenizer(models.WordLevel({**names, **{f"w{i}": i for i in range(5, WORDS)}}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<bos>", special=True)])
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 4)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", bos_token="<bos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=WORDS,
        max_position_embeddings=4096,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        eos_token_id=0,
    ).save_pretrained(directory)


class TalkingEngine(FakeEngine):
    """Also gives log-probabilities if asked for them."""

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, **options: Any
    ) -> Any:
        wanted = params.logprob_token_ids or list(range(params.logprobs or 0))
        prompt_wanted = params.prompt_logprobs
        async for delta in super().generate(request_id, prompt_token_ids, params, **options):
            if params.num_logprobs is not None:
                told = [_position(token, wanted) for token in delta.token_ids]
                delta = msgspec.structs.replace(delta, logprobs=told)
            if prompt_wanted is not None and delta.token_ids:
                told = [None, *(_position(token, range(prompt_wanted)) for token in prompt_token_ids[1:])]
                delta, prompt_wanted = msgspec.structs.replace(delta, prompt_logprobs=told), None
            yield delta


def _position(token: int, others: Any) -> PositionLogprobs:
    return PositionLogprobs([token, *others], [-0.5, *(-1.0 - other for other in others)], 1)


@asynccontextmanager
async def talking_router(model: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Any, list[TalkingEngine]]]:
    """Yield (HTTP client, vLLM's app, prefill and decode engine)."""
    from ridgeline.router.front.vllm_workarounds import app_gaps

    engines, apps, installed = (TalkingEngine("prefill"), TalkingEngine("decode")), [], app_gaps.install
    for engine in engines:
        engine.num_kv_blocks = 10_000
    with patch("ridgeline.router.front.app.app_gaps.install", lambda app: (installed(app), apps.append(app))):
        async with serving(model, engines, max_concurrent_requests=64) as (http, *_):
            yield http, apps[0], [*engines]
