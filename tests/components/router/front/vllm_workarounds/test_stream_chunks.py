"""Chunks made of structs have the same bytes as vLLM's own, and the same fields."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls

from ridgeline.router.front.vllm_workarounds import stream_chunks

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
token_ids = st.none() | st.lists(st.integers(0, 200_000), max_size=3)
finish = st.sampled_from([None, "stop", "length"])
usages = st.none() | st.integers(0, 99).map(
    lambda n: UsageInfo(prompt_tokens=n, completion_tokens=1, total_tokens=n + 1)
)
HEAD = {"id": "cmpl-1", "created": 1_700_000_000, "model": "m"}


COMPLETIONS = (
    (stream_chunks.CompletionChunk, stream_chunks.CompletionChoice),
    (completion.CompletionStreamResponse, completion.CompletionResponseStreamChoice),
)
CHATS = (
    (stream_chunks.ChatChunk, stream_chunks.ChatChoice),
    (chat.ChatCompletionStreamResponse, chat.ChatCompletionResponseStreamChoice),
)


def are_equal(kinds, choice, fields, usage, fingerprint=None):
    """Whether the same chunk, made as vLLM makes it, has the same bytes of our classes and of vLLM's."""
    made = []
    for kind, of_choice in kinds:
        chunk = kind(**HEAD, **fields, choices=[of_choice(**choice)])
        if usage is not None:
            chunk.usage = usage
        if fingerprint is not None:
            chunk.system_fingerprint = fingerprint
        made.append(chunk.model_dump_json(exclude_unset=True))
    return made[0] == made[1]


@given(
    text=texts,
    ids=token_ids,
    reason=finish,
    stop=st.none() | texts | st.integers(0, 9),
    usage=usages,
    logs=st.booleans(),
    delta=st.fixed_dictionaries({}, optional={"role": st.just("assistant"), "content": texts, "reasoning": texts}),
)
def test_a_chunk_has_the_bytes_of_vllms(text, ids, reason, stop, usage, logs, delta):
    numbers = {
        "text_offset": [0],
        "token_logprobs": [-0.1],
        "tokens": [text],
        "top_logprobs": [{text: -0.1, "b": -1e-7}],
    }
    logprobs = completion.CompletionLogProbs(**numbers) if logs else None
    choice = {"index": 0, "finish_reason": reason, "stop_reason": stop, "token_ids": ids}
    of_text = choice | {"text": text, "logprobs": logprobs, "prompt_token_ids": ids}
    assert are_equal(COMPLETIONS, of_text, {"object": "text_completion"}, usage, reason)
    of_chat = choice | {"delta": chat.DeltaMessage(**delta), "logprobs": None}
    fields = {"object": "chat.completion.chunk", "prompt_token_ids": ids, "prompt_text": text}
    assert are_equal(CHATS, of_chat, fields, usage)


@pytest.mark.parametrize("kinds", [COMPLETIONS, CHATS])
def test_the_chunk_with_the_usage_at_the_end_is_left_to_vllms_model(kinds):
    usage = UsageInfo(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    last = [kind(**HEAD, choices=[], usage=usage) for kind, _ in kinds]
    ours, theirs = (chunk.model_dump_json(exclude_unset=False, exclude_none=True) for chunk in last)
    assert ours == theirs


def test_vllms_functions_get_the_structs_also_to_leave_the_first_of_parallel_calls():
    stream_chunks.install()
    assert completion_serving.CompletionStreamResponse is stream_chunks.CompletionChunk
    assert chat_serving.ChatCompletionStreamResponse is stream_chunks.ChatChunk
    calls = [chat.DeltaMessage.model_fields["tool_calls"].annotation.__args__[0](index=n) for n in (0, 1)]
    choice = stream_chunks.ChatChoice(index=0, delta=chat.DeltaMessage(tool_calls=calls), finish_reason=None)
    request = chat.ChatCompletionRequest(messages=[], model="m", parallel_tool_calls=False)
    assert [call.index for call in maybe_filter_parallel_tool_calls(choice, request).delta.tool_calls] == [0]
