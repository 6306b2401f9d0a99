"""vLLM's KV connector: passes each hook to the scheduler side or the worker side, under the same name.

vLLM loads this class by module path in the engine process and creates it twice there, once per role. The worker's front
end imports it too, so importing it must start nothing. The processes call it in this order:

    scheduler role  on_new_request > get_num_new_matched_tokens > update_state_after_alloc > build_connector_meta >
                    (step) > update_connector_output > get_kv_connector_stats; request_finished_all_groups at the end
    worker role     register_kv_caches once; each step handle_preemptions > bind_connector_metadata > (forward) >
                    start_load_kv > get_transfer_results > build_connector_worker_meta > get_kv_connector_stats

Hooks accept **kwargs because vLLM's two model runners (CPU, CUDA) pass different arguments.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.outputs import KVConnectorOutput

from ridgeline.engine.connector.accounting import StepAccountant, step_cost_model
from ridgeline.engine.connector.groups import CacheGroups, regions
from ridgeline.engine.connector.layout import kv_layout
from ridgeline.engine.connector.messages import CounterStats, Publish, StepInstructions, TransferResults
from ridgeline.engine.connector.scheduler_side import IDLE_WAIT_S, POLL_S, SchedulerSide
from ridgeline.engine.connector.worker_side import WorkerSide
from ridgeline.engine.vllm_workarounds.bounded_grammars import bound_grammars
from ridgeline.engine.vllm_workarounds.core_loop import add_calls, join_loop, send_at_once, wake
from ridgeline.engine.vllm_workarounds.cores import helpers_on_all_cores_of
from ridgeline.engine.vllm_workarounds.engine_process import (
    cause_file,
    end_process,
    exit_with_parent,
    forget_queue_names,
)
from ridgeline.kv_transfer.memory.shared import KvCacheAllocation
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.service import RankLayers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class RidgelineConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands paged KV blocks from one engine to another, and counts the cost of each step.

    As a `SupportsHMA` it gets layers of different kinds in groups, each with blocks of its own.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        exit_with_parent()
        self._settings: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._transfer = msgspec.convert(self._settings["transfer"], TransferOptions)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._allocation = KvCacheAllocation()
        self._has_ranks = vllm_config.parallel_config.tensor_parallel_size > 1
        self._groups = CacheGroups(kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            add_calls()
            bound_grammars()
            if self._has_ranks:
                forget_queue_names()
            self._scheduler = SchedulerSide(
                groups=self._groups,
                lease_s=self._transfer.lease_s,
                vocabulary_tokens=vllm_config.model_config.get_vocab_size(),
                accountant=StepAccountant(step_cost_model(vllm_config, self._groups.all[0].spec)),
                send_at_once=send_at_once,
                publish_at_once=self._publish_at_once,
            )
            # Ranks in other processes cannot wake the loop, and have waited themselves (`get_transfer_results`).
            join_loop(partial(self._scheduler.idle_wait_s, POLL_S if self._has_ranks else IDLE_WAIT_S))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Require heads before tokens, one layer after the other, so that a block of one layer is one run of bytes."""
        return "LBHNC"

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler side; fails an assertion in the worker role."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """The worker side; it exists once the KV cache is registered."""
        assert self._worker is not None
        return self._worker

    # --- scheduler role

    @property
    def step_target_s(self) -> float:
        """How long a step may take while sequences decode, until a role says otherwise; 0: no target."""
        return float(self._settings["step_target_s"])

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.scheduler.set_xfer_handshake_metadata(metadata)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.scheduler.bind_kv_cache_manager(kv_cache_manager)

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_pending_push_work()

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.update_connector_output(connector_output)

    def take_arrived(self) -> KVConnectorOutput | None:
        """Return what has arrived since a step last asked, for the step that is to be scheduled; None if nothing.

        vLLM asks when a step's layers are computed. What comes later, while it samples or, with two steps in flight,
        while it prepares the next one, would wait for the end of another step.
        """
        here = self._worker_here()
        arrived = {} if here is None else here.take_arrived()
        if not arrived:
            return None
        return KVConnectorOutput(finished_recving=set(arrived), kv_connector_worker_meta=TransferResults(dict(arrived)))

    def _publish_at_once(self, publish: Publish) -> bool:
        here = self._worker_here()
        if here is not None:
            here.publish(publish)
        return here is not None

    def _worker_here(self) -> WorkerSide | None:
        """Return the worker side if it is in the scheduler's process: only that of a lone rank is."""
        if not has_kv_transfer_group():
            return None
        here = get_kv_transfer_group()
        assert isinstance(here, RidgelineConnector)
        return here.worker

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.request_finished_all_groups(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Name all groups, because vLLM zeroes the new blocks of those that are not loaded, while they are filled."""
        return tuple(range(len(self._groups.all)))

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Keep what a layer with every token has cached, even where no state was kept: a hand-off brings the state."""
        return True

    # --- worker role

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        """Let vLLM allocate the cache where decode workers of this host can map it, if it is to be shared."""
        if not self._settings["share_kv_cache"]:
            return None
        return self._allocation.serving_torch_zeros()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rows = regions(kv_caches, self._kv_cache_config)
        rank = get_tensor_model_parallel_rank()
        if self._has_ranks:
            forget_queue_names()
        with helpers_on_all_cores_of(rank):
            cache = RankLayers(
                layers=rows,
                layout=kv_layout(self._vllm_config, self._groups, kv_caches, rows),
                shared=self._allocation.offer(list(rows.values())),
                rank=rank,
                on_lost=end_process(cause_file(self._vllm_config)),
            )
            self._worker = WorkerSide(cache, self._transfer, on_news=wake)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.endpoint

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata, **kwargs: Any) -> None:
        # Called before each forward with this step's metadata, so bytes move while the forward computes. The blocks to
        # fill belong to requests that wait for them, and those to send to finished ones, so no step touches either.
        assert isinstance(kv_connector_metadata, StepInstructions)
        self.worker.apply(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        instructions = self._get_connector_metadata()
        assert isinstance(instructions, StepInstructions)
        self.worker.apply(instructions)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, and a request is scheduled only after its KV is here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing: peers read blocks where they lie.

        From here on they may read this layer of a prompt's last step.
        """
        self.worker.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        """Do nothing: no step saves KV."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        instructions = self._get_connector_metadata()
        assert isinstance(instructions, StepInstructions)
        return self.worker.get_transfer_results(may_wait=instructions.quiet and self._has_ranks)

    def build_connector_worker_meta(self) -> Any:
        instructions = self._get_connector_metadata()
        assert isinstance(instructions, StepInstructions)
        return self.worker.build_connector_worker_meta(None if instructions.idle else instructions.step)

    # --- both

    def get_kv_connector_stats(self) -> CounterStats:
        if self._scheduler is not None:
            return self._scheduler.get_kv_connector_stats()
        return self.worker.get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CounterStats:
        return CounterStats(data=data or {})

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
