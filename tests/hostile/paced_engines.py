"""One prefill and one decode worker without a model, in a process of their own, as they are in a deployment.

Their steps take as long as real ones. Prints both addresses once they serve, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.contracts.tasks import PositionLogprobs, TokenDelta
from ridgeline.contracts.vocabulary import Pool
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.fake_engine import FakeEngine

STEP_TOKENS = 2048


class PacedEngine(FakeEngine):
    """An engine whose steps take time; run `pace` beside it."""

    num_kv_blocks = 4000

    def __init__(self, pool: Pool, *, step_s: float, max_num_seqs: int, prompt_tokens_per_s: float = 0.0) -> None:
        super().__init__(pool, stepping="manual")
        self.config = replace(self.config, max_num_seqs=max_num_seqs)
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._prompt_tokens_per_s = prompt_tokens_per_s
        self._prompt_tokens: dict[str, int] = {}

    async def pace(self) -> None:
        """Step forever: one token for each of the oldest sequences. Prompts take time if a rate is given."""
        while True:
            batch = self._batch()
            tokens = sum(self._prompt_tokens[request_id] for request_id in batch)
            prompts_s = tokens / self._prompt_tokens_per_s if self._prompt_tokens_per_s else 0.0
            await asyncio.sleep(self._step_s + prompts_s if batch else 0.002)
            if batch:
                self.stats.stall.moved()
                self.step(*batch)

    def _batch(self) -> list[str]:
        """Return the oldest sequences, at least one; if prompts take time, up to a number of prompt tokens."""
        batch: list[str] = []
        tokens = 0
        for request_id in list(self._waiting)[: self._max_num_seqs]:
            tokens += self._prompt_tokens[request_id] if self._prompt_tokens_per_s else 0
            if batch and tokens > STEP_TOKENS:
                break
            batch.append(request_id)
        return batch

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, **more: Any
    ) -> AsyncGenerator[TokenDelta, None]:
        """Generate like the fake, with log-probabilities of the prompt if asked for."""
        self._prompt_tokens[request_id] = len(prompt_token_ids)
        async for delta in super().generate(request_id, prompt_token_ids, params, **more):
            if params.prompt_logprobs is not None:
                delta = msgspec.structs.replace(
                    delta, prompt_logprobs=_logprobs(len(prompt_token_ids), params.prompt_logprobs)
                )
            yield delta


def _logprobs(tokens: int, number: int) -> list[PositionLogprobs | None]:
    columns = list(range(1, number + 2))
    one = PositionLogprobs(columns, [-0.5 * column for column in columns], 1)
    return [None, *(one for _ in range(tokens - 1))]


async def main() -> None:
    """Until nobody holds the other end of the standard input."""
    prefill = PacedEngine("prefill", step_s=0.03, max_num_seqs=128, prompt_tokens_per_s=20_000)
    decode = PacedEngine("decode", step_s=0.1, max_num_seqs=64)
    hosts = [WorkerHost(prefill, HANDLERS), WorkerHost(decode, HANDLERS)]
    pacing = [asyncio.create_task(engine.pace()) for engine in (prefill, decode)]
    sys.stdout.write(" ".join([await host.start() for host in hosts]) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for task in pacing:
        task.cancel()
    for host in hosts:
        await host.stop()


asyncio.run(main())
