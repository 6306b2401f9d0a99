"""One vLLM engine: tokens in, token deltas out.

Both handlers use it through `ridgeline.worker_runtime.host`. vLLM runs the engine in a child process; this object is
its front end and runs in the worker's event loop.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import KVTransferConfig, ModelConfig, SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from ridgeline.contracts.errors import AdapterRefused, EngineFailed, InvalidTask
from ridgeline.contracts.handoff import KvHandoff, KvLayout, TransferResult
from ridgeline.contracts.tasks import Adapter, LegTiming, TokenDelta
from ridgeline.contracts.workers import StepModel
from ridgeline.engine.adapter_files import AdapterCopies, require_fit
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.connector.events import TransferEvents
from ridgeline.engine.connector.messages import FORETOLD, STALE_HANDOFFS, STEP_MODEL, TRANSFER_EVENTS
from ridgeline.engine.connector.transferable_models import UnsupportedModel, why_unsupported
from ridgeline.engine.grammars import choose_backend
from ridgeline.engine.request import logprobs
from ridgeline.engine.root_cause import CauseFile, output_place, sentence_of
from ridgeline.engine.speculation import ARGUMENT, speculates
from ridgeline.engine.stall import Activity, Doing, StallWatch
from ridgeline.engine.step_scheduler import bound_steps
from ridgeline.engine.vllm_arguments import engine_values
from ridgeline.engine.vllm_workarounds.bounded_grammars import bound_validation
from ridgeline.engine.vllm_workarounds.core_loop import LIMIT_STEPS, OFFER
from ridgeline.engine.vllm_workarounds.engine_process import cause_file, one_tokenizer, prepare_engine_processes
from ridgeline.engine.vllm_workarounds.forked import fork_engines
from ridgeline.kv_transfer.service import PairedTransport

PAIR_S = 20.0
PAIR_POLL_S = 0.02
END_WITHIN_S = 2.0
"""How long the engine's process may take to end by itself before it is killed, which loses nothing: its requests have
ended, and the system frees what it holds. vLLM waits for 5 s; two engines on an H100, ended in turn, took 8."""


class EngineStats(StatLoggerBase):
    """Keeps the newest statistics, which vLLM sends along with each step's outputs."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.counters: dict[str, float] = {}
        self.step_model: StepModel | None = None
        """How long the engine's steps take; None before the first."""
        self.stale_handoffs: list[str] = []
        self.transfer_events = TransferEvents()
        self.stall = StallWatch()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Store the statistics; vLLM calls it for every batch of outputs, in this process."""
        self.stall.moved()
        if scheduler_stats is None:
            return
        stats = dict(scheduler_stats.kv_connector_stats or {})
        if (expected_s := stats.pop(FORETOLD, None)) is not None:
            self.stall.foretold(expected_s)
            if not stats:  # sent at once, before a long step
                return
        if stats.keys() == {TRANSFER_EVENTS}:  # the same
            self.transfer_events.deliver(stats[TRANSFER_EVENTS])
            return
        self.running = scheduler_stats.num_running_reqs
        self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self.kv_usage = scheduler_stats.kv_cache_usage
        if stats:
            self.transfer_events.deliver(stats.pop(TRANSFER_EVENTS, ()))
            self.stale_handoffs = list(stats.pop(STALE_HANDOFFS, ()))
            if (model := stats.pop(STEP_MODEL, None)) is not None:
                self.step_model = msgspec.convert(model, StepModel)
            self.counters = stats

    def log_engine_initialized(self) -> None:
        """Do nothing: there is nothing to log."""


class VllmEngine:
    """One engine. Start it once, call `generate` concurrently, and `close` it before the process ends."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.stats = EngineStats(None)
        self.keeps_every_token = True
        """Whether a prompt's last token can be computed again from the prompt's own KV; known once described."""
        self.prefix_block_tokens = 0
        """Tokens by which the prefix cache has hits, and 0 without one; known once described."""
        self.adapters: dict[str, Adapter] = {}
        """The LoRA adapters that it can be asked for, by key."""
        self._copies = AdapterCopies()
        self._unloading: dict[str, asyncio.TimerHandle] = {}
        self._activity = Activity(computes_here=config.on_cpu)
        self._llm: AsyncLLM | None = None
        self._cause: CauseFile | None = None
        self._to_release: list[str] = []
        self._releasing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Load the model and allocate the KV cache; blocks for the 10 to 60 s this takes. Needs a running event loop.

        Raises UnsupportedModel before anything is loaded, and EngineFailed with the root cause of anything else.
        """
        args = AsyncEngineArgs(**_engine_args(self.config))
        try:
            vllm_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        except Exception as error:
            why = _why_not_inspected(error) or sentence_of(error)
            raise EngineFailed(f"{self.config.model_path} cannot be served: {why}") from error
        self._require_supported(vllm_config.model_config, vllm_config.speculative_config)
        self._cause = cause_file(vllm_config)
        try:
            self._load(args, vllm_config)
        except Exception as error:
            why = self._cause.why_not_loaded(error)
            self._cause.remove()
            raise EngineFailed(f"the engine could not load: {why}{output_place()}") from error

    def _load(self, args: AsyncEngineArgs, vllm_config: VllmConfig) -> None:
        bound_steps(vllm_config.scheduler_config)
        if self.config.on_cpu and self.config.tensor_parallel_size == 1:
            fork_engines()
        prepare_engine_processes()
        with one_tokenizer():
            self._llm = AsyncLLM.from_vllm_config(
                vllm_config,
                enable_log_requests=args.enable_log_requests,
                disable_log_stats=args.disable_log_stats,
                stat_loggers=[lambda vllm_config, index: self.stats],
            )
        choose_backend(vllm_config.structured_outputs_config, self._llm.renderer.tokenizer)
        bound_validation()

    def _require_supported(self, model: ModelConfig, speculation: SpeculativeConfig | None) -> None:
        if model.runner_type != "generate":
            what = f"it is a model for {model.runner_type} (embeddings, scores), and makes no text"
            raise UnsupportedModel(f"{self.config.model_path} cannot be served: {what}.")
        reason = why_unsupported(
            model.hf_text_config.to_dict(),
            on_cpu=self.config.on_cpu,
            prefix_caching=_caches_prefixes(self.config),
            speculates=self.config.hands_over and speculates(self.config.passed),
        )
        if reason is None and speculation is not None:
            reason = _why_no_draft(model, speculation, self.config.passed[ARGUMENT]["method"])
        if reason is not None:
            raise UnsupportedModel(f"{self.config.model_path} cannot be served: {reason}.")

    @property
    def num_kv_blocks(self) -> int:
        """Blocks in the paged KV cache."""
        assert self._llm is not None
        return int(self._llm.vllm_config.cache_config.num_gpu_blocks or 0)

    async def describe(self) -> tuple[KvLayout, list[str]]:
        """Return the KV layout, and for each rank the address at which its blocks can be fetched.

        Called once, before the first request.
        """
        assert self._llm is not None
        await self._llm.collective_rpc("ridgeline_prepare")
        described = await self._llm.collective_rpc("ridgeline_describe")
        layout = msgspec.convert(described[0][0], KvLayout)
        self.keeps_every_token = not layout.groups
        self.prefix_block_tokens = int(described[0][2])
        return layout, [str(address) for _, address, _ in described]

    async def pair(self, addresses: list[str], transport: str | None = None) -> dict[str, PairedTransport | str]:
        """Pair with these sources and forget all others.

        Returns for each source the transport chosen, or a sentence that says why there is none. `transport` overrides
        the configured one. Of several ranks the first one's answer counts, unless another refuses. Raises TimeoutError.
        """
        ticket = secrets.token_hex(8)
        async with asyncio.timeout(PAIR_S):
            while None in (by_rank := await self._pair_step(ticket, addresses, transport)):  # noqa: ASYNC110
                await asyncio.sleep(PAIR_POLL_S)
        paired: dict[str, PairedTransport | str] = {}
        for answers in reversed(by_rank):
            paired.update({address: _paired(answer) for address, answer in answers.items()})
        for answers in by_rank:
            paired.update({address: answer for address, answer in answers.items() if isinstance(answer, str)})
        return paired

    async def close_peer_mappings(self) -> None:
        """Close the KV caches of other engines that are open here; an engine that does not answer has none."""
        with suppress(EngineDeadError, TimeoutError):
            await self.pair([])

    async def _pair_step(self, *question: object) -> list[Any]:
        assert self._llm is not None
        by_rank: list[Any] = await self._llm.collective_rpc("ridgeline_pair", args=question)
        return by_rank

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
        """Yield one delta per engine step; closing the generator aborts the request.

        Raises InvalidTask for parameters that the engine refuses, EngineFailed when the engine cannot continue.
        """
        assert self._llm is not None
        require_in_vocabulary(prompt_token_ids, self._llm.model_config.get_vocab_size())
        outputs = self._llm.generate(
            tokens_input(prompt_token_ids, cache_salt=cache_salt),
            params,
            request_id,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
            lora_request=None if adapter is None else self._lora_request(adapter),
        )
        try:
            async with aclosing(outputs) as stream:
                async for output in stream:
                    _require_no_error(output.outputs[0], params)
                    yield _delta(request_id, output)
        except (EngineDeadError, EngineGenerateError) as error:
            if isinstance(
                error.__cause__, ValueError | TypeError | OverflowError
            ):  # a check by vLLM's front end, before the engine
                raise InvalidTask(str(error.__cause__)) from error
            raise self._failure(error) from error
        except (VLLMClientError, ValueError) as error:
            raise InvalidTask(str(error)) from error

    def _lora_request(self, adapter: Adapter) -> LoRARequest:
        """Return what vLLM knows it by: name and path are in the hash of its KV blocks, and both have the digest."""
        if adapter.key not in self.adapters:
            raise InvalidTask(f"{self.config.worker_id} does not have the adapter {adapter.name}: it has been unloaded")
        return LoRARequest(adapter.key, adapter.number, str(self._copies.folder(adapter.digest)))

    @property
    def adapter_room(self) -> tuple[int, int]:
        """How many LoRA adapters a step may have, and how many are kept in memory; zeros if it takes none."""
        assert self._llm is not None
        lora = self._llm.vllm_config.lora_config
        return (0, 0) if lora is None else (lora.max_loras, lora.max_cpu_loras or lora.max_loras)

    async def load_adapter(self, name: str, path: str, digest: str = "") -> Adapter:
        """Take a LoRA adapter in: the one with this digest, or whatever lies at the path.

        The path may also name one on the hub, as for vLLM. Raises AdapterRefused or EngineFailed.
        """
        assert self._llm is not None
        adapter = Adapter(name=name, digest=await asyncio.to_thread(self._kept_copy, path, digest), path=path)
        known = adapter.key in self.adapters
        self.adapters[adapter.key] = adapter
        if (timer := self._unloading.pop(adapter.key, None)) is not None:
            timer.cancel()
        try:
            await self._llm.add_lora(self._lora_request(adapter))  # what vLLM alone can check, and in memory at once
        except EngineDeadError as error:
            raise self._failure(error) from error
        except Exception as error:
            if not known:
                await self._unload(adapter)
            raise AdapterRefused(f"vLLM cannot load the adapter in {path}: {sentence_of(error)}") from error
        return adapter

    def _kept_copy(self, path: str, digest: str) -> str:
        assert self._llm is not None
        lora = self._llm.vllm_config.lora_config
        if lora is None:
            raise AdapterRefused("the engines take no adapters: set engine_args.enable_lora to true, and start again")
        if digest and self._copies.folder(digest).is_dir():
            return self._copies.keep(Path(path), digest)
        try:
            folder = Path(get_adapter_absolute_path(path))
            require_fit(folder, lora.max_lora_rank, self._llm.model_config.hf_text_config.to_dict())
        except OSError as error:  # a path that no folder can have, or the hub is out of reach
            why = f"{path} is no folder, and cannot be had from the hub ({sentence_of(error)})"
            raise AdapterRefused(f"{why}: name a folder that is on every node with workers") from error
        return self._copies.keep(folder, digest)

    def unload_adapter(self, adapter: Adapter, after_s: float) -> None:
        """Forget an adapter once requests that still run with it have ended, after so many seconds."""
        if adapter.key in self.adapters and adapter.key not in self._unloading:
            self._unloading[adapter.key] = asyncio.get_running_loop().call_later(
                after_s, lambda: asyncio.ensure_future(self._unload(adapter))
            )

    async def _unload(self, adapter: Adapter) -> None:
        self._unloading.pop(adapter.key, None)
        del self.adapters[adapter.key]
        with suppress(EngineDeadError):
            if self._llm is not None:
                await self._llm.remove_lora(adapter.number)
        if all(other.digest != adapter.digest for other in self.adapters.values()):
            await asyncio.to_thread(self._copies.drop, adapter.digest)

    @property
    def offered_adapters(self) -> tuple[Adapter, ...]:
        """The adapters that are not being unloaded."""
        return tuple(adapter for key, adapter in self.adapters.items() if key not in self._unloading)

    def release_own(self, handoff_id: str) -> None:
        """Free the blocks of our own hand-off that no router will release, even if it is published only later."""
        self._to_release.append(handoff_id)
        if self._releasing is None:
            self._releasing = asyncio.create_task(self._release_own(), name="release-own-hand-offs")

    async def _release_own(self) -> None:
        try:
            while self._to_release and self._llm is not None:
                handoff_ids, self._to_release = self._to_release, []
                await self._llm.collective_rpc("ridgeline_release", args=(handoff_ids,))
        except EngineDeadError:
            self._to_release.clear()  # its blocks are gone with the engine
        finally:
            self._releasing = None

    async def offer(
        self, handoff_id: str, token_ids: list[int], cache_salt: str | None = None, adapter: Adapter | None = None
    ) -> KvHandoff | None:
        """Offer one reader what the prefix cache has of a prompt, between two steps; None if that is nothing.

        Raises EngineFailed, and InvalidTask for an adapter that has been unloaded.
        """
        assert self._llm is not None
        lora = None if adapter is None else self._lora_request(adapter)
        known_as = None if lora is None else (lora.lora_name, lora.lora_int_id, lora.lora_path)
        try:
            found = await self._llm.engine_core.call_utility_async(OFFER, handoff_id, token_ids, cache_salt, known_as)
        except EngineDeadError as error:
            raise self._failure(error) from error
        return None if found is None else KvHandoff.from_params(found)

    async def limit_steps(self, max_num_seqs: int, max_num_batched_tokens: int, step_target_s: float = 0.0) -> None:
        """Limit what the engine's next steps hold; the limits it was started with bound both.

        While sequences decode, a step computes only as many prompt tokens as fit `step_target_s`; 0: no such target.
        Sequences that run already are not stopped. Raises EngineFailed.
        """
        assert self._llm is not None
        try:
            await self._llm.engine_core.call_utility_async(
                LIMIT_STEPS, max_num_seqs, max_num_batched_tokens, step_target_s
            )
        except EngineDeadError as error:
            raise self._failure(error) from error

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; return False if some are in use. For tests and cold measurements."""
        assert self._llm is not None
        return bool(await self._llm.reset_prefix_cache())

    @property
    def transfer_events(self) -> TransferEvents:
        """Messages of the connector about hand-offs whose requests run."""
        return self.stats.transfer_events

    @property
    def failed(self) -> bool:
        """True once the engine process has ended or reported a fatal error."""
        return self._llm is not None and self._llm.errored

    def doing(self) -> Doing:
        """Return what its processes have done since the last call; ask only while a step is overdue."""
        return self._activity.doing()

    @property
    def ending(self) -> str:
        """How the engine process ended: by which signal or with which status, why, and where its output is."""
        return why + output_place() if (why := self._why_ended()) else ""

    def _why_ended(self) -> str:
        if self._llm is None or self._cause is None or not self.failed:
            return ""
        manager = self._llm.engine_core.resources.engine_manager
        codes = [process.exitcode for process in getattr(manager, "processes", ())]
        return self._cause.why_ended(next((code for code in codes if code is not None), None))

    def _failure(self, error: Exception) -> EngineFailed:
        """Return the error for clients: vLLM's own only points at a log."""
        return EngineFailed(f"the engine of {self.config.worker_id} failed: {self._why_ended() or sentence_of(error)}")

    def close(self) -> None:
        """End the engine process. Calling it again does nothing."""
        if self._llm is not None:
            self._llm.shutdown(timeout=END_WITHIN_S)
            self._llm = None
        self._copies.close()
        if self._cause is not None:
            self._cause.remove()


