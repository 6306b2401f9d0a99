"""LoRA adapters served by real engines: each answer is that of the model with the adapter added to its weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from ridgeline.cluster.model_store import prepare_model
from tests.engines.served import SMALL_SPLIT, Deployed, Stream, deployed_by_serve
from tests.engines.tiny_model import make_tiny_model
from tests.support.adapter_files import RANK, make_adapter

pytestmark = [pytest.mark.engines, pytest.mark.core]
NAME = "smollm2-135m"
"""The name by which the harness asks for the model; the model is a tiny one."""
LENGTHS = (20, 70, 200, 300)
"""Less than a block, some blocks, two steps of prefill, three."""
NUM_TOKENS = 8
SMALL = ("kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens")
SEEDS = {"one": 1, "two": 2, "changed": 3}


class Adapted:
    """A deployment with adapters, and what each of its models must answer."""

    def __init__(self, deployed: Deployed, folder: Path, merged: dict[str, LlamaForCausalLM]) -> None:
        self.deployed, self.folder, self._merged = deployed, folder, merged
        self.expected = cache(self._greedy)
        self.http = httpx.Client(base_url=deployed.url, timeout=200)

    def prompts(self, seed: int) -> list[tuple[int, ...]]:
        draw = random.Random(seed)
        return [tuple(draw.randrange(300, 40_000) for _ in range(length)) for length in LENGTHS]

    def _greedy(self, weights: str, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> list[int]:
        tokens = torch.tensor([prompt])
        greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": num_tokens}
        made = self._merged[weights].generate(tokens, attention_mask=torch.ones_like(tokens), **greedy)
        token_ids: list[int] = made[0, len(prompt) :].tolist()
        return token_ids

    def answer(self, model: str, prompt: tuple[int, ...]) -> list[int]:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        # A prompt's log-probabilities beside other adapters have ended engines. They read no cached KV, so not for all.
        more: dict[str, Any] = {"return_token_ids": True, **({"prompt_logprobs": 0} if model == "one" else {})}
        reply = self.http.post("/v1/completions", json={**body, **more})
        assert reply.status_code == 200, reply.text
        token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return token_ids

    def together(self, models: dict[str, str], prompts: list[tuple[int, ...]]) -> None:
        """All prompts to all models at once; `models` has the weights that each name stands for."""
        asked = [(name, prompt) for prompt in prompts for name in models]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda one: self.answer(*one), asked))
        for (name, prompt), answer in zip(asked, answers, strict=True):
            assert answer == self.expected(models[name], prompt), (name, len(prompt))

    def operate(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("lora")
    torch.set_num_threads(1)  # the engines have the cores
    tokenizer = AutoTokenizer.from_pretrained(prepare_model(NAME))
    path = make_tiny_model(folder / "model", tokenizer, "float32", 1024)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    merged = {"model": model, **{name: make_adapter(folder / name, model, seed) for name, seed in SEEDS.items()}}
    settings = {
        **SMALL_SPLIT,
        "model.path": str(path),
        "model.served_model_name": NAME,
        "engine_args.enable_lora": "true",
        "engine_args.max_loras": "2",
        "engine_args.max_lora_rank": str(RANK),
        "server_args.lora_modules": f"[one={folder / 'one'}]",
        **{f"pools.colocated.{name}": SMALL_SPLIT[f"pools.decode.{name}"] for name in SMALL},
    }
    with deployed_by_serve(settings=settings) as deployed:
        adapted = Adapted(deployed, folder, merged)
        with adapted.http:
            yield adapted


@pytest.mark.proves(
    ("LoRA adapters from the start", "LoRA adapters at run time"), ("colocated", "adaptive", "disaggregated")
)
def test_adapters_and_the_model_answer_side_by_side_in_every_mode_and_a_reload_meets_no_old_kv(adapted: Adapted):
    two = adapted.folder / "two"
    loaded = adapted.operate("/v1/load_lora_adapter", lora_name="two", lora_path=str(two))
    assert loaded.status_code == 200, loaded.text
    models = {NAME: "model", "one": "one", "two": "two"}
    for seed, mode in enumerate(("colocated", "adaptive", "disaggregated")):
        assert adapted.operate("/ridgeline/mode", mode=mode).status_code == 200
        adapted.together(models, adapted.prompts(seed))
    weights = (adapted.folder / "changed" / "adapter_model.safetensors").read_bytes()
    (two / "adapter_model.safetensors").write_bytes(weights)
    adapted.together(models, adapted.prompts(2))  # nobody has loaded it
    reloaded = adapted.operate("/v1/load_lora_adapter", lora_name="two", lora_path=str(two), load_inplace=True)
    assert reloaded.status_code == 200, reloaded.text
    adapted.together({**models, "two": "changed"}, adapted.prompts(2))
    assert adapted.operate("/v1/unload_lora_adapter", lora_name="two").status_code == 200
    refused = adapted.http.post("/v1/completions", json={"model": "two", "prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.proves(("LoRA adapters from the start", "LoRA adapters at run time"), "after a lost worker")
@pytest.mark.long
def test_answers_go_on_with_their_adapters_when_their_worker_is_lost(adapted: Adapted):
    loaded = adapted.operate("/v1/load_lora_adapter", lora_name="later", lora_path=str(adapted.folder / "changed"))
    assert loaded.status_code == 200, loaded.text
    prompt, num_tokens = adapted.prompts(7)[1], 300
    wish = {"prompt": prompt, "temperature": 0, "return_token_ids": True}
    streams = {name: Stream(adapted.deployed.url, num_tokens, model=name, **wish) for name in ("one", "later")}
    worker = adapted.deployed.busy_decode()
    adapted.deployed.engine(worker).kill()
    weights = {NAME: "model", "one": "one", "later": "changed"}
    for name, stream in streams.items():
        answer = [token for event in stream.events() for choice in event["choices"] for token in choice["token_ids"]]
        assert answer == adapted.expected(weights[name], prompt, num_tokens)
    adapted.deployed.back(worker)
    adapted.together(weights, adapted.prompts(8))
