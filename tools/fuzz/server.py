"""The server under test, in one process: the router with vLLM's app on uvicorn, two workers, and a KV source.

All is real except the engines, which are fakes that refuse what would break a real one.

usage: python -m tools.fuzz.server MODEL_DIRECTORY
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any, cast

import numpy as np
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackEncoder

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.contracts.errors import InvalidTask
from ridgeline.contracts.tasks import TokenDelta
from ridgeline.contracts.vocabulary import Pool
from ridgeline.engine.vllm_engine import require_in_vocabulary
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.grpc_source import GrpcKvSource
from ridgeline.prefill_worker.kv_source.lease import LeaseTable
from ridgeline.router.server import Router
from ridgeline.worker_runtime.host import WorkerHost
from tests.support import fake_engine  # imports vLLM with its warnings silenced, so it comes first
from tests.support.samples import LAYOUT, router_settings
from tools.child import serve_until_stdin_ends

MAX_MODEL_LEN_TOKENS = 256
MAX_OUTSTANDING = 64
LEASE_S = 24 * 3600.0
PUBLISH_WAIT_S = 0.01
"""Short, because otherwise each fetch of an unknown hand-off would wait for a second."""
KV_BLOCKS, KV_LAYERS = 32, LAYOUT.num_layers
PUBLISHED = {"open": range(8), "empty": range(0)}
"""Hand-offs that can be fetched, and their blocks."""


class StrictEngine(fake_engine.FakeEngine):
    """Refuses what VllmEngine refuses, by vLLM's own checks, and makes no more tokens than fit the model's context.

    Anything else that vLLM raises is not caught: the task then ends with an engine error, and the run fails.
    """

    def __init__(self, pool: Pool, processor: InputProcessor) -> None:
        super().__init__(pool)
        self._processor = processor

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[TokenDelta, None]:
        self.calls.clear()  # a fake that remembers calls would look like a leak
        self.aborted.clear()
        require_in_vocabulary(prompt_token_ids, self._processor.model_config.get_vocab_size())
        prompt = tokens_input(prompt_token_ids, cache_salt=options["cache_salt"])
        try:
            request = self._processor.process_inputs(request_id, prompt, params, supported_tasks=("generate",))
            MsgpackEncoder().encode(request)  # as it would go to the engine's process
        except (VLLMClientError, ValueError, TypeError, OverflowError) as error:
            raise InvalidTask(str(error)) from error
        params = request.sampling_params
        params.max_tokens = min(params.max_tokens, MAX_MODEL_LEN_TOKENS - len(prompt_token_ids))
        async for delta in super().generate(request_id, prompt_token_ids, params, **options):
            yield delta


def kv_source() -> GrpcKvSource:
    """Return a source with some hand-offs that do not expire during a run."""
    leases = LeaseTable()
    for name, block_ids in PUBLISHED.items():
        leases.publish(name, name, list(block_ids), len(block_ids) * LAYOUT.block_size, LEASE_S)
    layers = [np.full((KV_BLOCKS, LAYOUT.block_bytes), layer, np.uint8) for layer in range(KV_LAYERS)]
    source = GrpcKvSource(RankCache(HostMemory(layers), leases, LAYOUT), TransferOptions("127.0.0.1"))
    source.server._publish_wait_s = PUBLISH_WAIT_S
    source.start()
    return source


async def main(model: str) -> None:
    """Serve until standard input ends."""
    router = Router(
        router_settings(
            model_path=model,
            served_names=("fuzzed",),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN_TOKENS,
            request_timeout_s=60.0,
            max_concurrent_requests=MAX_OUTSTANDING,
            recovery_timeout_s=5.0,
            min_remote_prefill_tokens=4,
        )
    )
    processor = router._client.input_processor
    hosts = [
        WorkerHost(cast(Any, StrictEngine("prefill", processor)), HANDLERS),
        WorkerHost(cast(Any, StrictEngine("decode", processor)), HANDLERS),
    ]
    addresses = [await host.start() for host in hosts]
    source = kv_source()
    url = await router.serve(addresses, {})
    await serve_until_stdin_ends(url=url, prefill=addresses[0], decode=addresses[1], kv=source.address)
    await router.stop()
    await asyncio.gather(*(host.stop() for host in hosts))
    source.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