def _why_not_inspected(error: Exception) -> str:
    """Return why vLLM could not import a model's code, which it says in a log only; empty if that was not it."""
    named = re.search(r"architectures \[(.*?)\] failed to be inspected", str(error))
    for name in re.findall(r"\w+", named[1]) if named else ():
        module = getattr(ModelRegistry.models.get(name), "module_name", "")
        try:
            import_module(module or "vllm")
        except Exception as missing:  # noqa: BLE001 - it is what vLLM has met
            return sentence_of(missing)
    return ""


def _why_no_draft(model: ModelConfig, speculation: SpeculativeConfig, method: str) -> str | None:
    """Return why drafts cannot be had so: layers that draft lie beside the model's, whose blocks they share."""
    if speculation.method != method:  # vLLM has recognised a drafter of another kind
        return f"{speculation.model} drafts by method {speculation.method}, not {method}"
    if not speculation.uses_draft_kv_cache():
        return None
    draft = speculation.draft_model_config
    ours, drafts = (f"{one.get_total_num_kv_heads()} KV heads of {one.get_head_size()}" for one in (model, draft))
    if ours == drafts and model.dtype == draft.dtype:
        return None
    return (
        f"its drafts' layers have {drafts} in {draft.dtype}, not {ours} in {model.dtype}, and so KV blocks of another "
        "size: choose drafts whose KV heads are equal, or method ngram"
    )


