"""Feeds the deltas of one sequence to vLLM's output processor, which makes text; long work is cut into short slices.

Deltas that wait for their stream's turn (`ridgeline.router.front.text_turns`) are processed as one.

vLLM turns every log-probability of a prompt into an object with a text: for 4,000 tokens with 20 each, this takes the
event loop a second, during which all streams would stand still. Here it is done a few milliseconds at a time, for one
request at a time, and for at most half of the loop's time; what workers send meanwhile is held back.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import PrefillStats

from ridgeline.contracts.tasks import PositionLogprobs, TokenDelta
from ridgeline.engine.request import logprobs
from ridgeline.router.dispatch.request import SequenceRequest
from ridgeline.router.front.text_turns import TextTurns

_FINISH = {str(reason): reason for reason in FinishReason}
SLICE_ENTRIES = 512
"""Log-probabilities converted in one slice, which takes about 5 ms."""


class TextSink:
    """Turns one sequence's deltas into text.

    `turns` and `conversions` are shared by all: streams take turns, and one prompt is converted at a time.
    """

    def __init__(
        self,
        outputs: OutputProcessor,
        sequence: SequenceRequest,
        params: SamplingParams,
        turns: TextTurns,
        conversions: asyncio.Lock,
    ) -> None:
        self._outputs = outputs
        self._sequence = sequence
        self._params = params
        self._turns = turns
        self._conversions = conversions
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._conversion: asyncio.Task[None] | None = None
        self._waiting: list[TokenDelta] = []
        """What has come and is not text yet."""
        self._at_once = bool(params.stop)
        """Whether no token may wait: a stop string ends the sequence, and later tokens are not its own."""
        self._failure: Exception | None = None
        self._cached_tokens: int | None = None
        self._began = False
        self._stopped = False

    def emit(self, delta: TokenDelta) -> bool:
        """Take a delta, of which text is made at the stream's turn.

        Returns True when a stop string has ended the sequence, so that further tokens are not wanted. Raises what vLLM
        raised on an earlier delta.
        """
        if self._failure is not None:
            raise self._failure
        if delta.prompt_logprobs and self._params.prompt_logprobs is not None:
            self._prompt_logprobs = [position for position in delta.prompt_logprobs if position is not None]
        if self._cached_tokens is None:
            # The first leg's count is the one that saved work; decode's would include the transferred KV.
            self._cached_tokens = delta.num_cached_tokens
        if not delta.token_ids and not delta.finished:
            return False
        if self._prompt_logprobs and self._conversion is None and self._takes_slices():
            self._conversion = asyncio.create_task(self._convert(), name=f"{self._sequence.request_id}-prompt-logprobs")
        self._waiting.append(delta)
        if self._converting:
            return False  # the conversion's end makes text of it
        if self._at_once:
            self._process_waiting()
        else:
            self._turns.add(self.make_text, len(delta.token_ids))
        return self._stopped

    def make_text(self) -> None:
        """Make text of what waits; a failure is raised by the next call of `emit` or `flushed`."""
        if self._converting:
            return
        try:
            self._process_waiting()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this stream and not those that come next
            self._failure = error

    @property
    def _converting(self) -> bool:
        return self._conversion is not None and not self._conversion.done()

    def _takes_slices(self) -> bool:
        return sum(len(one.token_ids) for one in self._prompt_logprobs) > SLICE_ENTRIES

    async def flushed(self) -> None:
        """Make text of all that waits, out of turn, since the sequence has ended. Raises what vLLM raised."""
        if self._conversion is not None:
            await self._conversion
        self._turns.leave(self.make_text)
        self._process_waiting()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Let go of what waits: the answer is whole, or not wanted any more."""
        self._turns.leave(self.make_text)
        if self._conversion is not None:
            self._conversion.cancel()

    async def _convert(self) -> None:
        positions, self._prompt_logprobs = self._prompt_logprobs, []
        rows = max(1, SLICE_ENTRIES // len(positions[0].token_ids))
        async with self._conversions:
            for first in range(0, len(positions), rows):
                began_s = time.perf_counter()
                state = self._outputs.request_states.get(self._sequence.request_id)
                if state is None:  # aborted
                    return
                state.logprobs_processor._update_prompt_logprobs(self._tensors(positions[first : first + rows]))
                await asyncio.sleep(time.perf_counter() - began_s)
        self._process_waiting()

    def _process_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for delta in waiting if self._at_once else joined(waiting):
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


def joined(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """Return successive deltas as one, or none if there are none: the last one, with the tokens of all."""
    if len(deltas) < 2:
        return deltas
    logprobs_of_all = [position for delta in deltas for position in delta.logprobs or ()]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return [msgspec.structs.replace(deltas[-1], token_ids=tokens, logprobs=logprobs_of_all or None)]
