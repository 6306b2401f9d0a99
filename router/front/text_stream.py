"""Feeds the deltas of one sequence to vLLM's output processor, which makes text; long work is cut into short slices.

vLLM turns every log-probability of a prompt into an object with a text: for 4,000 tokens with 20 each, this takes the
event loop a second, during which all streams would stand still. Here it is done a few milliseconds at a time, for one
request at a time, and for at most half of the loop's time; what workers send meanwhile is held back.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import PrefillStats

from contracts.tasks import PositionLogprobs, TokenDelta
from engine.request import logprobs
from router.dispatch.request import SequenceRequest

_FINISH = {str(reason): reason for reason in FinishReason}
SLICE_ENTRIES = 512
"""Log-probabilities converted in one slice, which takes about 5 ms."""


class TextSink:
    """Turns one sequence's deltas into text. `turns` is shared by all, so that one prompt is converted at a time."""

    def __init__(
        self, outputs: OutputProcessor, sequence: SequenceRequest, params: SamplingParams, turns: asyncio.Lock
    ) -> None:
        self._outputs = outputs
        self._sequence = sequence
        self._params = params
        self._turns = turns
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._conversion: asyncio.Task[None] | None = None
        self._held: list[TokenDelta] = []
        self._cached_tokens: int | None = None
        self._began = False
        self._stopped = False

    def emit(self, delta: TokenDelta) -> bool:
        """Process a delta. True when a stop string has ended the sequence, so that further tokens are not wanted."""
        if delta.prompt_logprobs and self._params.prompt_logprobs is not None:
            self._prompt_logprobs = [position for position in delta.prompt_logprobs if position is not None]
        if self._cached_tokens is None:
            # The first leg's count is the one that saved work; decode's would include the transferred KV.
            self._cached_tokens = delta.num_cached_tokens
        if not delta.token_ids and not delta.finished:
            return False
        if self._prompt_logprobs and self._conversion is None and self._takes_slices():
            self._conversion = asyncio.create_task(self._convert(), name=f"{self._sequence.request_id}-prompt-logprobs")
        if self._conversion is not None and not self._conversion.done():
            self._held.append(delta)
        else:
            self._process(delta)
        return self._stopped

    def _takes_slices(self) -> bool:
        return sum(len(one.token_ids) for one in self._prompt_logprobs) > SLICE_ENTRIES

    async def flushed(self) -> None:
        """Wait until no delta is held back."""
        if self._conversion is not None:
            await self._conversion

    def close(self) -> None:
        """Stop the conversion: the answer is not wanted any more."""
        if self._conversion is not None:
            self._conversion.cancel()

    async def _convert(self) -> None:
        positions, self._prompt_logprobs = self._prompt_logprobs, []
        rows = max(1, SLICE_ENTRIES // len(positions[0].token_ids))
        async with self._turns:
            for first in range(0, len(positions), rows):
                began_s = time.perf_counter()
                state = self._outputs.request_states.get(self._sequence.request_id)
                if state is None:  # aborted
                    return
                state.logprobs_processor._update_prompt_logprobs(self._tensors(positions[first : first + rows]))
                await asyncio.sleep(time.perf_counter() - began_s)
        held, self._held = self._held, []
        for delta in held:
            self._process(delta)

    def _process(self, delta: TokenDelta) -> None:
        processed = self._outputs.process_outputs([self._engine_output(delta)])
        self._stopped = self._stopped or bool(processed.reqs_to_abort)

    def _engine_output(self, delta: TokenDelta) -> EngineCoreOutput:
        output = EngineCoreOutput(
            request_id=self._sequence.request_id,
            new_token_ids=delta.token_ids,
            finish_reason=_FINISH[delta.finish_reason] if delta.finish_reason else None,
            stop_reason=delta.stop_reason,
        )
        if not self._began:  # vLLM reads them from the first output only
            self._began = True
            output.prefill_stats = PrefillStats(
                num_prompt_tokens=len(self._sequence.prompt_token_ids), num_cached_tokens=self._cached_tokens or 0
            )
        if delta.logprobs:
            output.new_logprobs = logprobs.unpack_sampled(delta.logprobs, self._params.num_logprobs or 0)
        if self._prompt_logprobs:
            output.new_prompt_logprobs_tensors = self._tensors(self._prompt_logprobs)
            self._prompt_logprobs = []
        return output

    def _tensors(self, positions: list[PositionLogprobs]) -> Any:
        return logprobs.unpack_prompt(positions, self._params.prompt_logprobs or 0)
