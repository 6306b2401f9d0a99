"""A deterministic engine without a model, with VllmEngine's methods, for tests of workers and of the router.

Importing this module also imports vLLM, with its import-time deprecation warnings silenced: pytest turns warnings into
errors, and these are not ours.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from tests.support.samples import LAYOUT, TIMING, engine_config, make_handoff, next_token

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ridgeline.router.front.sampling
    import ridgeline.worker_runtime.host  # noqa: F401

from vllm.sampling_params import SamplingParams

from ridgeline.contracts.errors import AdapterRefused
from ridgeline.contracts.handoff import KvHandoff, KvLayout
from ridgeline.contracts.tasks import Adapter, GenerateTask, TokenDelta
from ridgeline.contracts.vocabulary import Pool
from ridgeline.contracts.workers import StepModel
from ridgeline.engine.connector.events import TransferEvents
from ridgeline.engine.request import sampling
from ridgeline.engine.stall import Doing, StallWatch
from ridgeline.kv_transfer.service import PairedTransport


def make_task(request_id: str = "r", leg: str = "decode", max_tokens: int = 3, **fields: Any) -> GenerateTask:
    """Make a task; `params` replaces the sampling parameters that `max_tokens` would give."""
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateTask(
        request_id=request_id,
        leg=leg,  # type: ignore[arg-type]
        prompt_token_ids=fields.pop("prompt_token_ids", [5, 6, 7]),
        sampling=sampling.encode(params),
        **fields,
    )


@dataclass
class Call:
    """The arguments of one call of `generate`."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    reasoning_ended: bool | None
    reasoning_parser_kwargs: dict[str, Any] | None
    cache_salt: str | None
    adapter: Adapter | None

    @property
    def transfer(self) -> dict[str, Any] | None:
        """The instructions that the connector would see."""
        return (self.params.extra_args or {}).get("kv_transfer_params")


@dataclass
class FakeStats:
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    step_model: StepModel | None = None
    stale_handoffs: list[str] = field(default_factory=list)
    stall: StallWatch = field(default_factory=StallWatch)