def require_in_vocabulary(token_ids: list[int], vocabulary_tokens: int) -> None:
    """Raise InvalidTask for a token outside the vocabulary: vLLM's engine does not check tokens and would fail."""
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token < vocabulary_tokens:
            raise InvalidTask(f"token {token} is not one of the model's {vocabulary_tokens}")


def _require_no_error(completion: Any, params: SamplingParams) -> None:
    """Raise InvalidTask if the engine has ended the request because of its grammar."""
    if completion.finish_reason == "error" and params.structured_outputs is not None:
        unsaid = "structured output: the grammar cannot be compiled: simplify it, or check its syntax"
        raise InvalidTask(str(completion.stop_reason or unsaid))


def _caches_prefixes(config: EngineConfig) -> bool:
    return config.passed.get("enable_prefix_caching") is not False


def _engine_args(config: EngineConfig) -> dict[str, Any]:
    args: dict[str, Any] = {
        **engine_values(config.passed),
        "model": config.model_path,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": _caches_prefixes(config),
        "disable_log_stats": True,
        # The default multiprocess executor spins at 100 % of a core while idle; on a CPU that core is the engine's.
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        "worker_extension_cls": "ridgeline.engine.worker_extension.RidgelineWorkerExtension",
        "kv_transfer_config": KVTransferConfig(
            kv_connector="RidgelineConnector",
            kv_connector_module_path="ridgeline.engine.connector.kv_connector",
            kv_role="kv_both",
            engine_id=f"{config.worker_id}-{config.incarnation}",
            # A failed transfer costs a local prefill, not the request; it is counted by reason.
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "transfer": msgspec.to_builtins(config.transfer),
                "hands_over": config.hands_over,
                "share_kv_cache": config.on_cpu,
                "step_target_s": config.step_target_s,
            },
        ),
    }
    if config.repeats_tokens:
        args["logits_processors"] = ["ridgeline.engine.request.forced_tokens:ForcedTokens"]
    if config.kv_cache_bytes_per_rank is not None:
        args["kv_cache_memory_bytes"] = config.kv_cache_bytes_per_rank
    return args


