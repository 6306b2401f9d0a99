"""vLLM's real scheduler, without a model: steps take the time that a line gives them, and tokens come from nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
import msgspec
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding

from ridgeline.contracts.workers import StepModel
from ridgeline.kv_transfer.options import TransferOptions

BLOCK_TOKENS = 32
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
MACHINE = StepModel(
    base_s=0.05,
    per_prefill_token_s=0.004,
    per_sequence_s=0.001,
    per_context_token_s=1e-6,
    per_attended_token_s=1e-6,
)


CONNECTOR = KVTransferConfig(
    kv_connector="RidgelineConnector",
    kv_connector_module_path="ridgeline.engine.connector.kv_connector",
    kv_role="kv_both",
    kv_load_failure_policy="recompute",
    kv_connector_extra_config={
        "transfer": msgspec.to_builtins(TransferOptions(host="127.0.0.1", transport="grpc", lease_s=30.0)),
        "hands_over": True,
        "share_kv_cache": False,
        "step_target_s": 0.0,
    },
)


class Stepping:
    """One scheduler and the requests that were given to it."""

    def __init__(self, scheduler: Any, clock: SimpleNamespace, machine: StepModel, accepted: int = 0) -> None:
        self.scheduler = scheduler
        self.accepted = accepted
        """Of the drafts of a sequence in a step; the rest is rejected."""
        self.machine = machine
        self.tokens: dict[str, list[float]] = {}
        """When each token of a request came."""
        self.steps: list[dict[str, int]] = []
        """The tokens that each step computed, by request."""
        self.times_s: list[float] = []
        self._clock = clock
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._in_flight: list[tuple[Any, float]] = []

    @property
    def now_s(self) -> float:
        return float(self._clock.now_s)

    def request(self, name: str, prompt_tokens: int, max_tokens: int = 20, **extra: Any) -> Request:
        """A request whose prompt no other one begins with."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None)
        params.update_from_generation_config({}, eos_token_id=0)
        seed = sum(map(ord, name))
        prompt = [(seed * 31 + position) % 997 for position in range(prompt_tokens)]
        return Request(name, prompt, params, None, block_hasher=self._hasher)

    def add(self, name: str, prompt_tokens: int, max_tokens: int = 20, **extra: Any) -> Request:
        request = self.request(name, prompt_tokens, max_tokens, **extra)
        self.scheduler.add_request(request)
        self.tokens[name] = []
        return request

    def join(self, name: str, prompt_tokens: int, max_tokens: int = 20, **extra: Any) -> Request:
        """Add a request whose KV has been transferred, as vLLM's queue then holds it."""
        request = self.add(name, prompt_tokens, max_tokens, **extra)
        self.scheduler.waiting.remove_request(request)
        assert self.scheduler.kv_cache_manager.allocate_slots(request, prompt_tokens) is not None
        request.num_computed_tokens = prompt_tokens - 1
        self.scheduler._enqueue_waiting_request(request)
        return request

    def step(self) -> dict[str, int]:
        """Run one step; returns what it computed."""
        self.begin()
        return self.end()

    def begin(self) -> None:
        """Schedule a step; another one may be in flight."""
        scheduled = self.scheduler.schedule()
        self._in_flight.append((scheduled, self._step_s(scheduled)))

    def end(self) -> dict[str, int]:
        """Let the oldest step end."""
        scheduled, took_s = self._in_flight.pop(0)
        self._clock.now_s += took_s
        self.times_s.append(took_s)
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            done = request is not None and request.num_computed_tokens >= request.num_tokens
            drafts = strip_speculative_padding(scheduled.scheduled_spec_decode_tokens.get(name, []))
            made = [7] * (1 + min(self.accepted, len(drafts))) if done else []
            sampled.append(made)
            self.tokens[name] += [self.now_s] * len(made)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        self.scheduler.update_from_output(scheduled, output)
        if drafted := self.scheduler.num_spec_tokens:
            decoding = [name for name, made in zip(names, sampled, strict=True) if made]
            self.scheduler.update_draft_token_ids(DraftTokenIds(decoding, [[7] * drafted for _ in decoding]))
        self.steps.append(dict(scheduled.num_scheduled_tokens))
        return self.steps[-1]

    def _step_s(self, scheduled: Any) -> float:
        prefill = decode = context = 0
        attended = 0.0
        for name, tokens in scheduled.num_scheduled_tokens.items():
            before = self.scheduler.requests[name].num_computed_tokens - tokens
            if tokens <= 1 + self.scheduler.num_spec_tokens:
                decode, context = decode + tokens, context + before
            else:
                prefill, attended = prefill + tokens, attended + tokens * (before + tokens / 2)
        return self.machine.step_s(prefill, decode, context, attended) if prefill + decode else 0.0

    def run(self, most_steps: int = 2000) -> None:
        """Run until nothing is left."""
        for _ in range(most_steps):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("it does not end")


def make(
    scheduler_class: type[Any],
    directory: Path,
    patch: pytest.MonkeyPatch,
    *,
    num_blocks: int = 2000,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 16,
    machine: StepModel = MACHINE,
    hands_over: bool = False,
    drafted: int = 0,
    accepted: int = 0,
) -> Stepping:
    """Make a scheduler whose clock stands still but for its steps; `directory` gets the shape of a model.

    With `hands_over` it has our connector's scheduler side. Of `drafted` tokens a step `accepted` ones are.
    """
    (directory / "config.json").write_text(json.dumps(SHAPE))
    init_none_hash(sha256)
    config = EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=4096,
        block_size=BLOCK_TOKENS,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=1 << 20,
        kv_transfer_config=CONNECTOR if hands_over else None,
        speculative_config={"method": "ngram", "num_speculative_tokens": drafted} if drafted else None,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)]
    )
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = lambda: clock.now_s
    patch.setattr("ridgeline.engine.step_scheduler.time", clock)
    scheduler = scheduler_class(config, cache, StructuredOutputManager(config), block_size=BLOCK_TOKENS, log_stats=True)
    return Stepping(scheduler, clock, machine, accepted)
