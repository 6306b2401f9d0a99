"""The connector's scheduler side: decides what is published, fetched, released. Moves no bytes.

Runs on the engine's step loop, so every method is a few dictionary operations. Order of calls in one step:
`on_new_request`, `get_num_new_matched_tokens`, `update_state_after_alloc`, `build_connector_meta`, (the step),
`update_connector_output`, `request_finished`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.v1.request import RequestStatus

from engine.accounting import StepAccountant
from engine.connector_messages import Endpoint, Fetch, FetchReceipts, Publish, StepInstructions
from kv_transfer.handoff import FetchReceipt, KvHandoff, new_handoff_id

FETCH = "do_remote_prefill"
PUBLISH = "do_remote_decode"


class SchedulerSide:
    """State of the requests that hand over or take over KV."""

    def __init__(self, block_size_tokens: int, lease_s: float, accountant: StepAccountant) -> None:
        self._block_size_tokens = block_size_tokens
        self._lease_s = lease_s
        self._accountant = accountant
        self._endpoint: Endpoint | None = None
        self._next = StepInstructions()
        self._incoming: dict[str, KvHandoff] = {}
        """Requests whose KV lies elsewhere, until their fetch has been asked for."""
        self._covered: set[str] = set()
        """Those of them whose whole prompt was in the local prefix cache when vLLM last asked."""
        self._fetching: dict[str, bool] = {}
        """Fetch asked for, its end not yet reported; False once aborted. vLLM holds the blocks as long either way."""
        self._publishing: set[str] = set()
        """Finished requests whose blocks stay pinned until the worker side says they are sent."""
        self._receipts: dict[str, FetchReceipt] = {}

    def set_endpoint(self, endpoint: Endpoint) -> None:
        """Where the blocks of this engine can be fetched; told once, before the first request."""
        self._endpoint = endpoint

    @property
    def counters(self) -> dict[str, float]:
        """Cumulative counters of this side, plus requests that still wait for KV."""
        return {**self._accountant.counters, "waiting_for_kv": float(len(self._incoming) + len(self._fetching))}

    # --- admission

    def on_new_request(self, request: Any) -> None:
        """Start heartbeats at once: the request may wait long before vLLM lets its load begin."""
        params = request.kv_transfer_params or {}
        external = 0
        if params.get(FETCH):
            handoff = KvHandoff.from_params(params["handoff"])
            external = handoff.num_tokens
            self._incoming[request.request_id] = handoff
            self._next.watch.append(handoff)
        self._accountant.expect(request.request_id, request.num_prompt_tokens, external)
        if params.get("recompute_reason"):
            self._accountant.count(f"recompute_total.{params['recompute_reason']}")

    def num_external_tokens(self, request: Any, num_local_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond the local prefix cache will arrive, and that they arrive asynchronously."""
        handoff = self._incoming.get(request.request_id)
        if handoff is None:
            return 0, False
        missing = handoff.num_tokens - num_local_tokens
        if missing > 0:
            self._covered.discard(request.request_id)
            return missing, True
        self._covered.add(request.request_id)
        return 0, False

    def after_allocation(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there: ask for the fetch. vLLM calls this again with 0 when the load has ended."""
        handoff = self._incoming.pop(request.request_id, None)
        if handoff is None:
            return
        if num_external_tokens == 0:
            # The local prefix cache had it all, or vLLM skipped the cache: the source may let go. What vLLM found is
            # known from its question alone: it sets request.num_computed_tokens after this call.
            self._next.release.append(handoff)
            if request.request_id not in self._covered:
                self._accountant.recompute(request.request_id, "prefix_cache_skipped")
            self._covered.discard(request.request_id)
            return
        first_block = (handoff.num_tokens - num_external_tokens) // self._block_size_tokens
        needed = len(handoff.block_ids) - first_block
        targets = list(blocks.get_unhashed_block_ids_all_groups()[0])[:needed]
        self._fetching[request.request_id] = True
        self._next.fetch.append(Fetch(request.request_id, handoff, first_block, targets))

    # --- the step

    def take_instructions(self, scheduled: Any) -> StepInstructions:
        """Everything decided since the last step, and the accounting of this one."""
        self._accountant.begin(scheduled)
        instructions, self._next = self._next, StepInstructions()
        instructions.idle = scheduled.total_num_scheduled_tokens == 0
        return instructions

    def after_step(self, output: Any) -> None:
        """Read the worker side's report.

        vLLM reads the same object next and dies on an unknown id, hence the guards.
        """
        self._accountant.end()
        if isinstance(output.kv_connector_worker_meta, FetchReceipts):
            self._receipts.update(output.kv_connector_worker_meta.by_request)
        if output.finished_sending:
            output.finished_sending &= self._publishing
            self._publishing -= output.finished_sending
        if output.finished_recving:
            output.finished_recving &= self._fetching.keys()
            for request_id in output.finished_recving:
                if not self._fetching.pop(request_id):
                    self._receipts.pop(request_id, None)  # nobody will ask for it any more
                    continue
                receipt = self._receipts.get(request_id)
                if receipt is not None and receipt.outcome == "failed":
                    self._accountant.recompute(request_id, receipt.reason)
        if output.failed_recving and output.finished_recving:
            output.failed_recving &= output.finished_recving

    # --- the end of a request

    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """(keep the blocks?, what the output tells the worker's handler)."""
        request_id = request.request_id
        self._accountant.forget(request_id)
        self._covered.discard(request_id)
        receipt = self._receipts.pop(request_id, None)
        waiting = self._incoming.pop(request_id, None)
        if waiting is not None:
            self._next.release.append(waiting)
        if request_id in self._fetching:
            self._fetching[request_id] = False
            self._next.cancel.append(request_id)
            return False, None
        params = request.kv_transfer_params or {}
        if params.get(PUBLISH) and request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
            return True, {"handoff": self._publish(request, block_ids).to_params()}
        if receipt is not None:
            return False, {"receipt": msgspec.to_builtins(receipt)}
        return False, None

    def _publish(self, request: Any, block_ids: list[int]) -> KvHandoff:
        assert self._endpoint is not None
        num_tokens = request.num_prompt_tokens
        used = list(block_ids[: -(-num_tokens // self._block_size_tokens)])
        handoff = KvHandoff(
            handoff_id=new_handoff_id(),
            address=self._endpoint.address,
            block_ids=tuple(used),
            num_tokens=num_tokens,
            compatibility_hash=self._endpoint.layout_hash,
            lease_s=self._lease_s,
            num_bytes=len(used) * self._endpoint.block_bytes_all_layers,
        )
        self._publishing.add(request.request_id)
        self._next.publish.append(Publish(request.request_id, handoff.handoff_id, used, num_tokens))
        return handoff