def _paired(answer: Any) -> PairedTransport | str:
    return answer if isinstance(answer, str) else PairedTransport(answer["transport"], answer["why"])


def _delta(request_id: str, output: Any) -> TokenDelta:
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    finished = bool(output.finished)
    transfer = output.kv_transfer_params or {}
    return TokenDelta(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=logprobs.pack_sampled(completion.logprobs, token_ids) if completion.logprobs else None,
        prompt_logprobs=(
            logprobs.pack_prompt(output.prompt_logprobs, output.prompt_token_ids) if output.prompt_logprobs else None
        ),
        finished=finished,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        handoff=KvHandoff.from_params(transfer["handoff"]) if "handoff" in transfer else None,
        timing=_timing(output.metrics, transfer) if finished else None,
    )


def _timing(stats: Any, transfer: dict[str, Any]) -> LegTiming | None:
    if stats is None or not stats.scheduled_ts:
        return None
    result = msgspec.convert(transfer["result"], TransferResult) if "result" in transfer else None
    return LegTiming(
        queue_s=max(0.0, stats.scheduled_ts - stats.queued_ts),
        first_token_s=max(0.0, stats.first_token_ts - stats.scheduled_ts),
        compute_s=max(0.0, stats.last_token_ts - stats.scheduled_ts),
        transfer_result=result,
    )
