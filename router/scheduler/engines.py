"""Engines as a model has them: chunked prefill, paced steps, runs of decode steps, workers that share a device.

Steps with prompts are made one by one, as an engine bounds them. As long as nothing comes or ends, steps without
prompts are all alike but for one token a sequence: they are one run, whose length is known. So a request costs a few
events however many tokens it has.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.contracts.workers import StepModel
from ridgeline.decode_worker.pacing.bound import Prompt, most_prefill_tokens
from ridgeline.decode_worker.pacing.slack import DecodeSteps, TpotSlack
from ridgeline.router.scheduler.features import RequestFeatures, WorkerSpec


@dataclass(eq=False, slots=True)
class ModelledRequest:
    """One request, and what has become of it. Times are in seconds on one clock."""

    number: int
    arrival_s: float
    prompt_tokens: int
    """Those that no prefix cache has."""
    output_tokens: int
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf
    expected_output_tokens: float = 0.0
    """What a scheduler would expect; 0: it knows."""
    computed_tokens: int = 0
    made_tokens: float = 0
    placed_s: float = 0.0
    first_s: float = math.inf
    end_s: float = math.inf
    decode_worker: ModelledWorker | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return (self.end_s - self.first_s) / max(1, self.output_tokens - 1)

    @property
    def latency_s(self) -> float:
        """Time to the last token."""
        return self.end_s - self.arrival_s

    @property
    def in_time(self) -> bool:
        """Whether it met both SLOs."""
        return self.ttft_s <= self.ttft_slo_s and self.tpot_s <= self.tpot_slo_s

    @property
    def context_tokens(self) -> float:
        """The mean context while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2

    def features(self, now_s: float) -> RequestFeatures:
        """Return what a policy is told of it."""
        return RequestFeatures(
            self.prompt_tokens,
            self.expected_output_tokens or self.output_tokens,
            self.ttft_slo_s,
            self.tpot_slo_s,
            waited_s=now_s - self.arrival_s,
        )


@dataclass(eq=False, slots=True)
class ModelledDevice:
    """What computes the steps of one worker, or of several in turn: each goes at its part of the speed meanwhile."""

    busy: list[ModelledWorker] = field(default_factory=list)

    def settle(self, now_s: float) -> None:
        """Count what the workers have computed until now."""
        for worker in self.busy:
            worker.done_s += (now_s - worker.since_s) / len(self.busy)
            worker.since_s = now_s


