"""Methods added to vLLM's worker, which the front end calls through vLLM: to prepare it and to ask its connector."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.distributed.kv_transfer import get_kv_transfer_group

from ridgeline.engine.connector.kv_connector import RidgelineConnector
from ridgeline.engine.vllm_workarounds.gloo_device import share_gloo_device
from ridgeline.engine.vllm_workarounds.model_runner import compile_drafts, keep_rows_apart, put_generators_back

share_gloo_device()  # vLLM imports this module before it makes its process groups, and calls nothing of it until later


class RidgelineWorkerExtension:
    """The methods that vLLM mixes into its worker class (`worker_extension_cls`)."""

    model_runner: Any
    cache_config: Any

    def ridgeline_prepare(self) -> None:
        """Install the workarounds in vLLM's model runner; called once, before the first request."""
        put_generators_back(self.model_runner)
        keep_rows_apart(self.model_runner)
        compile_drafts(self.model_runner)
        if self.model_runner.lora_config is not None:
            from ridgeline.engine.vllm_workarounds import rows_without_adapter

            rows_without_adapter.keep_adapters_apart()
            rows_without_adapter.give_prompts_their_adapters(self.model_runner)

    def ridgeline_describe(self) -> tuple[dict[str, Any], str, int]:
        """Return the KV layout as plain data, the address of this rank's blocks, and the tokens of a prefix hit."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, RidgelineConnector)
        return msgspec.to_builtins(connector.worker.layout), connector.worker.endpoint.address, self._hit_tokens

    @property
    def _hit_tokens(self) -> int:
        """A multiple of the block size where groups of layers have several; `model.block_size` only proposes that."""
        return int(self.cache_config.cache_hit_alignment_tokens) if self.cache_config.enable_prefix_caching else 0

    def ridgeline_release(self, handoff_ids: list[str]) -> None:
        """Free this rank's blocks of hand-offs that no router will release, even if they are published only later."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, RidgelineConnector)
        connector.worker.release_own(handoff_ids)

    def ridgeline_pair(self, ticket: str, addresses: list[str], transport: str | None) -> dict[str, Any] | None:
        """Return the transport chosen for each source, or why there is none; None while pairing still runs."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, RidgelineConnector)
        paired: dict[str, Any] | None = msgspec.to_builtins(connector.worker.pair(ticket, addresses, transport))
        return paired
