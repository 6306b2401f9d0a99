"""An engine whose model hashes what it reads: vLLM's real scheduler, our connector, real transfers, no weights.

The model reads and writes the KV blocks through its block tables, so a block that is missing, stale, zeroed or in the
wrong place changes every later token.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tests.support.patience import PATIENCE_S
from tests.support.stepping_scheduler import BLOCK_TOKENS, CONNECTOR, SHAPE

# isort: split
import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from ridgeline.contracts.handoff import new_handoff_id
from ridgeline.engine.connector.groups import CacheGroups, regions
from ridgeline.engine.connector.messages import TRANSFER_EVENTS
from ridgeline.engine.connector.worker_side import WorkerSide
from ridgeline.engine.step_scheduler import BoundedScheduler
from ridgeline.engine.vllm_workarounds.core_loop import OFFER
from ridgeline.kv_transfer.memory.shared import KvCacheAllocation
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.service import RankLayers
from tests.support.samples import kv_layout

STEP_TOKENS: Final = 256
LONGEST_TOKENS: Final = 1024
PAGE_BYTES: Final = 2 * 2 * 16 * 4 * BLOCK_TOKENS
STALE: Final = 0xDEAD
_numbers = itertools.count()


def full(block: int = BLOCK_TOKENS) -> FullAttentionSpec:
    return FullAttentionSpec(**_shape(block))


def window(block: int = BLOCK_TOKENS, tokens: int = 128) -> SlidingWindowSpec:
    return SlidingWindowSpec(**_shape(block), sliding_window=tokens)


def chunk(block: int = BLOCK_TOKENS, tokens: int = 128) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(**_shape(block), attention_chunk_size=tokens)


def state(block: int = BLOCK_TOKENS, mode: str = "align") -> MambaSpec:
    shapes: Any = ((PAGE_BYTES // 4,),)
    return MambaSpec(shapes=shapes, dtypes=(torch.float32,), block_size=block, mamba_cache_mode=mode)


def uncached(spec: Any) -> Any:
    """The same layer in an engine without prefix caching, where a state is not kept by block."""
    return state(LONGEST_TOKENS, "none") if isinstance(spec, MambaSpec) else spec


def _shape(block: int) -> dict[str, Any]:
    size = 16 * BLOCK_TOKENS // block
    return {"block_size": block, "num_kv_heads": 2, "head_size": size, "dtype": torch.float32}


def mix(*values: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")


class HashingEngine:
    """One engine; it has an end of the hand-off if `transport` is given."""

    def __init__(
        self,
        directory: Path,
        specs: Sequence[Any],
        *,
        transport: str = "",
        num_blocks: int = 400,
        prefix_caching: bool = True,
        step_tokens: int = STEP_TOKENS,
        lease_s: float = 30.0,
        longest_tokens: int = LONGEST_TOKENS,
    ) -> None:
        self.specs = specs
        self._longest_tokens = longest_tokens
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, dict[str, Any]] = {}
        self.preempted = 0
        self.zeroed_under_a_load = 0
        """Blocks that vLLM zeroed while a fetch filled them."""
        self.events: list[dict[str, Any]] = []
        self.offered: list[int] = []
        """How many blocks of a prompt each step offered before it was computed."""
        self._worker: WorkerSide | None = None
        self._cache = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[
                KVCacheTensor(num_blocks * PAGE_BYTES, [f"layer.{n}"], num_blocks * PAGE_BYTES, PAGE_BYTES)
                for n in range(len(specs))
            ],
            kv_cache_groups=[KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)],
        )
        allocation = KvCacheAllocation()
        with allocation.serving_torch_zeros():
            raw = torch.zeros(max(num_blocks * PAGE_BYTES, 1 << 20), dtype=torch.int8, device="cpu")
        self.slots = raw.numpy().view(np.uint64)[: num_blocks * PAGE_BYTES // 8].reshape(num_blocks, -1)
        self._make_scheduler(directory, bool(transport), prefix_caching, step_tokens)
        if transport:
            groups, rows = CacheGroups(self._cache), regions({"layer.0": raw}, self._cache)
            layout = kv_layout(
                groups=groups.layers, num_layers=len(rows), block_bytes=PAGE_BYTES, block_size=BLOCK_TOKENS
            )
            options = TransferOptions(host="127.0.0.1", transport=transport, lease_s=lease_s)
            self._worker = WorkerSide(RankLayers(rows, layout, allocation.offer(list(rows.values()))), options)
            self.scheduler.connector.set_xfer_handshake_metadata({0: self._worker.endpoint})
        self.slots[1:] = STALE

    def _make_scheduler(self, directory: Path, hands_over: bool, prefix_caching: bool, step_tokens: int) -> None:
        (directory / "config.json").write_text(json.dumps({**SHAPE, "max_position_embeddings": self._longest_tokens}))
        init_none_hash(sha256)
        config = EngineArgs(
            model=str(directory),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=self._longest_tokens,
            block_size=BLOCK_TOKENS,
            max_num_seqs=32,
            max_num_batched_tokens=step_tokens,
            enable_prefix_caching=prefix_caching,
            kv_cache_memory_bytes=1 << 20,
            kv_transfer_config=CONNECTOR if hands_over else None,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = self._cache.num_blocks
        config.cache_config.block_size = max(spec.block_size for spec in self.specs)
        if any(isinstance(spec, MambaSpec) for spec in self.specs):
            config.cache_config.mamba_cache_mode = "align" if prefix_caching else "none"
            config.cache_config.mamba_block_size = config.cache_config.block_size
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(self._cache, config)
        self._cache.hash_block_size = hash_tokens
        self.hit_tokens = resolve_cache_hit_alignment_tokens(self._cache, config, block_tokens, hash_tokens)
        self._hasher = get_request_block_hasher(hash_tokens, sha256)
        self.scheduler: Any = (BoundedScheduler if hands_over else Scheduler)(
            config,
            self._cache,
            StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    @property
    def groups(self) -> CacheGroups:
        """The groups of layers of its cache."""
        return CacheGroups(self._cache)

    @property
    def blocks_used(self) -> int:
        """Blocks that its sequences hold, without the null block."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Return what the prefix cache would give this prompt, by vLLM's own lookup."""
        request = Request("lookup", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=self._hasher)
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    @property
    def bytes_received(self) -> int:
        assert self._worker is not None
        return int(self._worker.get_kv_connector_stats().data["kv_bytes_total.received"])

    @property
    def open_leases(self) -> int:
        assert self._worker is not None
        return int(self._worker.get_kv_connector_stats().data["open_leases"])

    @property
    def recomputes(self) -> dict[str, float]:
        """Requests whose prompt this engine computed although its KV was elsewhere, by reason."""
        counters = self.scheduler.connector.scheduler.counters
        return {name: count for name, count in counters.items() if name.startswith("recompute_total.")}

    # --- requests

    def add(self, prompt: Sequence[int], max_tokens: int, **transfer: Any) -> str:
        """Add a request; returns its name."""
        name = f"request-{next(_numbers)}"
        extra = {"kv_transfer_params": transfer} if transfer else None
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)
        params.update_from_generation_config({}, eos_token_id=0)
        self.scheduler.add_request(Request(name, list(prompt), params, None, block_hasher=self._hasher))
        self.outputs[name] = []
        return name

    def offer(
        self, prompt: Sequence[int], cache_salt: str | None = None, lora: tuple[str, int, str] | None = None
    ) -> dict[str, Any] | None:
        """Offer what its prefix cache has of a prompt, by the call that its worker makes."""
        core = SimpleNamespace(scheduler=self.scheduler, request_block_hasher=self._hasher)
        sent = MsgpackEncoder().encode((new_handoff_id(), list(prompt), cache_salt, lora))
        found = getattr(EngineCore, OFFER)(core, *MsgpackDecoder().decode(sent))
        return None if found is None else MsgpackDecoder().decode(MsgpackEncoder().encode(found))

    def answer(self, name: str, *others: HashingEngine) -> list[int]:
        """Run this engine, and others beside it, until the request has ended."""
        deadline_s = time.monotonic() + PATIENCE_S
        while name not in self.finished:
            for engine in (self, *others):
                engine.step()
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{name} does not end")
        return self.outputs[name]

    def abort_if_held(self, name: str) -> bool:
        """End a request whose first token cannot arrive with its KV, as its handler does; returns whether it was."""
        held = any("failed" in event and event["failed"] for event in self.events)
        self.events.clear()
        if held:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return held

    def settle(self) -> None:
        """Run until nothing is left, kept blocks included."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.scheduler.requests:
            self.step()
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{list(self.scheduler.requests)} stay")

    # --- the step

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        told = scheduled.kv_connector_metadata
        self.preempted += len(scheduled.preempted_req_ids or ())
        to_zero = set(scheduled.new_block_ids_to_zero or ())
        self.zeroed_under_a_load += len(to_zero & self._being_loaded())
        if self._worker is not None:
            self._worker.apply(told)  # vLLM's `handle_preemptions`, before it zeroes
            self.offered += [len(extend.block_ids) for extend in told.extend]
            self.events += self.scheduler.connector.scheduler.take_events()
        for block in to_zero:
            self.slots[block] = 0
        for copy in scheduled.kv_cache_block_copies or ():
            self.slots[copy.dst_block_id] = self.slots[copy.src_block_id]
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens  # vLLM has advanced it
            token = self._forward(request, end - scheduled.num_scheduled_tokens[name], end)
            sampled.append([token] if end >= request.num_tokens else [])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=None if told is None else self._report(told),
        )
        for batch in self.scheduler.update_from_output(scheduled, output).values():
            told_at_end = getattr(batch.scheduler_stats, "kv_connector_stats", None) or {}
            self.events += told_at_end.get(TRANSFER_EVENTS, ())
            for one in batch.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.finished[one.request_id] = one.kv_transfer_params or {}
        if not names:
            time.sleep(0.0005)

    def _report(self, told: Any) -> KVConnectorOutput:
        assert self._worker is not None
        done = self._worker.get_transfer_results(may_wait=False)
        return KVConnectorOutput(
            finished_sending=done.finished_sending or None,
            finished_recving=done.finished_recving or None,
            failed_recving=done.failed_recving,
            kv_connector_worker_meta=self._worker.build_connector_worker_meta(None if told.idle else told.step),
        )

    def _being_loaded(self) -> set[int]:
        waiting = [one for one in self.scheduler.requests.values() if one.status.name == "WAITING_FOR_REMOTE_KVS"]
        groups = range(len(self.specs))
        return {block for one in waiting for group in groups for block in self._table(one, group)[-4:]} - {0}

    def _table(self, request: Request, group: int) -> list[int]:
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[group]
        return [block.block_id for block in manager.req_to_blocks[request.request_id]]

    # --- the model

    def _forward(self, request: Request, start: int, end: int) -> int:
        tables = [self._table(request, group) for group in range(len(self.specs))]
        seen = [self._read(spec, table, start) for spec, table in zip(self.specs, tables, strict=True)]
        digest = 0
        for position in range(start, end):
            digest = mix(position, request.all_token_ids[position], seen)
            for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
                block, offset = table[position // spec.block_size], position % spec.block_size
                if isinstance(spec, MambaSpec):
                    seen[group] = mix(seen[group], digest)
                    if position + 1 == end:
                        self.slots[block] = seen[group]
                    continue
                value = mix(group, digest)
                self.slots[block, offset] = value
                if isinstance(spec, ChunkedLocalAttentionSpec) and (position + 1) % spec.attention_chunk_size == 0:
                    seen[group] = 0
                    continue
                seen[group] ^= value
                left = position - spec.sliding_window + 1 if isinstance(spec, SlidingWindowSpec) else -1
                if left >= 0:  # the next token does not see it any more
                    seen[group] ^= int(self.slots[table[left // spec.block_size], left % spec.block_size])
        return digest % 900

    def _read(self, spec: Any, table: list[int], start: int) -> int:
        if isinstance(spec, MambaSpec):
            if start == 0:
                return 0
            words = self.slots[table[(start - 1) // spec.block_size]]
            return int(words[0]) if (words == words[0]).all() else -1
        first = 0
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, start - spec.sliding_window + 1)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            first = start - start % spec.attention_chunk_size
        seen = 0
        for position in range(first, start):
            seen ^= int(self.slots[table[position // spec.block_size], position % spec.block_size])
        return seen
