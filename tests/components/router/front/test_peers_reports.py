"""What users of other servers have reported, asked of the real router with vLLM's app: each row is a report's kind.

Engines have no model. The model's name has a slash, and its `generation_config.json` a `max_new_tokens`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from ridgeline.engine.passed_args import front
from tests.support.patience import eventually
from tests.support.served_router import serving
from tests.support.talking_router import TEMPLATE, TalkingEngine, make_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAME = "org/m"
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "w20 w21"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 6},
    TEXT: {"prompt": "w20 w21 w22", "max_tokens": 6},
    RESPONSES: {"input": "w20 w21", "max_output_tokens": 6, "store": False},
    MESSAGES: {"messages": [USER], "max_tokens": 6},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    """(HTTP client, decode engine, metrics)"""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3}))
    vllm = front({"chat_template": TEMPLATE})
    engines = TalkingEngine("prefill"), TalkingEngine("decode")
    settings = {"server_args": vllm, "served_names": (NAME,), "max_concurrent_requests": 64}
    registry = CollectorRegistry()
    async with serving(folder, engines, registry=registry, **settings) as (client, *_, decode):
        yield client, decode, registry


@pytest.fixture
def http(served):
    return served[0]


async def ask(http: Any, path: str, **fields: Any) -> Any:
    return await http.post(path, json={"model": NAME, **BODIES[path], **fields})


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def added(one: Any, other: Any) -> Any:
    """What two parts of an answer say together."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: added(one.get(key), other.get(key)) for key in {**one, **other}}
    if isinstance(one, str | list) and isinstance(other, type(one)):
        return one + other
    return one if other is None else other


def told(events: list[dict[str, Any]]) -> tuple[dict[int, Any], Any]:
    """Each choice of an answer in one or many parts, and the usage."""
    choices: dict[int, Any] = defaultdict(dict)
    for event in events:
        for choice in event["choices"]:
            said = {"text": (choice.get("message") or choice.get("delta") or {}).get("content")} | choice
            part = {key: said[key] for key in TOLD if said.get(key) is not None}
            choices[choice["index"]] = added(choices[choice["index"]], part)
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return dict(choices), {key: value for key, value in usage.items() if value is not None}


TOLD = ("text", "logprobs", "token_ids", "finish_reason", "stop_reason")
ALIKE: list[tuple[str, dict[str, Any]]] = [
    *((path, {"stop": stop}) for path in (CHAT, TEXT) for stop in ("w", ["zz", " w"], " ")),
    *((path, {"stop": " w", "include_stop_str_in_output": True}) for path in (CHAT, TEXT)),
    *((path, {"n": 3, "return_token_ids": True}) for path in (CHAT, TEXT)),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"logprobs": True, "n": 2, "stop": "w9"}),
    (CHAT, {"echo": True, "add_generation_prompt": False, "continue_final_message": True}),
    (TEXT, {"logprobs": 2}),
    (TEXT, {"logprobs": 1, "echo": True}),
    (TEXT, {"logprobs": 1, "return_tokens_as_token_ids": True, "stop": " w"}),
    (TEXT, {"echo": True, "n": 2}),
    (TEXT, {"prompt": ["w20", [21, 22], "w23"][::2], "n": 2}),
    (TEXT, {"prompt": [[20], [21, 22]], "n": 2, "logprobs": 1, "echo": True}),
]


@pytest.mark.parametrize(("path", "fields"), ALIKE, ids=str)
async def test_an_answer_is_told_alike_whole_and_in_a_stream(http, path, fields):
    fields = {"ignore_eos": True, **fields}
    whole = await ask(http, path, **fields)
    stream = await ask(http, path, **fields, stream=True, stream_options={"include_usage": True})
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text
    choices, usage = told([whole.json()])
    assert (choices, usage) == told(events_of(stream.text))
    prompts = fields.get("prompt")
    assert sorted(choices) == list(range((len(prompts) if prompts else 1) * fields.get("n", 1)))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_sequences_of_a_seed_have_seeds_of_their_own_and_the_same_ones_again(served):
    http, decode, _ = served
    seeds = []
    for _ in range(2):
        decode.calls.clear()
        assert (await ask(http, CHAT, n=4, seed=7, temperature=1)).status_code == 200
        seeds.append(sorted(call.params.seed for call in decode.calls))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4