class FakeEngine:
    """Makes one token per `step()` for every running request; with `stepping="auto"` each request runs by itself."""

    num_kv_blocks = 100
    prefix_block_tokens = 32
    keeps_every_token = True

    def __init__(self, pool: Pool = "decode", *, stepping: str = "auto") -> None:
        self.config = engine_config(pool)
        self.stats = FakeStats()
        self.failed = False
        self.ending = ""
        self.closed = False
        self.calls: list[Call] = []
        self.aborted: list[str] = []
        self.kept: set[str] = set()
        """Hand-offs whose blocks it keeps: those of finished requests, whether anything was notified or not."""
        self.released: list[str] = []
        self.cached_tokens = 0
        """What it offers of any prompt."""
        self.asked: list[tuple[list[int], str | None]] = []
        """The prompts of which an offer was asked for, with their salts."""
        self.offers: asyncio.Event | None = None
        """If set, offers wait for it."""
        self.error: Exception | None = None
        """Raised by the next steps instead of making a token."""
        self.transfer_events = TransferEvents()
        self.timing = TIMING
        self._stepping = stepping
        self.output_delay: asyncio.Event | None = None
        """If set, outputs wait for it between the engine's step and the worker."""
        self._waiting: dict[str, asyncio.Semaphore] = {}
        self.step_limits: tuple[int, int] | None = None
        """The limits of a step in sequences and tokens, once they have been set."""
        self.step_target_s = 0.0
        self.does: Doing = "waits"
        self.adapter_room = (2, 2)
        self.adapter_digests: dict[str, str] = {}
        """By path, what this engine finds there; where there is nothing, it refuses the adapter."""
        self.adapters: dict[str, Adapter] = {}
        self.unloaded: list[tuple[str, float]] = []
        """The keys of adapters that it was told to forget, and after how long."""

    def doing(self) -> Doing:
        return self.does

    async def limit_steps(self, max_num_seqs: int, max_num_batched_tokens: int, step_target_s: float = 0.0) -> None:
        self.step_limits = max_num_seqs, max_num_batched_tokens
        self.step_target_s = step_target_s

    @property
    def running(self) -> set[str]:
        """The requests that wait for a step."""
        return set(self._waiting)

    def step(self, *only: str) -> None:
        """Run one engine step: wake all requests, or some, in this turn of the loop, as vLLM's output handler does."""
        for request_id, steps in self._waiting.items():
            if not only or request_id in only:
                steps.release()

    async def describe(self) -> tuple[KvLayout, list[str]]:
        return LAYOUT, ["127.0.0.1:7001"]

    async def pair(self, addresses: list[str], transport: str | None = None) -> dict[str, PairedTransport | str]:
        return {
            address: "the engines cannot exchange KV blocks." if "refuse" in address else PairedTransport("shm", "")
            for address in addresses
        }

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        adapter: Adapter | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        self.calls.append(
            Call(request_id, prompt_token_ids, params, reasoning_ended, reasoning_parser_kwargs, cache_salt, adapter)
        )
        call, context, steps = self.calls[-1], list(prompt_token_ids), asyncio.Semaphore(0)
        self._waiting[request_id] = steps
        ended = False
        try:
            while not ended:
                if self._stepping == "auto":
                    await asyncio.sleep(0)
                else:
                    await steps.acquire()
                if self.error is not None:
                    ended = True
                    raise self.error
                made = len(context) - len(prompt_token_ids)
                forced = (params.extra_args or {}).get(sampling.FORCED, [])
                context.append(forced[made] if made < len(forced) else next_token(context))
                stopped = not params.ignore_eos and context[-1] in (params.stop_token_ids or [])
                ended = stopped or len(context) - len(prompt_token_ids) >= (params.max_tokens or 16)
                publish = ended and not stopped and (call.transfer or {}).get("do_remote_decode")
                if publish:
                    self.kept.add(call.transfer["handoff_id"])
                if self.output_delay is not None:
                    await self.output_delay.wait()
                yield TokenDelta(
                    request_id=request_id,
                    token_ids=context[-1:],
                    finished=ended,
                    finish_reason=("stop" if stopped else "length") if ended else None,
                    handoff=make_handoff(call.transfer["handoff_id"], len(prompt_token_ids)) if publish else None,
                    timing=self.timing if ended else None,
                )
        finally:
            del self._waiting[request_id]
            if not ended:
                self.aborted.append(request_id)

    async def offer(
        self, handoff_id: str, token_ids: list[int], cache_salt: str | None = None, adapter: Adapter | None = None
    ) -> KvHandoff | None:
        self.asked.append((token_ids, cache_salt, adapter))
        if self.offers is not None:
            await self.offers.wait()
        if self.error is not None:
            raise self.error
        return make_handoff(handoff_id, self.cached_tokens) if self.cached_tokens else None

    @property
    def offered_adapters(self) -> tuple[Adapter, ...]:
        return tuple(self.adapters.values())

    async def load_adapter(self, name: str, path: str, digest: str = "") -> Adapter:
        found = self.adapter_digests.get(path, "")
        if not found or digest not in ("", found):
            raise AdapterRefused(f"there is no folder {path}, or it has other files")
        adapter = Adapter(name=name, digest=found, path=path)
        self.adapters[adapter.key] = adapter
        return adapter

    def unload_adapter(self, adapter: Adapter, after_s: float) -> None:
        self.adapters.pop(adapter.key, None)
        self.unloaded.append((adapter.key, after_s))

    def release_own(self, handoff_id: str) -> None:
        self.released.append(handoff_id)
        self.kept.discard(handoff_id)

    async def reset_prefix_cache(self) -> bool:
        return not self._waiting

    def close(self) -> None:
        self.closed = True
