"""vLLM's EngineClient without an engine: vLLM renders, and requests run through the orchestrator.

vLLM's API server app calls `generate`. vLLM's own InputProcessor and OutputProcessor make tokens and text, so
templates, tool parsers, stop strings, log-probabilities and usage counts are vLLM's. This class does what lies in
between.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from http import HTTPStatus
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from ridgeline.contracts.errors import EngineError, InvalidTask
from ridgeline.contracts.tasks import Adapter
from ridgeline.engine.grammars import choose_backend, refusal
from ridgeline.engine.request import sampling
from ridgeline.engine.vllm_workarounds.bounded_grammars import bound_validation
from ridgeline.router.dispatch.orchestrator import DeadlineExceeded, Orchestrator
from ridgeline.router.dispatch.request import Sampling, SequenceRequest
from ridgeline.router.fleet.request_route import NoWorker
from ridgeline.router.flow.admission import Admission, AdmissionTicket
from ridgeline.router.flow.admission_rules import Ask, ListSoFar, Refused
from ridgeline.router.front.http.context import MAX_REQUEST_ID_CHARACTERS, current
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.front.text_stream import TextSink
from ridgeline.router.front.text_turns import TextTurns
from ridgeline.router.front.vllm_workarounds.bodies import bound_texts, refuse_half_pairs
from ridgeline.router.front.vllm_workarounds.unread import CountingCollector

logger = logging.getLogger(__name__)

SUPPORTED_TASKS = ("generate",)


class RouterEngineClient(EngineClient):
    """The engine client; one per router process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        admission: Admission,
        max_grammar_bytes: int,
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
    ) -> None:
        """`adapters` returns the LoRA adapters that requests can choose now, by name."""
        self._adapters = adapters
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        bound_texts(self.renderer, self.model_config.max_model_len)
        choose_backend(vllm_config.structured_outputs_config, self.renderer.tokenizer)
        bound_validation()
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._outputs = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self._admission = admission
        self._orchestrator: Orchestrator | None = None
        self.turns = TextTurns()
        """The turns in which streams become text."""
        self._conversions = asyncio.Lock()
        self._groups: dict[str, list[asyncio.Task[None]]] = {}
        self._collectors: set[CountingCollector] = set()
        self._unread: set[CountingCollector] = set()
        """Collectors of requests whose sequences have ended, but whose clients have not read everything."""
        self._max_grammar_bytes = max_grammar_bytes

    def close_admission(self) -> None:
        """Refuse every new request with 503 from now on."""
        self._admission.state = "draining"

    @property
    def draining(self) -> bool:
        """Whether admission was closed."""
        return self._admission.state == "draining"

    @property
    def accepted(self) -> int:
        """The number of sequences that have not ended, plus requests whose clients have not read everything."""
        return self._admission.sequences + len(self._unread)

    @property
    def streams(self) -> list[CountingCollector]:
        """The collectors of all requests that are being answered."""
        return list(self._collectors)

    def end_all(self, reason: str) -> None:
        """End every running request with an error: 503, or an error event in a stream."""
        for collector in self._collectors:
            collector.put(GracefulHTTPError(reason, HTTPStatus.SERVICE_UNAVAILABLE))

    def bind(self, orchestrator: Orchestrator) -> None:
        """Connect the workers; until then every request gets 503."""
        self._orchestrator = orchestrator
        self._admission.state = "open"

    # --- what serving calls for every request

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse a request before its prompt is tokenised and before a streaming response has begun.

        Raises GracefulHTTPError (429, 503) or VLLMValidationError (400).
        """
        with _as_http():
            self._admission.check(current().client, n)

    def generate(  # noqa: PLR0913 - vLLM's signature
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Admit the request and return its outputs; closing or cancelling them aborts it on all workers.

        Raises at once rather than with the first output, so that a refusal has its HTTP status in a streaming
        response too: GracefulHTTPError (429, 503) or VLLMValidationError (400).
        """
        _check_request_id(request_id)
        structured = sampling_params.structured_outputs
        if structured is not None and (why := refusal(structured, self._max_grammar_bytes)) is not None:
            raise VLLMValidationError(why, parameter="structured_outputs")
        request = self.input_processor.process_inputs(
            request_id,
            prompt,
            sampling.without_client_transfer_keys(sampling_params),
            supported_tasks=SUPPORTED_TASKS,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            data_parallel_rank=data_parallel_rank,
        )
        adapter = None if lora_request is None else self._adapters().get(lora_request.lora_name)
        if lora_request is not None and adapter is None:  # unloaded since vLLM has looked it up
            raise GracefulHTTPError(f"The model `{lora_request.lora_name}` does not exist.", HTTPStatus.NOT_FOUND)
        if request.mm_features:
            raise VLLMValidationError("multimodal inputs are not supported by this server")
        validate_cache_salt(request.cache_salt)  # vLLM does, but not for scores
        refuse_half_pairs(request.cache_salt or "", "cache_salt")
        request.reasoning_ended = reasoning_ended
        request.reasoning_parser_kwargs = reasoning_parser_kwargs
        with _as_http():  # while a streaming response can still have a status
            wanted = sampling_of(request.params)
            sampling.packed(reasoning_parser_kwargs, "chat_template_kwargs")
        self.input_processor.assign_request_id(request)  # this keeps the client's id for the answer
        request.request_id = f"r-{secrets.token_hex(8)}"  # short: every token between router and workers carries it
        if prompt_text is None:
            prompt_text, _, _ = extract_prompt_components(self.model_config, prompt)
        context = current()
        client = context.client
        with _as_http():
            ask = _ask(request, self.model_config.get_vocab_size(), context.list_so_far)
            ticket = self._admission.admit(client, ask)
        context.list_so_far = ticket.list_so_far
        context.trace_headers = trace_headers or {}
        context.taken_in()
        return self._serve(request, wanted, adapter, request_id, prompt_text, client, ticket)

    async def _serve(
        self,
        request: EngineCoreRequest,
        wanted: Sampling,
        adapter: Adapter | None,
        request_id: str,
        prompt_text: str | None,
        client: str,
        ticket: AdmissionTicket,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of an admitted request. It is never started if its client has left already."""
        tasks: list[asyncio.Task[None]] = []
        context, finished = current(), False

        def sequence_ended(task: asyncio.Task[None]) -> None:
            _tell_of_a_failure(collector, task)
            ticket.sequence_ended(left=task.cancelled() and not (finished or context.failed))
            if collector in self._collectors and all(one.done() for one in tasks):
                self._unread.add(collector)

        collector = CountingCollector(request.params.output_kind, request.request_id)
        for number, child in enumerate(self._register(request, prompt_text, collector)):
            its_own = wanted if child is request else sampling_of(child.params)
            known_as = request_id if child is request else f"{request_id}[{number}]"
            run = self._run(child, its_own, adapter, collector, client, known_as)
            task = asyncio.create_task(run, name=child.request_id)
            task.add_done_callback(sequence_ended)
            tasks.append(task)
        self._groups.setdefault(request_id, []).extend(tasks)
        self._collectors.add(collector)
        context.collectors.add(collector)
        try:
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        except Exception:  # a client that leaves has this cancelled or closed, which is none
            context.failed = True
            raise
        finally:
            self._groups.pop(request_id, None)
            for kept in (self._collectors, self._unread, context.collectors):
                kept.discard(collector)
            for task in () if finished else tasks:  # those that have finished are about to end by themselves
                task.cancel()
            # By the parent's id: aborting the n children one by one would leave the parent in vLLM's table forever.
            self._outputs.abort_requests([request.request_id], internal=True)

    def _register(
        self, request: EngineCoreRequest, prompt_text: str | None, collector: RequestOutputCollector
    ) -> list[EngineCoreRequest]:
        """Register the request, or its n children, with the output processor."""
        if request.params.n == 1:
            self._outputs.add_request(request, prompt_text, None, 0, collector)
            return [request]
        parent = ParentRequest(request)
        children = []
        for index in range(request.params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self._outputs.add_request(child, prompt_text, parent, index, collector)
            children.append(child)
        return children

    async def _run(
        self,
        request: EngineCoreRequest,
        wanted: Sampling,
        adapter: Adapter | None,
        collector: RequestOutputCollector,
        client: str,
        client_request_id: str,
    ) -> None:
        """Run one sequence. Errors go to the collector, which raises them in `generate`."""
        assert self._orchestrator is not None
        sequence = SequenceRequest(
            request_id=request.request_id,
            prompt_token_ids=list(request.prompt_token_ids or []),
            sampling=wanted,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            cache_salt=request.cache_salt,
            adapter=adapter,
            client_request_id=client_request_id,
            http_request_id=current().request_id,
            trace_headers=current().trace_headers,
            timeout_s=current().timeout_s,
            ttft_limit_s=current().ttft_limit_s,
            tpot_limit_s=current().tpot_limit_s,
            head_read_s=current().head_read_s,
            client=client,
        )
        text = TextSink(self._outputs, sequence, request.params, self.turns, self._conversions)
        try:
            await self._orchestrator.run(sequence, text.emit)
            await text.flushed()
        except InvalidTask as error:
            collector.put(VLLMValidationError(str(error)))
        except DeadlineExceeded as error:
            collector.put(GracefulHTTPError(str(error), HTTPStatus.GATEWAY_TIMEOUT))
        except (EngineError, NoWorker) as error:
            collector.put(GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE))
        finally:
            text.close()

    async def abort(self, request_id: str | list[str], internal: bool = False) -> None:
        """Cancel a request by the id that `generate` was given."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            for task in self._groups.pop(one, []):
                task.cancel()
            self._outputs.abort_requests([one], internal=internal)

    # --- the rest of vLLM's contract: this router has no engine of its own

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        return RuntimeError("the router is shutting down")

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return SUPPORTED_TASKS

    async def _no(self, *args: Any, **kwargs: Any) -> bool:
        return False

    is_tracing_enabled = is_sleeping = is_paused = _no

    async def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    check_health = do_log_stats = reset_mm_cache = reset_encoder_cache = _nothing
    notify_kv_transfer_request_rejected = _nothing

    def shutdown(self, timeout: float | None = None) -> None: ...

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        if args or kwargs:
            raise VLLMValidationError("pooling is not supported by this server")
        yield  # makes this function the generator that vLLM expects

    async def _not_offered(self, *args: Any, **kwargs: Any) -> Any:
        raise VLLMValidationError("this operation belongs to one engine; the router serves several")

    start_profile = stop_profile = reset_prefix_cache = sleep = wake_up = _not_offered
    release_kv_cache_memory = add_lora = pause_generation = resume_generation = _not_offered


def _check_request_id(request_id: str) -> None:
    """Raise VLLMValidationError if the id is too long, or could be in no answer and no explanation."""
    refuse_half_pairs(request_id, "the request id")
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise VLLMValidationError(
            f"the request id (X-Request-Id or request_id) has {len(request_id)} characters, with what vLLM adds "
            f"before and after it; the limit is {MAX_REQUEST_ID_CHARACTERS}: send a shorter one"
        )


def _ask(request: EngineCoreRequest, vocabulary_size: int, before: ListSoFar) -> Ask:
    params = request.sampling_params
    assert params is not None
    prompt_tokens, output_tokens = len(request.prompt_token_ids or []), params.max_tokens or 0

    def entries(wanted: int | None) -> int:
        """Return the entries at each position: the token's own and those asked for."""
        return 0 if wanted is None else vocabulary_size if wanted < 0 else wanted + 1

    each = prompt_tokens * entries(params.prompt_logprobs)
    if params.output_kind is RequestOutputKind.FINAL_ONLY:  # a stream's entries come token by token, not in one piece
        each += output_tokens * entries(params.num_logprobs)
    return Ask(params.n, prompt_tokens, output_tokens, logprobs=params.n * each, before=before)


def _tell_of_a_failure(collector: RequestOutputCollector, task: asyncio.Task[None]) -> None:
    """End a request on an unexpected error, since its client would otherwise wait forever."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("request %s failed", task.get_name(), exc_info=error)
        collector.put(GracefulHTTPError("the router failed to serve this request", HTTPStatus.INTERNAL_SERVER_ERROR))


@contextmanager
def _as_http() -> Iterator[None]:
    """Convert a refusal to the exception that vLLM's server understands."""
    try:
        yield
    except InvalidTask as error:
        raise VLLMValidationError(str(error)) from None
    except Refused as refused:
        if refused.status is HTTPStatus.BAD_REQUEST:
            raise VLLMValidationError(str(refused)) from None
        current().retry_after_s = refused.retry_after_s
        raise GracefulHTTPError(str(refused), refused.status) from None
