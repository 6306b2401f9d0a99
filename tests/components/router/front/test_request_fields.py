"""Every field that a client can send: over HTTP, with engines that tell what they were asked for.

A field of vLLM's bodies changes what engines are asked or the client gets, or is refused, by `request_fields.py` or by
vLLM, or is listed here as one without effect. So a new vLLM cannot add one that is silently dropped.
`python -m tests.components.router.front.test_request_fields` writes the tables in docs/reference/http.md anew.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import httpx
import msgspec
import pytest
import pytest_asyncio
from pydantic import BaseModel
from vllm.sampling_params import SamplingParams

from ridgeline.router.front import request_fields
from ridgeline.router.front.request_fields import APIS, FOREIGN, HARMLESS, HEADERS, INSTEAD, REFUSED, RefusedField
from tests.support.talking_router import TalkingEngine, make_model, talking_router

over_http = pytest.mark.asyncio(loop_scope="module")
REPOSITORY = Path(__file__).parents[4]
PAGE = REPOSITORY / "docs" / "reference" / "http.md"
LISTS = re.compile(r"(?<=<!-- request fields -->\n).*(?=<!-- /request fields -->)", re.DOTALL)
OWN_NAME = "chosen-by-the-client"


@dataclass
class Served:
    http: httpx.AsyncClient
    app: Any
    engines: list[TalkingEngine]
    sent_before: dict[str, tuple[int, Any, list[Any]]] = field(default_factory=dict)

    async def once(self, path: str, body: dict[str, Any]) -> tuple[int, Any, list[Any]]:
        """As `send`, but a body that many fields are held against is sent once."""
        key = json.dumps([path, body])
        if key not in self.sent_before:
            self.sent_before[key] = await self.send(path, body)
        return deepcopy(self.sent_before[key])

    async def send(self, path: str, body: dict[str, Any], **kwargs: Any) -> tuple[int, Any, list[Any]]:
        """(status, what came, what the engines were asked for)."""
        for engine in self.engines:
            engine.calls.clear()
        response = await self.http.post(path, json=body, **kwargs)
        calls = [
            (call.prompt_token_ids, msgspec.to_builtins(_plain(call.params)), call.reasoning_ended, call.cache_salt)
            for engine in self.engines
            for call in engine.calls
        ]
        return response.status_code, _told(response), sorted(calls, key=repr)


def _plain(params: SamplingParams) -> SamplingParams:
    params = params.clone()
    params.extra_args = None  # ours: hand-offs have other names each time
    return params


def _told(response: httpx.Response) -> Any:
    """What came, without names and times that differ each time."""
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        # How tokens are grouped depends on how quick the reader is.
        return ["stream", sorted({json.dumps(sorted(json.loads(line))) for line in lines})]
    return _without_names(response.json())


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        changing = ("id", "created", "created_at", "completed_at", "request_id")
        kept = {key: inner for key, inner in value.items() if key not in changing or OWN_NAME in str(inner)}
        return {key: _without_names(inner) for key, inner in kept.items()}
    return [_without_names(inner) for inner in value] if isinstance(value, list) else value


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    async with talking_router(directory) as (http, app, engines):
        yield Served(http, app, engines)


# --- the bodies: one that is valid for each model, and for each field what it may be

TEXT = {"model": "m", "prompt": "w20 w21 w22 w23", "max_tokens": 4, "ignore_eos": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "w20 w21"}], "max_tokens": 4, "ignore_eos": True}
ANTHROPIC = {"model": "m", "messages": [{"role": "user", "content": "w20 w21"}], "max_tokens": 4}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ChatCompletionRequest": ("/v1/chat/completions", CHAT),
    "BatchChatCompletionRequest": ("/v1/chat/completions/batch", {**CHAT, "messages": [CHAT["messages"]]}),
    "CompletionRequest": ("/v1/completions", TEXT),
    "ResponsesRequest": (
        "/v1/responses",
        {"model": "m", "input": "w20 w21", "max_output_tokens": 4, "ignore_eos": True},
    ),
    "AnthropicMessagesRequest": ("/v1/messages", ANTHROPIC),
    "AnthropicCountTokensRequest": ("/v1/messages/count_tokens", {k: ANTHROPIC[k] for k in ("model", "messages")}),
    "TokenizeCompletionRequest": ("/tokenize", {"prompt": "w20 w21"}),
    "TokenizeChatRequest": ("/tokenize", {"messages": CHAT["messages"]}),
    "DetokenizeRequest": ("/detokenize", {"tokens": [20, 21]}),
    "GenerativeScoringRequest": (
        "/generative_scoring",
        {"query": "w20", "items": ["w21"], "label_token_ids": [30, 31]},
    ),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ASSISTANT = [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w21"}]


@dataclass
class Sample:
    """A field's value, and what else must be in both bodies for it to mean anything."""

    value: Any
    beside: dict[str, Any] = field(default_factory=dict)


