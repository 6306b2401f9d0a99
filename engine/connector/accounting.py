"""FLOPs, bytes and busy seconds of each engine step, from what the scheduler decided.

Lives in the engine process: `scheduler_side.py` calls `begin` when a step has been scheduled and `end` when its
outputs are there. The arithmetic is `roofline.cost`; nothing here is measured but time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from roofline.cost import StepCost, StepCostModel

StepKind = Literal["prefill", "decode", "mixed"]


class StepAccountant:
    """Cumulative counters, by kind of step.

    A request is in its decode phase when the tokens it computes follow its prompt, or when its prompt's KV came from
    elsewhere. vLLM's own counters take the first step of a handed-over request for prefill.
    """

    def __init__(self, model: StepCostModel | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`model` None: FLOPs and bytes are not counted, everything else is."""
        self._model = model
        self._clock = clock
        self._prompt_tokens: dict[str, int] = {}
        self._in_flight: deque[tuple[float, StepKind, StepCost | None]] = deque()
        self._last_end_s = 0.0
        self.counters: dict[str, float] = {}

    def expect(self, request_id: str, num_prompt_tokens: int, num_external_tokens: int) -> None:
        """A request came in; `num_external_tokens` of its prompt are to be transferred, not computed.

        Of a wholly transferred prompt vLLM still computes the last token, to sample from it: that step is decode.
        """
        self._prompt_tokens[request_id] = num_external_tokens - 1 if num_external_tokens else num_prompt_tokens

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._prompt_tokens.pop(request_id, None)

    def recompute(self, request_id: str, reason: str) -> None:
        """The transfer did not happen: the prompt is computed here after all, and counted."""
        self.count(f"recompute_total.{reason}")

    def begin(self, scheduled: Any) -> None:
        """A step was scheduled; `scheduled` is vLLM's SchedulerOutput."""
        if scheduled.total_num_scheduled_tokens == 0:
            return
        tokens = scheduled.num_scheduled_tokens
        started = [(new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
        cached = scheduled.scheduled_cached_reqs
        running = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        segments: list[tuple[int, int]] = []
        prefill_tokens = sampled = 0
        for request_id, computed in (*started, *running):
            new = tokens[request_id]
            prompt = self._prompt_tokens.get(request_id, 0)
            segments.append((new, computed))
            if computed < prompt:
                prefill_tokens += new
            if computed + new >= prompt:
                sampled += 1
        total = scheduled.total_num_scheduled_tokens
        kind: StepKind = "decode" if prefill_tokens == 0 else "prefill" if prefill_tokens == total else "mixed"
        self._add("tokens_total.prefill", prefill_tokens)
        self._add("tokens_total.decode", total - prefill_tokens)
        cost = None if self._model is None else self._model.step(segments, sampled)
        self._in_flight.append((self._clock(), kind, cost))

    def end(self) -> None:
        """The oldest step in flight has its outputs. Overlapping steps share the wall clock, they do not double it."""
        if not self._in_flight:
            return
        began_s, kind, cost = self._in_flight.popleft()
        now_s = self._clock()
        self._add(f"busy_seconds_total.{kind}", now_s - max(began_s, self._last_end_s))
        self._last_end_s = now_s
        self._add(f"steps_total.{kind}", 1)
        if cost is None:
            return
        self._add(f"flops_total.{kind}", cost.flops)
        self._add(f"bytes_total.{kind}.weights", cost.weight_bytes)
        self._add(f"bytes_total.{kind}.kv_read", cost.kv_read_bytes)
        self._add(f"bytes_total.{kind}.kv_write", cost.kv_write_bytes)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of the scheduler's side, such as `recompute_total.transfer_failed`."""
        self._add(name, amount)

    def _add(self, name: str, amount: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount
