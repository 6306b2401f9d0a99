"""vLLM's scheduler, with as many prompt tokens in a step as fit a time while sequences decode.

`ridgeline.engine.vllm_engine` names the class in vLLM's setting `scheduler_cls`, so vLLM makes it in the engine
process. What it does otherwise than vLLM's comes before `schedule`: it lowers `max_num_scheduled_tokens`, which vLLM
reads in every step, and puts what decodes before what does not. Without a target, and without a sequence that has a
limit, it changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.utils import strip_speculative_padding

from ridgeline.decode_worker.pacing.bound import Prompt, most_prefill_tokens
from ridgeline.decode_worker.pacing.model import StepClock, StepFit, StepLoad
from ridgeline.decode_worker.pacing.slack import DecodeSteps, TpotSlack
from ridgeline.engine.connector.messages import FORETOLD, STEP_MODEL
from ridgeline.engine.request.sampling import FORCED, SURE_TOKENS, TPOT_LIMIT
from ridgeline.engine.stall import FORETOLD_FROM_S

GROWTH: Final = 2
"""A bounded step has at most this many times the prompt tokens of the longest one that has been measured."""


@dataclass
class _Batch:
    """What could be in the next step."""

    decoding: list[Request] = field(default_factory=list)
    joining: list[Request] = field(default_factory=list)
    """Sequences whose KV has arrived: vLLM takes them from its queue after all that run, and before other prompts."""
    prompts: list[Request] = field(default_factory=list)
    """Prompts that are computed in part."""
    arrives: bool = False
    """Whether a sequence needs blocks, so that its KV can be fetched. vLLM gives it some, and no token, if the prompts
    that run leave a part of the budget."""

    @property
    def needs_a_share(self) -> bool:
        """Whether prompts must leave a part of the budget to what comes after them."""
        return bool(self.joining) or self.arrives

    @property
    def sequences(self) -> Iterator[Request]:
        """Those that get a token."""
        yield from self.decoding
        yield from self.joining


class ItlBoundedScheduler:
    """What `BoundedScheduler` and `BoundedAsyncScheduler` add to vLLM's; nothing of it waits for anything."""

    step_target_s = 0.0
    """While sequences decode, a step should take no longer than this; 0: no target. Set between two steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_fit = StepFit()
        self._step_clock = StepClock()
        self._slack = TpotSlack()
        self._shortened = 0
        self._reported: Any = None
        if (connector := getattr(self, "connector", None)) is not None:
            connector.scheduler.report_also(self._report)
            self.step_target_s = connector.step_target_s

    def _report(self) -> dict[str, Any]:
        """Return what travels with the connector's counters; the model only after it has changed."""
        report: dict[str, Any] = {
            "step_target_seconds": self.step_target_s,
            "shortened_chunks_total": float(self._shortened),
            FORETOLD: self._foretold_s(),
        }
        if self._step_fit.model is not self._reported:
            self._reported = self._step_fit.model
            report[STEP_MODEL] = msgspec.to_builtins(self._reported)
        return report

    def _foretold_s(self) -> float:
        """Return how long the steps in flight are expected to take; 0 if there is none."""
        return max(map(self._step_fit.foretell_s, self._step_clock.loads), default=0.0)

    # --- vLLM's methods

    def add_request(self: Any, request: Request) -> None:
        """Take a request, and its limit if it has one."""
        extra = (request.sampling_params.extra_args if request.sampling_params else None) or {}
        if (limit_s := float(extra.get(TPOT_LIMIT, 0.0))) > 0.0:
            sure_tokens = float(extra.get(SURE_TOKENS, 0.0))
            self._slack.expect(request.request_id, limit_s, len(extra.get(FORCED, ())), sure_tokens)
        super().add_request(request)  # type: ignore[misc]
        if limit_s > 0.0 and self.connector is not None and self.connector.scheduler.awaits_kv(request.request_id):
            # It must not wait for the prompts that came before it, since its fetch begins when it has its blocks. vLLM
            # takes requests of this queue first.
            self.waiting.remove_request(request)
            self.kv_holding_waiting.add_request(request)

    def schedule(self: Any, throttle_prefills: bool = False) -> Any:
        """Schedule a step as vLLM does, within what the targets allow."""
        began_s = time.monotonic()
        for request_id in self.finished_req_ids:
            self._slack.forget(request_id)
        if self.connector is not None and (arrived := self.connector.take_arrived()) is not None:
            self._update_from_kv_xfer_finished(arrived)
        by_block = self.need_mamba_block_aligned_split
        batch = self._batch() if self.step_target_s > 0.0 or self._slack or by_block else None
        tokens = None if batch is None else self._allowed_tokens(batch, began_s)
        if tokens is None and by_block:
            tokens = self.max_num_scheduled_tokens
        if batch is None or tokens is None:
            scheduled = super().schedule(throttle_prefills)  # type: ignore[misc]
        else:
            scheduled = self._schedule_within(batch, tokens, throttle_prefills)
        if scheduled.total_num_scheduled_tokens:
            load = self._load(scheduled)
            self._step_clock.begin(began_s, load, self._step_fit.predict_s(load))
            if self.connector is not None and (foretold_s := self._foretold_s()) > FORETOLD_FROM_S:
                self.connector.scheduler.tell_at_once({FORETOLD: foretold_s})
            if tokens is not None and load.prefill_tokens >= tokens:
                self._shortened += any(
                    self.requests[request_id].is_prefill_chunk for request_id in scheduled.num_scheduled_tokens
                )
        return scheduled

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Process a step's outputs as vLLM does, after learning from how long it took."""
        if scheduler_output.total_num_scheduled_tokens:
            ended = self._step_clock.end(time.monotonic())
            if ended is not None:
                self._step_fit.observe(*ended)
        if self.num_spec_tokens and model_runner_output.sampled_token_ids:
            outputs = model_runner_output
            self._count_drafts(scheduler_output, outputs.sampled_token_ids, outputs.req_id_to_index)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._step_clock.then(more_to_run=bool(scheduler_output.total_num_scheduled_tokens and self.running))
        return outputs

    # --- the bound

    def _batch(self: Any) -> _Batch:
        batch = _Batch()
        for request in self.running:
            (batch.decoding if _decodes(request, self.num_spec_tokens) else batch.prompts).append(request)
        seats = self.max_num_active_reqs - len(self.running)
        for request in self.kv_holding_waiting:
            if len(batch.joining) >= seats:
                break
            if self._joins(request):
                batch.joining.append(request)
            elif request.status == RequestStatus.WAITING and not request.num_computed_tokens:
                batch.arrives = True
        return batch

    def _joins(self: Any, request: Request) -> bool:
        if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            return bool(request.num_tokens - request.num_computed_tokens <= 1)
        arrived = request.request_id in self.finished_recving_kv_req_ids
        return arrived and request.request_id not in self.failed_recving_kv_req_ids

    def _allowed_tokens(self: Any, batch: _Batch, now_s: float) -> int | None:
        """Return how many prompt tokens the step may have; None if nothing bounds them."""
        now_s += self._step_clock.remaining_s(now_s)
        sequences = [*batch.sequences]
        planned_s = self._step_fit.model.planned_s(self.step_target_s)
        step_s = planned_s if sequences and self.step_target_s > 0.0 else math.inf
        context_tokens = sum(request.num_computed_tokens for request in sequences)
        if self._slack:
            for request in batch.joining:  # its KV came at any moment of the last step
                self._slack.joins(request.request_id, self._step_clock.took_s / 2)
            model = self._step_fit.model
            together_s, tokens = model.decode_s(len(sequences), context_tokens), model.made_per_sequence
            for request in sequences:
                made = request.num_output_tokens + request.num_output_placeholders
                bare = DecodeSteps(model.decode_s(1, request.num_computed_tokens), together_s, tokens)
                left = request.max_tokens - made
                step_s = min(step_s, self._slack.allowance_s(request.request_id, made, left, now_s, bare))
            bare = DecodeSteps(together_s=together_s, tokens=tokens)
            for request in self.kv_holding_waiting:
                step_s = min(step_s, self._slack.arrival_s(request.request_id, bare))
        if step_s == math.inf or not (batch.prompts or self.waiting or self.kv_holding_waiting):
            return None
        fit = self._step_fit
        if not fit.known:
            return int(self.block_size)
        measured = GROWTH * max(self.block_size // GROWTH, fit.longest_prefill_tokens)
        prompts = [Prompt(request.num_computed_tokens, _left(request)) for request in batch.prompts]
        prompts.append(Prompt(0, self.max_num_scheduled_tokens))  # one that waits, or none
        fits = most_prefill_tokens(fit.model, step_s, len(sequences), context_tokens, prompts)
        return min(int(measured), fits)

    def _schedule_within(self: Any, batch: _Batch, tokens: int, throttle_prefills: bool) -> Any:
        """Schedule with at most so many prompt tokens, and a token for everything that decodes or joins."""
        limits = (
            self.max_num_scheduled_tokens,
            self.scheduler_config.long_prefill_token_threshold,
            self.adaptive_long_prefill_threshold,
        )
        decoded = sum(_left(request) for request in batch.decoding)
        per_joining = 1 + self.num_spec_tokens
        share = per_joining * (len(batch.joining) + batch.arrives)
        tokens = min(tokens, max(1, limits[0] - decoded - share))
        self.running[:] = [*batch.decoding, *batch.prompts]  # vLLM hands the budget out in this order
        if batch.needs_a_share:  # they come after the prompts that run, which must leave it to them
            self._keep_prompts_within(batch.prompts, tokens)
        if batch.needs_a_share or self.need_mamba_block_aligned_split:
            # The second: a prompt with states goes on by whole blocks, unless this limit is below a block. Without the
            # limit it would wait for as long as the decoding sequences leave it less than one.
            threshold = max(tokens, per_joining)
            self.scheduler_config.long_prefill_token_threshold = min(limits[1] or threshold, threshold)
            self.adaptive_long_prefill_threshold = False  # else vLLM would raise it to a share of the whole budget
        self.max_num_scheduled_tokens = min(limits[0], decoded + share + tokens)
        try:
            return super().schedule(throttle_prefills)  # type: ignore[misc]
        finally:
            (
                self.max_num_scheduled_tokens,
                self.scheduler_config.long_prefill_token_threshold,
                self.adaptive_long_prefill_threshold,
            ) = limits

    def _keep_prompts_within(self: Any, prompts: list[Request], tokens: int) -> None:
        """Keep prompts out of the next step that would take more than is left of `tokens`; the first one may stay."""
        left = tokens
        for index, request in enumerate(prompts):
            if index and _left(request) > left:
                request.next_decode_eligible_step = self.current_step + 2
            else:
                left -= min(left, _left(request))

    # --- the measurement

    def _load(self: Any, scheduled: Any) -> StepLoad:
        """Return what a scheduled step computes; a last token of a prompt costs what a decoded one does."""
        prefill_tokens = decode_tokens = context_tokens = 0
        attended = 0.0
        per_sequence = 1 + self.num_spec_tokens
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            computed = self.requests[request_id].num_computed_tokens - tokens
            if tokens <= per_sequence:
                decode_tokens += tokens
                context_tokens += computed
            else:
                prefill_tokens += tokens
                attended += tokens * (computed + tokens / 2.0)
        return StepLoad(prefill_tokens, decode_tokens, context_tokens, attended)

    def _count_drafts(self: Any, scheduled: Any, sampled: list[list[int]], index_of: dict[str, int]) -> None:
        """Learn what a step with speculation made. The padding of vLLM's drafts is computed, but is no draft."""
        sequences = computed = made = drafted = 0
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            request, new = self.requests.get(request_id), len(sampled[index_of[request_id]])
            if not new or request is None or request.num_computed_tokens - tokens < request.num_prompt_tokens - 1:
                continue  # a prompt, or gone
            sequences, computed, made = sequences + 1, computed + tokens, made + new
            drafted += len(strip_speculative_padding(scheduled.scheduled_spec_decode_tokens.get(request_id, [])))
        self._step_fit.speculated(sequences, computed, made)
        if self.connector is not None:
            self.connector.scheduler.count_drafts(sequences, drafted, made - sequences)


def _left(request: Request) -> int:
    """Return how many tokens vLLM would compute for it in its next step, without any limit."""
    return int(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens)


def _decodes(request: Request, num_spec_tokens: int) -> bool:
    return _left(request) <= 1 + num_spec_tokens


class BoundedScheduler(ItlBoundedScheduler, Scheduler):  # type: ignore[misc] # vLLM is untyped here
    """For engines with one step in flight."""


class BoundedAsyncScheduler(ItlBoundedScheduler, AsyncScheduler):  # type: ignore[misc]
    """For engines with two: the next step is scheduled while one runs."""


def bound_steps(config: Any) -> None:
    """Have vLLM use the bounded form of the scheduler that it would choose by itself, if there is one.

    `config` is its SchedulerConfig, finished: whether two steps are in flight is decided while it is made.
    """
    if config.scheduler_cls is None:
        config.scheduler_cls = BoundedAsyncScheduler if config.async_scheduling else BoundedScheduler