def of(value: Any, **beside: Any) -> Sample:
    return Sample(value, beside)


GREEDY = {"temperature": 0.0}
SAMPLES: dict[str, Sample] = {
    "messages": of([{"role": "user", "content": "w30"}]),
    "prompt": of([30, 31, 32]),
    "input": of("w30"),
    "query": of("w30"),
    "items": of(["w31", "w32"]),
    "tokens": of([30]),
    "label_token_ids": of([30, 32]),
    "model": of("another"),
    "system": of("w30"),
    "instructions": of("w30"),
    "suffix": of("w30"),
    "prompt_embeds": of("AAAA", prompt=None),
    "tools": of([TOOL], tool_choice="none"),
    "tool_choice": of("none", tools=[TOOL]),
    "parallel_tool_calls": of(False),
    "documents": of([{"title": "a", "text": "b"}]),
    "reasoning_effort": of("low"),
    "reasoning": of({"effort": "low"}),
    "chat_template": of("w30"),
    "chat_template_kwargs": of({"extra": True}),
    "add_generation_prompt": of(False),
    "continue_final_message": of(True, messages=ASSISTANT, add_generation_prompt=False),
    "add_special_tokens": of(True),
    "item_first": of(True),
    "truncate_prompt_tokens": of(2),
    "truncation_side": of("right", truncate_prompt_tokens=2),
    "truncation": of("auto", input="w20 " * 5000),
    "media_io_kwargs": of({"image": {"a": 1}}),
    "mm_processor_kwargs": of({"a": 1}),
    "mm_payload": of("none"),
    "return_mm_kwargs": of(False),
    "previous_input_messages": of([{"role": "user", "content": "w30"}]),
    "previous_response_id": of("resp_1"),
    "temperature": of(0.25),
    "top_p": of(0.5),
    "top_k": of(3),
    "min_p": of(0.2),
    "seed": of(5),
    "n": of(2),
    "frequency_penalty": of(0.5),
    "presence_penalty": of(0.5),
    "repetition_penalty": of(1.5),
    "logit_bias": of({"30": 2.0}),
    "allowed_token_ids": of([30, 31]),
    "bad_words": of(["w30"]),
    "structured_outputs": of({"choice": ["w30", "w31"]}),
    "response_format": of({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
    "text": of({"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}),
    "output_config": of({"format": {"type": "json_schema", "schema": SCHEMA}}),
    "repetition_detection": of({"max_pattern_size": 4, "min_count": 2}),
    "thinking_token_budget": of(8),
    "thinking": of({"type": "adaptive"}),
    "watermarking": of(True),
    "use_beam_search": of(True),
    "length_penalty": of(0.5),
    "early_stopping": of(True),
    "best_of": of(3),
    "guided_decoding_backend": of("outlines"),
    "max_tokens": of(3),
    "max_completion_tokens": of(3),
    "max_output_tokens": of(3),
    "min_tokens": of(2),
    "stop": of(["w3"]),
    "stop_sequences": of(["w3"]),
    "stop_token_ids": of([30]),
    "include_stop_str_in_output": of(True, stop=["w"]),
    "ignore_eos": of(False),
    "max_tool_calls": of(1),
    "stream": of(True),
    "stream_options": of({"include_usage": True}, stream=True),
    "stream_interval": of(3, stream=True),
    "logprobs": of(2),
    "top_logprobs": of(2, logprobs=True),
    "prompt_logprobs": of(2),
    "logprob_token_ids": of([30, 31], logprobs=2),
    "echo": of(True),
    "include": of(["message.output_text.logprobs"]),
    "include_reasoning": of(False),
    "apply_softmax": of(False),
    "skip_special_tokens": of(False),
    "spaces_between_special_tokens": of(False),
    "return_tokens_as_token_ids": of(True, logprobs=2),
    "return_token_ids": of(True),
    "return_token_strs": of(True),
    "return_prompt_text": of(True),
    "return_token_offsets": of(True),
    "routed_experts_prompt_start": of(1),
    "enable_response_messages": of(True),
    "request_id": of(OWN_NAME),
    "user": of("somebody"),
    "session_id": of("one"),
    "metadata": of({"a": "b"}),
    "cache_salt": of("mine"),
    "prompt_cache_key": of("one"),
    "service_tier": of("priority"),
    "store": of(False),
    "background": of(True),
    "priority": of(3),
    "kv_transfer_params": of({"do_remote_prefill": True, "prompt_token_ids": [30, 31]}),
    "ec_transfer_params": of({"a": 1}),
    "vllm_xargs": of({"a": 1}),
}
OTHER_SAMPLES: dict[tuple[str, str], Sample] = {
    ("BatchChatCompletionRequest", "messages"): of([[{"role": "user", "content": "w30"}]]),
    ("BatchChatCompletionRequest", "continue_final_message"): of(
        True, messages=[ASSISTANT], add_generation_prompt=False
    ),
    ("BatchChatCompletionRequest", "echo"): of(
        True, messages=[ASSISTANT], add_generation_prompt=False, continue_final_message=True
    ),
    ("ChatCompletionRequest", "echo"): of(
        True, messages=ASSISTANT, add_generation_prompt=False, continue_final_message=True
    ),
    ("ChatCompletionRequest", "logprobs"): of(True),
    ("BatchChatCompletionRequest", "logprobs"): of(True),
    ("ChatCompletionRequest", "return_tokens_as_token_ids"): of(True, logprobs=True),
    ("BatchChatCompletionRequest", "return_tokens_as_token_ids"): of(True, logprobs=True),
    ("ChatCompletionRequest", "logprob_token_ids"): of([30, 31], logprobs=True),
    ("BatchChatCompletionRequest", "logprob_token_ids"): of([30, 31], logprobs=True),
    ("ResponsesRequest", "top_logprobs"): of(2, include=["message.output_text.logprobs"]),
    ("ResponsesRequest", "tools"): of([{"type": "function", "name": "f", "parameters": {}}], tool_choice="none"),
    ("ResponsesRequest", "tool_choice"): of("none", tools=[{"type": "function", "name": "f", "parameters": {}}]),
    ("ResponsesRequest", "prompt"): of({"id": "a"}),
    ("CompletionRequest", "add_special_tokens"): of(False),
    ("TokenizeCompletionRequest", "add_special_tokens"): of(False),
    ("TokenizeCompletionRequest", "prompt"): of("w30"),
    ("GenerativeScoringRequest", "add_special_tokens"): of(False),
    ("AnthropicMessagesRequest", "tools"): of([{"name": "f", "input_schema": {}}], tool_choice={"type": "none"}),
    ("AnthropicMessagesRequest", "tool_choice"): of({"type": "none"}, tools=[{"name": "f", "input_schema": {}}]),
    ("AnthropicCountTokensRequest", "tools"): of([{"name": "f", "input_schema": {}}], tool_choice={"type": "none"}),
    ("AnthropicCountTokensRequest", "tool_choice"): of({"type": "none"}, tools=[{"name": "f", "input_schema": {}}]),
    ("AnthropicCountTokensRequest", "output_config"): of({"effort": "low"}),
    ("AnthropicMessagesRequest", "thinking"): of({"type": "disabled"}),
    ("AnthropicCountTokensRequest", "thinking"): of({"type": "disabled"}),
    ("AnthropicMessagesRequest", "stop_sequences"): of(["w3"]),
}


def bodies_of(annotation: Any) -> set[type[BaseModel]]:
    if get_origin(annotation) in (Union, UnionType):
        return {model for inner in get_args(annotation) for model in bodies_of(inner)}
    return {annotation} if isinstance(annotation, type) and issubclass(annotation, BaseModel) else set()


def fields() -> list[tuple[str, str]]:
    return [(model, name) for model in BODIES for name in MODELS[model].model_fields]


def _models() -> dict[str, type[BaseModel]]:
    from vllm.entrypoints.anthropic import protocol as anthropic
    from vllm.entrypoints.generate.generative_scoring import serving as scoring
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completion
    from vllm.entrypoints.openai.responses import protocol as responses
    from vllm.entrypoints.serve.tokenize import protocol as tokenize

    modules = (anthropic, scoring, chat, completion, responses, tokenize)
    return {name: next(getattr(m, name) for m in modules if hasattr(m, name)) for name in BODIES}


MODELS = _models()
FIELDS_OF_BODIES = fields()
OFFERED_BESIDE = {
    "/ping": "no body",
    "/invocations": "a chat or completion body, by the same handlers",
    "/v1/responses/{response_id}/cancel": "no body",
}


def sample_of(model: str, name: str) -> Sample:
    return OTHER_SAMPLES.get((model, name)) or SAMPLES[name]


def body_with(model: str, name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(path, a valid body without the field, the same with it)."""
    path, body = BODIES[model]
    sample = sample_of(model, name)
    known = MODELS[model].model_fields
    beside = {key: value for key, value in sample.beside.items() if key in known}
    without = {key: value for key, value in body.items() if key in known} | beside
    return path, without, without | {name: sample.value}


@over_http
async def test_the_bodies_of_all_routes_are_known(served: Served):
    """Of every route that vLLM's app offers; a route of the next vLLM must be looked at."""
    models, unknown = set(), []
    for route in served.app.router.routes:
        module = getattr(getattr(route, "endpoint", None), "__module__", "")
        if "POST" not in (getattr(route, "methods", None) or ()) or module.startswith("ridgeline."):
            continue
        found = {
            model.__name__ for param in route.dependant.body_params for model in bodies_of(param.field_info.annotation)
        }
        models |= found
        if not found and route.path not in OFFERED_BESIDE:
            assert module == "vllm.entrypoints.scale_out.factories", route.path
            unknown.append((await served.http.post(route.path, json={})).status_code)
    assert models == set(BODIES)
    assert set(unknown) == {403}, "render, derender and token-in-token-out are closed"


BY_VLLM = {
    "suffix": RefusedField("suffix is only supported for models with FIM completion"),
    "prompt_embeds": RefusedField("enable-prompt-embeds"),
    "chat_template": RefusedField("Chat template is passed with request"),
    "media_io_kwargs": RefusedField("are disabled by default"),
    "mm_processor_kwargs": RefusedField("are disabled by default"),
    "previous_response_id": RefusedField("not found", status=404),
    "thinking_token_budget": RefusedField("reasoning_config is not configured"),
    "background": RefusedField("does not support `store=True`"),
}
BY_VLLM_IN = {
    ("ResponsesRequest", "prompt"): RefusedField("prompt template is not supported"),
    ("BatchChatCompletionRequest", "n"): RefusedField("do not support `n > 1`"),
    ("BatchChatCompletionRequest", "use_beam_search"): RefusedField("do not support beam search"),
}
WITHOUT_EFFECT = HARMLESS - {"metadata", "include_reasoning", "stream_options"} | {"mm_payload", "return_mm_kwargs"}
WITHOUT_EFFECT_IN = {
    ("BatchChatCompletionRequest", "tool_choice"),
    ("AnthropicMessagesRequest", "metadata"),
    ("ResponsesRequest", "include_reasoning"),
}
IN_CHUNKS = "stream_interval"
"""Shown by test_http.py: how tokens are grouped is not compared here."""


def refused(model: str, name: str) -> RefusedField | None:
    return BY_VLLM_IN.get((model, name)) or BY_VLLM.get(name) or REFUSED.get(name)


def is_without_effect(model: str, name: str) -> bool:
    return (model, name) in WITHOUT_EFFECT_IN or name in WITHOUT_EFFECT


def test_every_field_of_vllms_bodies_has_a_value_to_send():
    assert [each for each in FIELDS_OF_BODIES if each not in OTHER_SAMPLES and each[1] not in SAMPLES] == []


def test_the_tables_have_no_field_that_vllm_has_not():
    names = {name for _, name in FIELDS_OF_BODIES}
    assert {*REFUSED, *BY_VLLM, *WITHOUT_EFFECT} - names == set()
    assert {*BY_VLLM_IN, *WITHOUT_EFFECT_IN} - set(FIELDS_OF_BODIES) == set()


@over_http
@pytest.mark.parametrize(
    ("model", "name"),
    [f for f in FIELDS_OF_BODIES if not refused(*f) and not is_without_effect(*f) and f[1] != IN_CHUNKS],
)
async def test_what_is_honoured_changes_what_engines_are_asked_or_the_client_gets(
    served: Served, model: str, name: str
):
    path, without, with_it = body_with(model, name)
    plain = await served.once(path, without)
    changed = await served.send(path, with_it)
    assert changed != plain
    if name not in ("model", "tool_choice", "truncation"):  # whose effect may be a refusal, with or without them
        assert (plain[0], changed[0]) == (200, 200), (plain[1], changed[1])


@over_http
@pytest.mark.parametrize(("model", "name"), [f for f in FIELDS_OF_BODIES if is_without_effect(*f)])
async def test_what_is_without_effect_changes_nothing(served: Served, model: str, name: str):
    path, without, with_it = body_with(model, name)
    plain, changed = await served.once(path, without), await served.send(path, with_it)
    assert plain[0] == 200
    for _, told, _ in (plain, changed):
        told.pop(name, None)  # a response object repeats what was asked for
    assert changed == plain


@over_http
@pytest.mark.parametrize(("model", "name"), [f for f in FIELDS_OF_BODIES if refused(*f)])
async def test_what_is_refused_is_a_bad_request_before_any_work_in_a_stream_too(served: Served, model: str, name: str):
    path, _, body = body_with(model, name)
    rule = refused(model, name)
    stream = "stream" in MODELS[model].model_fields
    status, told, asked = await served.send(path, body | ({"stream": True} if stream else {}))
    assert (status, asked) == (rule.status, []), told
    sentence = told["error"]["message"]
    assert rule.sentence in sentence or (stream and name == "use_beam_search")


@over_http
@pytest.mark.parametrize("model", BODIES)
async def test_refused_fields_with_their_default_values_or_null_were_not_sent(served: Served, model: str):
    path, body = BODIES[model]
    names = [name for each, name in FIELDS_OF_BODIES if each == model and name in REFUSED]
    defaults = {name: MODELS[model].model_fields[name].get_default(call_default_factory=True) for name in names}
    nothing = {name: value for name in names for value in REFUSED[name].but_for}
    plain = await served.once(path, body)
    assert plain[0] == 200
    assert await served.send(path, body | defaults) == plain
    assert await served.send(path, body | nothing) == plain


# --- fields of another API, or of another server

SAID: list[tuple[str, str, Any, str]] = [
    ("ChatCompletionRequest", "regex", "[0-9]{3}", "structured_outputs.regex"),
    ("ChatCompletionRequest", "grammar", 'root ::= "yes"', "structured_outputs.grammar"),
    ("ChatCompletionRequest", "guided_json", {"type": "boolean"}, "response_format"),
    ("ChatCompletionRequest", "guided_choice", ["w1"], "structured_outputs.choice"),
    ("ChatCompletionRequest", "max_new_tokens", 2, "max_tokens"),
    ("ChatCompletionRequest", "stop_sequences", ["w1"], "stop"),
    ("ChatCompletionRequest", "thinking", {"type": "disabled"}, "chat_template_kwargs"),
    ("ChatCompletionRequest", "prompt", "w1", "messages"),
    ("ChatCompletionRequest", "lora_path", "adapter", "LoRA"),
    ("ChatCompletionRequest", "extra_body", {"max_tokens": 2}, "top level"),
    ("ChatCompletionRequest", "functions", [{"name": "f"}], "tools"),
    ("CompletionRequest", "n_predict", 2, "max_tokens"),
    ("CompletionRequest", "enable_thinking", False, "no equivalent"),
    ("ResponsesRequest", "response_format", {"type": "json_object"}, "text.format"),
    ("ResponsesRequest", "conversation", "conv_1", "input"),
    ("ResponsesRequest", "n", 2, "/v1/chat/completions, /v1/completions"),
    ("AnthropicMessagesRequest", "stop", ["w1"], "stop_sequences"),
    ("AnthropicMessagesRequest", "output_format", {"type": "json_schema", "schema": {}}, "output_config.format"),
    ("AnthropicMessagesRequest", "regex", "[0-9]{3}", "no equivalent"),
    ("AnthropicMessagesRequest", "mcp_servers", [{"name": "a"}], "tools"),
]
"""By body: what would change an answer elsewhere, with a word of its refusal."""
INNER: list[tuple[str, str, dict[str, Any]]] = [
    ("ChatCompletionRequest", "response_format.schema", {"response_format": {"type": "json_object", "schema": SCHEMA}}),
    ("ResponsesRequest", "reasoning.enabled", {"reasoning": {"enabled": False}}),
    ("ResponsesRequest", "tools.mcp", {"tools": [{"type": "mcp", "server_label": "a", "server_url": "http://a"}]}),
    ("ResponsesRequest", "tools.file_search", {"tools": [{"type": "file_search", "vector_store_ids": ["a"]}]}),
]
MISPLACED = [
    (model.__name__, name)
    for model in APIS.values()
    for name in sorted({name for each in APIS.values() for name in each.model_fields} - model.model_fields.keys())
]


@over_http
@pytest.mark.parametrize(("model", "name"), MISPLACED)
async def test_a_field_of_another_api_is_refused_if_it_would_change_an_answer_there(
    served: Served, model: str, name: str
):
    path, body = BODIES[model]
    other_than_default = {"tool_choice": "required", "ignore_eos": True}
    sent = await served.send(path, body | {name: other_than_default.get(name, SAMPLES[name].value)})
    if name in HARMLESS:
        assert sent == await served.once(path, body)
    else:
        status, told, asked = sent
        assert (status, asked) == (400, [])
        assert f"{name} is not a field of {path}: " in told["error"]["message"]
    assert await served.send(path, body | {name: None}) == await served.once(path, body)


@over_http
@pytest.mark.parametrize(("model", "name", "value", "word"), SAID)
async def test_what_would_be_dropped_is_refused_with_the_field_to_use(
    served: Served, model: str, name: str, value: Any, word: str
):
    path, body = BODIES[model]
    status, told, asked = await served.send(path, body | {name: value})
    assert (status, asked, word in told["error"]["message"]) == (400, [], True)
    assert told["error"].get("param", name) == name  # Anthropic's errors have none


@over_http
@pytest.mark.parametrize(("model", "name", "fields"), INNER)
async def test_what_would_be_dropped_of_an_object_is_refused_by_its_path(
    served: Served, model: str, name: str, fields: dict[str, Any]
):
    path, body = BODIES[model]
    status, told, asked = await served.send(path, body | fields)
    assert (status, asked) == (400, [])
    assert f"{name} is not a field of {path}: {FOREIGN[name].sentence}" in told["error"]["message"]


@over_http
@pytest.mark.parametrize("name", FOREIGN)
async def test_a_foreign_field_without_a_value_was_not_sent(served: Served, name: str):
    path, body = BODIES["ChatCompletionRequest"]
    nothing = [None, [], {}, "", *FOREIGN[name].but_for]
    if "." not in name:
        assert [(await served.send(path, body | {name: value}))[0] for value in nothing] == [200] * len(nothing)


@over_http
@pytest.mark.parametrize("model", [model.__name__ for model in APIS.values()])
async def test_a_field_of_another_api_with_its_default_there_was_not_sent(served: Served, model: str):
    path, body = BODIES[model]
    defaults = {
        name: each.model_fields[name].get_default(call_default_factory=True)
        for each in APIS.values()
        for name in each.model_fields
        if (model, name) in MISPLACED and name not in {*INSTEAD, "add_special_tokens", "request_id"}
    }  # those two have no one default
    neutral = {"n": 1, "repetition_penalty": 1, "min_p": 0, "logprobs": False, "echo": False, "min_tokens": 0}
    sent = defaults | {name: value for name, value in neutral.items() if (model, name) in MISPLACED}
    assert await served.send(path, body | sent) == await served.once(path, body)


CLIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a limit under two names, as guidellm": ("CompletionRequest", {"max_completion_tokens": 4, "stop": None}),
    "the same, as SillyTavern": (
        "CompletionRequest",
        {"max_new_tokens": 4, "stop": ["w999"], "stop_sequences": ["w999"]},
    ),
    "OpenAI's SDK": (
        "ChatCompletionRequest",
        {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "prompt_cache_key": "k"}
        | {"verbosity": "low", "safety_identifier": "s", "prediction": {"type": "content", "content": "w1"}},
    ),
    "Claude Code": (
        "AnthropicMessagesRequest",
        {
            "metadata": {"user_id": "u"},
            "system": [{"type": "text", "text": "w1", "cache_control": {"type": "ephemeral"}}],
        }
        | {"thinking": {"type": "disabled"}, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
        | {"tool_choice": {"type": "none"}, "service_tier": "auto", "output_config": {"effort": "low"}},
    ),
    "Codex": (
        "ResponsesRequest",
        {"tools": [{"type": "web_search"}, {"type": "local_shell"}, {"type": "image_generation"}], "store": False}
        | {"parallel_tool_calls": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}
        | {
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low"},
            "client_metadata": {"a": "b"},
        }
        | {"stream_options": {"include_obfuscation": False}},
    ),
}


@over_http
@pytest.mark.parametrize("client", CLIENTS)
async def test_what_clients_send_unasked_is_served(served: Served, client: str):
    model, fields = CLIENTS[client]
    path, body = BODIES[model]
    status, told, asked = await served.send(path, body | fields)
    assert (status, bool(asked)) == (200, True), told


@over_http
async def test_a_field_that_nobody_knows_is_taken_as_openais_clients_expect_it(served: Served):
    path, body = BODIES["ChatCompletionRequest"]
    assert await served.send(path, body | {"x_unknown": 1}) == await served.send(path, body)


@over_http
@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions", "/v1/chat/completions/batch"])
async def test_the_other_door_to_a_handler_refuses_as_well(served: Served, path: str):
    _, body = BODIES["BatchChatCompletionRequest" if path.endswith("batch") else "ChatCompletionRequest"]
    for asked_for, words in (({"priority": 1}, REFUSED["priority"].sentence), ({"n_predict": 1}, "use max_tokens")):
        status, told, asked = await served.send(path, body | asked_for)
        assert (status, asked) == (400, [])
        assert words in told["error"]["message"]


# --- headers


@over_http
@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("value", ["1", "x", "9" * 30])
async def test_a_refused_header_is_a_bad_request(served: Served, name: str, value: str):
    for body in (TEXT, TEXT | {"stream": True}):
        status, told, asked = await served.send("/v1/completions", body, headers={name: value})
        assert (status, told["error"]["message"], asked) == (HEADERS[name].status, HEADERS[name].sentence, [])
    (nothing,) = HEADERS[name].but_for
    assert (await served.send("/v1/completions", TEXT, headers={name: nothing}))[0] == 200


@over_http
@pytest.mark.parametrize("name", ["x-session-id", "traceparent", "endpoint-load-metrics-format"])
async def test_a_header_without_effect_changes_nothing(served: Served, name: str):
    plain = await served.once("/v1/completions", TEXT)
    assert (
        await served.send("/v1/completions", TEXT, headers={name: "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}) == plain
    )


# --- the page


def as_markdown() -> str:
    """The tables in `docs/reference/http.md`."""
    tables = {
        ("### Refused fields", "message"): {
            n: _row_of(rule) for n, rule in sorted((request_fields._REFUSED | request_fields._FOREIGN).items())
        },
        ("### Fields of another API", "use, where the path has it"): {
            n: _as_code(uses) for n, uses in request_fields._USES.items()
        },
        ("### Refused headers", "message"): {n: _row_of(rule) for n, rule in sorted(HEADERS.items())},
    }
    lines = []
    for (title, head), rows in tables.items():
        lines += [f"{title}\n", f"| name | {head} |", "|---|---|"]
        lines += [*(f"| {_as_code(names)} | {words} |" for names, words in rows.items()), ""]
    return "\n".join(lines)


def _row_of(rule: RefusedField) -> str:
    conditions = [str(rule.status)] if rule.status != HTTPStatus.BAD_REQUEST else []
    conditions += [f"unless {' or '.join(map(repr, rule.but_for))}"] if rule.but_for else []
    return f"{rule.sentence} ({', '.join(conditions)})" if conditions else rule.sentence


def _as_code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def page() -> str:
    return LISTS.sub(lambda _: as_markdown(), PAGE.read_text())


def test_the_page_is_what_the_tables_say():
    assert LISTS.search(PAGE.read_text())
    assert PAGE.read_text() == page(), (
        "run `python -m tests.components.router.front.test_request_fields` to write it anew"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
