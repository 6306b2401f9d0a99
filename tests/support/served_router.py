"""The real router with vLLM's real app, over a real socket and real gRPC, with two fake engines."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from prometheus_client import CollectorRegistry

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.fake_engine import FakeEngine
from tests.support.patience import PATIENCE_S
from tests.support.samples import router_settings

WORDS = 200


def make_model(directory: Path) -> None:
    """Write configuration and tokenizer of a model without weights, in which each word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0, **{f"w{i}": i for i in range(1, WORDS)}}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(directory)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=WORDS,
        max_position_embeddings=4096,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
    ).save_pretrained(directory)


@asynccontextmanager
async def serving(
    model: Path,
    engines: tuple[FakeEngine, FakeEngine] | None = None,
    *,
    workers_host: str = "127.0.0.1",
    registry: CollectorRegistry | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, Any, FakeEngine, FakeEngine]]:
    """Yield (HTTP client, router, prefill engine, decode engine). By default prefill steps only when told to.

    Its series are in `registry`, or one of their own: elsewhere a process has one router.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ridgeline.router.server import Router
    engines = engines or (FakeEngine("prefill", stepping="manual"), FakeEngine("decode", stepping="auto"))
    for engine in engines:
        engine.config = replace(engine.config, transfer=TransferOptions(workers_host))
    hosts = [WorkerHost(engines[0], HANDLERS), WorkerHost(engines[1], HANDLERS)]
    for host in hosts:
        await host.start()
    try:
        with warnings.catch_warnings(), patch("ridgeline.router.server.REGISTRY", registry or CollectorRegistry()):
            warnings.simplefilter("ignore")
            router = Router(router_settings(model_path=str(model), **settings))
            url = await router.serve([host.address for host in hosts], {})
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            yield http, router, engines[0], engines[1]
        if not router.ended:
            await router.stop()
    finally:
        for host in hosts:
            await host.stop()
