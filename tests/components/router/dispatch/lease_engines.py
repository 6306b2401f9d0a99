"""Two engines without a model that hand KV off for real, with transfer services, leases, gRPC and random delays.

They do what the connector and vLLM do, in the same order: an engine acts shortly after it is told, continues for a
moment after it is told to stop, and finishes a prompt, keeping its blocks, before the worker knows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any

import msgspec
import torch
from vllm.sampling_params import SamplingParams

from ridgeline.contracts.handoff import KvHandoff, KvLayout, TransferResult
from ridgeline.contracts.tasks import Adapter, TokenDelta
from ridgeline.contracts.vocabulary import Pool
from ridgeline.engine.connector.events import TransferEvent, TransferEvents
from ridgeline.engine.connector.scheduler_side import FETCH, FIRST_TOKEN_FOLLOWS, PUBLISH, REUSE
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.service import RankLayers, TransferService
from tests.support.fake_engine import FakeStats
from tests.support.samples import engine_config, kv_layout

NUM_BLOCKS = 64
LAYOUT = kv_layout(kv_dtype="auto", block_size=32, num_layers=1, block_bytes=64)
STEP_TOKENS = 64
"""Longer prompts are computed in two steps, so that their transfer can overlap."""
LEASE_S = 30.0


class LeaseEngine:
    """The common part: a transfer service, polled as an engine's step loop does, and delays."""

    num_kv_blocks = NUM_BLOCKS
    prefix_block_tokens = LAYOUT.block_size
    adapter_room = (0, 0)
    offered_adapters = ()

    def __init__(self, pool: Pool, rng: random.Random, longest_delay_s: float) -> None:
        self.config = engine_config(pool)
        self.stats = FakeStats()
        self.transfer_events = TransferEvents()
        self.failed = False
        self._rng = rng
        self._longest_delay_s = longest_delay_s
        layer = torch.zeros(NUM_BLOCKS * 64, dtype=torch.uint8).view(NUM_BLOCKS, 2, 4, 8)
        options = TransferOptions(host="127.0.0.1", transport="grpc", lease_s=LEASE_S)
        self.service = TransferService(RankLayers({"layer": layer}, LAYOUT), options)
        self.service.start()
        self._numbers = count()
        self._fetches: dict[str, asyncio.Future[TransferResult]] = {}
        self.unsent: set[str] = set()
        """Prompts whose blocks are kept."""
        self.given_up = 0
        """Number of hand-offs that its worker released itself."""

    async def describe(self) -> tuple[KvLayout, list[str]]:
        return LAYOUT, [self.service.address]

    async def pair(self, addresses: list[str], transport: str | None = None) -> dict[str, Any]:
        return await asyncio.wrap_future(self.service.pair(addresses, transport))

    async def reset_prefix_cache(self) -> bool:
        return True

    async def step_for_ever(self) -> None:
        """Collect the service's results until cancelled."""
        while True:
            await asyncio.sleep(0.002)
            done = self.service.poll()
            self.unsent -= done.sent
            for request_id, result in done.results.items():
                self._fetches.pop(request_id).set_result(result)

    def close(self) -> None:
        self.service.close()

    def release_own(self, handoff_id: str) -> None:
        self.given_up += 1
        self._soon(self.service.leases.release, handoff_id)

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, **_: Any
    ) -> AsyncGenerator[TokenDelta, None]:
        transfer = (params.extra_args or {}).get("kv_transfer_params") or {}
        name = f"{request_id}-{next(self._numbers)}"
        if transfer.get(REUSE):
            await self._load(f"{name}-reused", KvHandoff.from_params(transfer["handoff"]), follows=False)
        if transfer.get(PUBLISH):
            yield await self._prefill(request_id, name, prompt_token_ids, transfer["handoff_id"])
            return
        if transfer.get(FETCH) and not transfer.get(REUSE):
            handoff = KvHandoff.from_params(transfer["handoff"])
            await self._load(name, handoff, follows=bool(transfer.get(FIRST_TOKEN_FOLLOWS)))
        wanted = params.max_tokens or 1
        for made in range(1, wanted + 1):
            await self._delay()
            ended = made == wanted
            yield TokenDelta(
                request_id=request_id, token_ids=[made], finished=ended, finish_reason="length" if ended else None
            )

    # --- prefill

    async def _prefill(self, request_id: str, name: str, prompt: list[int], handoff_id: str) -> TokenDelta:
        blocks = list(range(-(-len(prompt) // 32)))
        if len(prompt) > STEP_TOKENS:
            await self._delay()  # if it is aborted in its first step, nothing was offered
            self.service.leases.extend(handoff_id, name, blocks[:2])
            self.transfer_events.deliver(
                [_event(handoff_id, handoff=self._handoff(handoff_id, prompt, complete=False))]
            )
        try:
            await self._delay()
        except asyncio.CancelledError:
            self._soon(self.service.leases.revoke, handoff_id)
            raise
        # The engine finishes here: from now on, an abort has no effect on these blocks.
        self.unsent.add(name)
        self._soon(self.service.publish, name, handoff_id, blocks, len(prompt), 7)
        await self._delay()
        return TokenDelta(
            request_id=request_id,
            token_ids=[7],
            finished=True,
            finish_reason="length",
            handoff=self._handoff(handoff_id, prompt, complete=True),
        )

    async def offer(
        self, handoff_id: str, token_ids: list[int], cache_salt: str | None = None, adapter: Adapter | None = None
    ) -> KvHandoff | None:
        """Offer the whole blocks of a prompt, also if nobody waits for that any more; now and then it has none."""
        cached = token_ids[: len(token_ids) // 32 * 32] if self._rng.random() < 0.8 else []
        try:
            await self._delay()
        except asyncio.CancelledError:
            self._soon(self._offer, handoff_id, cached)
            raise
        return self._offer(handoff_id, cached)

    def _offer(self, handoff_id: str, cached: list[int]) -> KvHandoff | None:
        if not cached:
            return None
        name, blocks = f"offer-{next(self._numbers)}", list(range(len(cached) // 32))
        self.unsent.add(name)
        self.service.publish(name, handoff_id, blocks, len(cached))
        return self._handoff(handoff_id, cached, complete=True)

    def _handoff(self, handoff_id: str, prompt: list[int], *, complete: bool) -> KvHandoff:
        return KvHandoff(
            handoff_id=handoff_id,
            addresses=(self.service.address,),
            num_blocks=-(-len(prompt) // 32),
            num_tokens=len(prompt),
            compatibility_hash=LAYOUT.compatibility_hash(),
            lease_s=LEASE_S,
            num_bytes=64,
            complete=complete,
        )

    # --- decode

    async def _load(self, name: str, handoff: KvHandoff, *, follows: bool) -> None:
        self.service.watch(handoff)
        try:
            await self._delay()
        except asyncio.CancelledError:
            self._soon(self.service.release, handoff)
            raise
        if self._rng.random() < 0.1:  # the local prefix cache has everything
            if follows:
                self.service.unwatch(handoff)
                await self._never("already_cached", handoff)
            self.service.release(handoff)
            return
        fetched = self._fetches[name] = asyncio.get_running_loop().create_future()
        self.service.start_fetch(name, handoff, {0: list(range(handoff.num_blocks))})
        try:
            result = await asyncio.shield(fetched)
        except asyncio.CancelledError:
            self._soon(self.service.cancel, name)
            raise
        if result.outcome != "ok":
            if follows:
                await self._never(result.reason, handoff)
            if not handoff.complete:
                self.service.release(handoff)

    async def _never(self, reason: str, handoff: KvHandoff) -> None:
        """Notify the handler that the first token cannot come, and wait to be aborted."""
        self.transfer_events.deliver([_event(handoff.handoff_id, failed=reason)])
        await asyncio.Event().wait()

    # ---

    async def _delay(self) -> None:
        await asyncio.sleep(self._rng.random() * self._longest_delay_s)

    def _soon(self, action: Callable[..., object], *arguments: object) -> None:
        asyncio.get_running_loop().call_later(self._rng.random() * self._longest_delay_s, action, *arguments)


def _event(handoff_id: str, **fields: Any) -> object:
    return msgspec.to_builtins(TransferEvent(handoff_id=handoff_id, **fields))