async def test_a_time_to_the_first_token_is_counted_for_each_sequence(served):
    http, _, registry = served

    def counted(name: str) -> float:
        return sum(each.value for family in registry.collect() for each in family.samples if each.name == name)

    names = ("ridgeline_requests_total", "ridgeline_ttft_seconds_count")
    before = [counted(name) for name in names]
    assert (await ask(http, TEXT, prompt=[[20, 21], [22]], n=2)).status_code == 200
    await eventually(lambda: [counted(name) for name in names] == [value + 4 for value in before])


async def test_a_model_whose_name_has_a_slash_is_served_by_it(http):
    for path in BODIES:
        assert (await ask(http, path)).json()["model"] == NAME


async def test_max_new_tokens_of_the_models_files_caps_no_answer(http):
    assert (await ask(http, TEXT, max_tokens=5, ignore_eos=True)).json()["usage"]["completion_tokens"] == 5


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "w22"}


def broken(arguments: Any) -> list[Any]:
    return [
        USER,
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}]},
        RESULT,
    ]


def called(**changes: Any) -> list[Any]:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"} | changes
    return [USER, call, {"type": "function_call_output", "call_id": "c1", "output": "w22"}]


def block(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(parts)}, USER]}


W = {"type": "text", "text": "w22"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
SAID = {"type": "output_text", "text": "w22", "annotations": []}
OBJECT = {"type": "object", "properties": {}}
HISTORIES: list[tuple[str, dict[str, Any], int]] = [
    *((CHAT, {"messages": broken(text)}, 200) for text in ('{"a": "Os', "", "[1]", "null", "w23", '{"a": 1}}')),
    *((CHAT, {"messages": broken(wrong)}, 400) for wrong in (7, ["a"])),
    *(
        (CHAT, {"messages": [USER, {"role": "assistant", "content": content}, USER]}, 200)
        for content in ("", None, [W])
    ),
    (CHAT, {"messages": [{"role": "system", "content": "w5"}, USER, {"role": "system", "content": "w6"}]}, 200),
    (CHAT, {"messages": [{"role": "developer", "content": "w5"}, USER]}, 200),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "w22"}]}, 200),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}, USER]}, 200),
    (CHAT, {"messages": [USER, {"role": "assistant", "reasoning": "w9", "content": "w22"}, USER]}, 200),
    (CHAT, {"messages": [USER | {"name": "me"}]}, 200),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": [{"content": "w5"}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, 400),
    *((RESPONSES, {"input": called(arguments=text)}, 200) for text in ('{"a": "Os', "", "[1]", "null")),
    (RESPONSES, {"input": called(id="fc_1", status="completed")}, 200),
    (RESPONSES, {"input": [USER, {"type": "message", "role": "assistant", "content": [SAID]}, USER]}, 200),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, 200),
    (RESPONSES, {"tools": [{"type": "local_shell"}]}, 200),
    (RESPONSES, {"input": []}, 400),
    (RESPONSES, {"input": [{"type": "nothing"}]}, 400),
    *((MESSAGES, {"system": system}, 200) for system in ("w5", [W], [W | {"cache_control": {"type": "ephemeral"}}, W])),
    (MESSAGES, block(W, W), 200),
    (MESSAGES, block(W, role="assistant"), 200),
    (MESSAGES, block({"type": "thinking", "thinking": "w9", "signature": "s"}, W, role="assistant"), 200),
    (MESSAGES, block({"type": "redacted_thinking", "data": "x"}, W, role="assistant"), 200),
    (MESSAGES, block(W, USE, role="assistant"), 200),
    *(
        (MESSAGES, block({"type": "tool_result", "tool_use_id": "t1", **result}), 200)
        for result in ({}, {"content": "w22"}, {"content": [W]}, {"content": "w22", "is_error": True})
    ),
    *((MESSAGES, {"thinking": thinking}, 200) for thinking in ({"type": "disabled"}, None)),
    (MESSAGES, {"metadata": {"user_id": "me"}}, 200),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": OBJECT}], "tool_choice": {"type": "none"}}, 200),
    (MESSAGES, {"messages": [USER, USER]}, 200),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "w22"}]}, 200),
    (MESSAGES, {"messages": [{"role": "system", "content": "w5"}, USER]}, 200),
    (MESSAGES, {"messages": []}, 400),
    (MESSAGES, block({"type": "nothing"}), 400),
    (MESSAGES, {"stop_sequences": [""]}, 400),
    (MESSAGES, {"max_tokens": 0}, 400),
]


@pytest.mark.parametrize(("path", "fields", "status"), HISTORIES, ids=str)
async def test_what_clients_write_back_is_answered_or_refused_with_a_sentence(http, path, fields, status):
    answer = await ask(http, path, **fields)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["message"]
