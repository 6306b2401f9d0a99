"""Log-probabilities of long prompts: converted in slices, with the same result, while the loop goes on."""

import asyncio

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.output_processor import OutputProcessor

import router.front.text_stream
from contracts.tasks import PositionLogprobs, TokenDelta
from router.dispatch.request import SequenceRequest
from router.front.sampling import sampling_of
from router.front.text_stream import TextSink
from tests.components.router.front.test_outputs import added
from tests.support.patience import eventually

TOKENS, WIDTH = 900, 21


def positions():
    return [None] + [
        PositionLogprobs(
            [(7 * row + column) % 500 for column in range(WIDTH)], [-0.5 - column for column in range(WIDTH)], 3
        )
        for row in range(TOKENS - 1)
    ]


class Bench:
    """One request in vLLM's output processor, behind a sink."""

    def __init__(self, turns=None):
        params = SamplingParams(temperature=0.0, prompt_logprobs=WIDTH - 1, max_tokens=4, detokenize=False)
        self.outputs = OutputProcessor(None, log_stats=False)
        self.request = added(self.outputs, 1, params)
        self.collector = self.outputs.request_states[self.request.request_id].queue
        sequence = SequenceRequest(self.request.request_id, [1] * TOKENS, sampling_of(params))
        self.sink = TextSink(self.outputs, sequence, params, turns or asyncio.Lock())

    def deltas(self):
        first = TokenDelta(request_id="r", token_ids=[1], prompt_logprobs=positions())
        later = [TokenDelta(request_id="r", token_ids=[token]) for token in (2, 3)]
        return [first, *later, TokenDelta(request_id="r", token_ids=[4], finished=True, finish_reason="length")]

    async def answer(self):
        for delta in self.deltas():
            self.sink.emit(delta)
        await self.sink.flushed()
        return self.collector.get_nowait()


async def test_in_slices_the_result_is_the_same_and_the_loop_turns_between_them(monkeypatch):
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    sliced = await Bench().answer()
    beside.cancel()
    assert turns >= TOKENS * WIDTH / router.front.text_stream.SLICE_ENTRIES
    monkeypatch.setattr(router.front.text_stream, "SLICE_ENTRIES", 10**9)
    whole = await Bench().answer()
    assert len(whole.prompt_logprobs) == TOKENS
    assert sliced.prompt_logprobs == whole.prompt_logprobs
    assert sliced.outputs[0].token_ids == whole.outputs[0].token_ids == [1, 2, 3, 4]
    assert sliced.finished
    assert whole.finished


async def test_one_request_at_a_time_is_converted():
    turns = asyncio.Lock()
    await turns.acquire()
    first, second = Bench(turns), Bench(turns)
    for bench in (first, second):
        for delta in bench.deltas():
            assert bench.sink.emit(delta) is False
    await asyncio.sleep(0)
    assert first.collector.output is None, "it waits for its turn"
    second.sink.close()
    turns.release()
    await first.sink.flushed()
    assert first.collector.get_nowait().finished
    with pytest.raises(asyncio.CancelledError):
        await second.sink.flushed()
    assert not turns.locked()


async def test_a_request_that_is_aborted_meanwhile_is_not_converted_further():
    bench = Bench()
    bench.sink.emit(bench.deltas()[0])
    await asyncio.sleep(0)
    bench.outputs.abort_requests([bench.request.request_id], internal=True)
    await eventually(lambda: bench.sink._conversion.done())
    await bench.sink.flushed()
    assert bench.collector.get_nowait().outputs[0].finish_reason == "abort"
