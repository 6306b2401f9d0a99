"""Text is made at a stream's turn, log-probabilities of long prompts in slices, with the same result as at once."""

import asyncio
from copy import copy

import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

import ridgeline.router.front.text_stream
from ridgeline.contracts.tasks import PositionLogprobs, TokenDelta
from ridgeline.router.dispatch.request import SequenceRequest
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.front.text_stream import TextSink
from ridgeline.router.front.text_turns import TextTurns
from tests.support.patience import eventually


def added(outputs, n, params=None):
    """A request with its n sequences, as `router/front/engine_client.py` adds it."""
    if params is None:
        params = SamplingParams(n=n, temperature=0.7, detokenize=False, output_kind=RequestOutputKind.DELTA)
    request = EngineCoreRequest(
        request_id="cmpl-1-0-abc",
        external_req_id="cmpl-1-0",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    collector = RequestOutputCollector(params.output_kind, request.request_id)
    if n == 1:
        outputs.add_request(request, None, None, 0, collector)
        return request
    parent = ParentRequest(request)
    for index in range(n):
        child = copy(request)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        outputs.add_request(child, None, parent, index, collector)
    return request


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("aborted_before", [False, True])
def test_a_request_aborted_by_its_own_id_is_forgotten_with_all_its_sequences(n, aborted_before):
    outputs = OutputProcessor(None, log_stats=False)
    request = added(outputs, n)
    assert len(outputs.request_states) == n
    if aborted_before:
        outputs.abort_requests(["cmpl-1-0"], internal=False)
    outputs.abort_requests([request.request_id], internal=True)
    assert outputs.request_states == {}
    assert outputs.parent_requests == {}
    assert not any(outputs.external_req_ids.values())


# --- log-probabilities of long prompts

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

    def __init__(self, conversions=None):
        params = SamplingParams(temperature=0.0, prompt_logprobs=WIDTH - 1, max_tokens=4, detokenize=False)
        self.outputs = OutputProcessor(None, log_stats=False)
        self.request = added(self.outputs, 1, params)
        self.collector = self.outputs.request_states[self.request.request_id].queue
        sequence = SequenceRequest(self.request.request_id, [1] * TOKENS, sampling_of(params))
        self.sink = TextSink(self.outputs, sequence, params, TextTurns(), conversions or asyncio.Lock())

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
    assert turns >= TOKENS * WIDTH / ridgeline.router.front.text_stream.SLICE_ENTRIES
    monkeypatch.setattr(ridgeline.router.front.text_stream, "SLICE_ENTRIES", 10**9)
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


# --- tokens that come while their stream waits for its turn


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


class Late:
    """One stream with real words, whose deltas come all at once or one at a time."""

    def __init__(self, tokenizer, *, at_once, **wishes):
        params = SamplingParams(temperature=0.0, max_tokens=6, **wishes)
        params.output_kind = RequestOutputKind.DELTA
        self.outputs = OutputProcessor(tokenizer, log_stats=False)
        request = added(self.outputs, 1, params)
        self.collector = self.outputs.request_states[request.request_id].queue
        sequence = SequenceRequest(request.request_id, [1], sampling_of(params))
        self.sink = TextSink(self.outputs, sequence, params, TextTurns(), asyncio.Lock())
        self._at_once, self.answers = at_once, []

    async def read(self, deltas):
        """Emit until no more is wanted, and return what the client reads."""
        for delta in deltas:
            enough = self.sink.emit(delta)
            if not self._at_once:
                await asyncio.sleep(0)
                self._take()
            if enough:
                break
        await self.sink.flushed()
        self._take()
        return self.answers

    def _take(self):
        if (answer := self.collector.get_nowait()) is not None:
            self.answers.append(answer)


def words(tokenizer, text, **parts):
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [
        TokenDelta(
            request_id="r",
            token_ids=[token],
            finished=number == len(ids),
            finish_reason="length" if number == len(ids) else None,
            **{name: [part(token)] for name, part in parts.items()},
        )
        for number, token in enumerate(ids, 1)
    ]


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_tokens_that_are_late_are_one_event_with_the_same_text_tokens_and_log_probabilities(tokenizer, logprobs):
    parts = {} if logprobs is None else {"logprobs": lambda token: PositionLogprobs([token, 7], [-0.5, -1.0], 1)}
    deltas = words(tokenizer, "w1 w2 w3 w4 w5 w6", **parts)
    seen = []
    for at_once in (False, True):
        answers = await Late(tokenizer, at_once=at_once, logprobs=logprobs).read(deltas)
        assert len(answers) == (1 if at_once else len(deltas))
        outputs = [answer.outputs[0] for answer in answers]
        positions = [list(position) for one in outputs for position in one.logprobs or ()]
        text, tokens = "".join(one.text for one in outputs), [token for one in outputs for token in one.token_ids]
        seen.append((text, tokens, positions, outputs[-1].finish_reason))
    assert seen[0] == seen[1]
    assert len(seen[0][2]) == (0 if logprobs is None else len(deltas))


async def test_a_stream_with_a_stop_string_waits_for_no_turn_so_that_nothing_comes_after_it(tokenizer):
    answers = await Late(tokenizer, at_once=True, stop=["w3"]).read(words(tokenizer, "w1 w2 w3 w4 w5 w6"))
    (answer,) = answers
    assert answer.outputs[0].finish_reason == "stop"
    assert len(answer.outputs[0].token_ids) == 3


async def test_a_failure_while_text_is_made_ends_its_own_stream_alone(tokenizer, monkeypatch):
    broken, well = (Late(tokenizer, at_once=True) for _ in range(2))
    well.sink._turns = broken.sink._turns
    first, *rest = words(tokenizer, "w1 w2 w3")

    def fails(_):
        raise ZeroDivisionError

    monkeypatch.setattr(broken.outputs, "process_outputs", fails)
    broken.sink.emit(first)
    well.sink.emit(first)
    await asyncio.sleep(0)
    with pytest.raises(ZeroDivisionError):
        broken.sink.emit(rest[0])
    with pytest.raises(ZeroDivisionError):
        await broken.sink.flushed()
    assert (await well.read(rest))[-1].finished