@dataclass(eq=False, slots=True)
class ModelledWorker:
    """One engine: prompts in order, and what decodes. A `WorkerState` for policies."""

    worker_id: str
    model: StepModel
    step_tokens: int
    window_tokens: int
    """It gets a prompt only while it has fewer prompt tokens to compute."""
    max_num_seqs: int = 1 << 30
    kv_tokens: int = 1 << 60
    noise: float = 0.0
    """Standard deviation of the logarithm of what a step takes over what the model says."""
    device: ModelledDevice = field(default_factory=ModelledDevice)
    prompts: deque[ModelledRequest] = field(default_factory=deque)
    decoding: list[ModelledRequest] = field(default_factory=list)
    joining: deque[ModelledRequest] = field(default_factory=deque)
    """Those whose KV is here and for which there is no seat."""
    decodes_here: dict[int, ModelledRequest] = field(default_factory=dict)
    """What decodes here or will."""
    prompt_tokens: int = 0
    running: int = 0
    context_tokens: float = 0.0
    slack: TpotSlack = field(default_factory=TpotSlack)
    draw: random.Random = field(default_factory=random.Random)
    # the run of steps that it computes
    steps: int = 0
    """0: it does nothing."""
    takes_s: float = 0.0
    """What the run takes on a device of its own."""
    done_s: float = 0.0
    since_s: float = 0.0
    in_run: int = 0
    """Sequences that get a token of each of its steps: the first ones of `decoding`."""
    prefilled: list[ModelledRequest] | None = None
    """The prompts that its one step completes; None: it computes none."""
    version: int = 0

    @property
    def decodes(self) -> int:
        """Sequences that it decodes, or will."""
        return len(self.decodes_here)

    @property
    def turns(self) -> int:
        """Workers of its device that compute, itself included."""
        return max(1, len(self.device.busy) + (not self.steps))

    @property
    def takes_prompt(self) -> bool:
        """Whether it has room for one more prompt."""
        return self.prompt_tokens < self.window_tokens

    @property
    def prompts_s(self) -> float:
        """Seconds that the rest of its prompts adds to steps."""
        model, tokens, attends = self.model, 0, 0.0
        for one in self.prompts:
            tokens += one.prompt_tokens - one.computed_tokens
            attends += (one.prompt_tokens**2 - one.computed_tokens**2) / 2
        return model.per_prefill_token_s * tokens + model.per_attended_token_s * attends

    def has_room(self, request: RequestFeatures) -> bool:
        """Return whether its batch and its KV blocks have room."""
        return (
            len(self.decodes_here) < self.max_num_seqs
            and self.context_tokens + request.context_tokens <= self.kv_tokens
        )

    def cached_tokens(self, request: RequestFeatures) -> int:
        """Return 0: modelled prompts are what no cache has."""
        return 0

    def begin(self, now_s: float) -> None:
        """Begin the next step, or the run of steps until something changes, if there is anything to compute."""
        decoding = self.decoding
        free_tokens = self.kv_tokens - sum([one.context_tokens for one in decoding])
        while self.joining and self._fits(self.joining[0], len(decoding), free_tokens):
            decoding.append(one := self.joining.popleft())
            free_tokens -= one.context_tokens
        sequences, context_tokens = len(decoding), sum([one.prompt_tokens + one.made_tokens for one in decoding])
        if self.prompts and (self.prompts[0].computed_tokens or self._fits(self.prompts[0], sequences, free_tokens)):
            took_s = self._begin_prompts(now_s, sequences, context_tokens, free_tokens)
            self.steps = 1
        elif sequences:
            made = self.model.made_per_sequence
            self.steps = steps = math.ceil(min([one.output_tokens - one.made_tokens for one in decoding]) / made)
            took_s = steps * self.model.decode_s(sequences, context_tokens + sequences * made * (steps - 1) / 2)
            self.prefilled = None
        else:
            return
        if self.noise:
            took_s *= math.exp(self.draw.gauss(0.0, self.noise / math.sqrt(self.steps)))
        self.device.settle(now_s)
        self.device.busy.append(self)
        self.takes_s, self.done_s, self.since_s, self.in_run = took_s, 0.0, now_s, sequences

    def _fits(self, one: ModelledRequest, sequences: int, free_tokens: float) -> bool:
        """Return whether vLLM would begin it beside so many: it needs a seat, and KV blocks."""
        return sequences < self.max_num_seqs and (self._keeps_tokens(one) <= free_tokens or not sequences)

    def _keeps_tokens(self, one: ModelledRequest) -> float:
        return one.context_tokens if one.decode_worker is self else one.prompt_tokens

    def _begin_prompts(self, now_s: float, sequences: int, context_tokens: float, free_tokens: float) -> float:
        left, computed, attends = self._prompt_budget(now_s, sequences, context_tokens), 0, 0.0
        self.prefilled = prefilled = []
        for begun, one in enumerate(self.prompts, sequences):
            chunk = min(left, one.prompt_tokens - one.computed_tokens)
            if chunk <= 0 or not (one.computed_tokens or self._fits(one, begun, free_tokens)):
                break
            free_tokens -= self._keeps_tokens(one)
            attends += chunk * (one.computed_tokens + chunk / 2)
            one.computed_tokens += chunk
            left -= chunk
            computed += chunk
            if one.computed_tokens == one.prompt_tokens:
                prefilled.append(one)
        return self.model.step_s(computed, sequences * self.model.computed_per_sequence, context_tokens, attends)

    def interrupt(self, now_s: float) -> bool:
        """Have a run of decode steps end with the step that it is in; return whether it does."""
        if self.steps <= 1:
            return False
        self.device.settle(now_s)
        step_s = self.takes_s / self.steps
        steps = max(1, math.ceil(self.done_s / step_s - 1e-9))
        if steps >= self.steps:
            return False
        self.steps, self.takes_s = steps, steps * step_s
        return True

    def end(self, now_s: float) -> list[ModelledRequest]:
        """End the run; return the sequences that have their last token."""
        self.device.settle(now_s)
        self.device.busy.remove(self)
        ended, made = [], self.steps * self.model.made_per_sequence
        for one in self.decoding[: self.in_run]:
            one.made_tokens += made
            if one.made_tokens >= one.output_tokens:
                ended.append(one)
        for one in ended:
            self.decoding.remove(one)
        self.steps = 0
        return ended

    @property
    def ends_s(self) -> float:
        """When its run ends if its device goes on as it does."""
        return self.since_s + max(0.0, self.takes_s - self.done_s) * len(self.device.busy)

    def _prompt_budget(self, now_s: float, sequences: int, context_tokens: float) -> int:
        """Return how many prompt tokens the step may have, as `ridgeline.engine.step_scheduler` bounds them."""
        free = self.step_tokens - sequences
        if not self.slack:
            return free
        model, allowed_s = self.model, math.inf
        together_s, per_step = model.decode_s(sequences, context_tokens), model.made_per_sequence
        joins = DecodeSteps(together_s=together_s, tokens=per_step)
        decoding = set(self.decoding)
        for one in self.decodes_here.values():
            name = str(one.number)
            if one in decoding:
                bare = DecodeSteps(model.decode_s(1, one.prompt_tokens + one.made_tokens), together_s, per_step)
                left = one.output_tokens - one.made_tokens
                step_s = self.slack.allowance_s(name, one.made_tokens, left, now_s, bare)
            elif one.computed_tokens < one.prompt_tokens and one in self.prompts:
                continue
            else:
                step_s = self.slack.arrival_s(name, joins)
            allowed_s = min(allowed_s, step_s)
        if allowed_s == math.inf:
            return free
        prompts = [Prompt(one.computed_tokens, one.prompt_tokens - one.computed_tokens) for one in self.prompts]
        return min(free, most_prefill_tokens(model, allowed_s, sequences, context_tokens, prompts))


def modelled(workers: Sequence[WorkerSpec], speed: float = 1.0) -> list[ModelledWorker]:
    """Return idle workers like these, whose steps take `speed` times as long as their models say."""
    devices: dict[str, ModelledDevice] = {}
    return [
        ModelledWorker(
            spec.worker_id,
            spec.model if speed == 1.0 else spec.model.times(speed),
            spec.step_tokens,
            spec.window_tokens,
            spec.max_num_seqs,
            spec.kv_tokens,
            device=devices.setdefault(spec.device or spec.worker_id, ModelledDevice()),
        )
        for spec in workers
    ]
