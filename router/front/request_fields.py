"""The fields and headers that are refused with 400, and why; all others are vLLM's, which honours them.

A field that would be dropped silently is here, and one of another API or server, with the field to use.
`docs/reference/http.md` is generated from these tables. `tests/components/router/front/test_request_fields.py` sends
every field of vLLM's bodies to a router, and fails for one that neither changes anything nor is refused. A field with
its default value, or null, counts as not sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from vllm import SamplingParams
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

from ridgeline.engine import grammars
from ridgeline.router.front.http.errors import HttpRefusal
from ridgeline.router.front.strict import beyond_strict


@dataclass(frozen=True)
class RefusedField:
    """The field is refused with this sentence before any work is done."""

    sentence: str
    but_for: tuple[Any, ...] = ()
    """Values, besides the default, that ask for nothing and are accepted."""
    status: int = 400


def _each(rules: Mapping[str, RefusedField]) -> dict[str, RefusedField]:
    """Return the rule of each name."""
    return {name: rule for names, rule in rules.items() for name in names.split()}


_REFUSED = {
    "previous_input_messages": RefusedField("vLLM reads it for some models only: put earlier messages into input"),
    "watermarking": RefusedField("this server has no watermark configured", but_for=(False,)),
    "use_beam_search length_penalty early_stopping": RefusedField("this server does no beam search"),
    "best_of": RefusedField("this server returns every sequence that it generates: use n", but_for=(1,)),
    "guided_decoding_backend": RefusedField("vLLM no longer offers a choice of backend per request"),
    "return_token_offsets": RefusedField(
        "this server returns no offsets; /tokenize returns token_strs", but_for=(False,)
    ),
    "routed_experts_prompt_start": RefusedField("this server does not report which experts were chosen"),
    "priority": RefusedField("the router orders requests itself, fairly among clients"),
    "kv_transfer_params ec_transfer_params": RefusedField(
        "only the router may name hosts, ports and other requests' KV"
    ),
    "vllm_xargs": RefusedField("it is for extensions of vLLM's engine, and this server offers clients none"),
}
REFUSED = _each(_REFUSED)
"""Fields of vLLM's bodies."""

APIS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
}
"""Paths whose clients take a field of one for a field of another."""

_USES = {
    "max_tokens max_completion_tokens max_output_tokens max_new_tokens n_predict": "max_tokens max_output_tokens",
    "stop stop_sequences": "stop stop_sequences",
    "response_format text output_config output_format json_schema response_schema guided_json": (
        "response_format text.format output_config.format"
    ),
    "regex guided_regex": "structured_outputs.regex",
    "ebnf grammar guided_grammar": "structured_outputs.grammar",
    "guided_choice": "structured_outputs.choice",
    "reasoning_effort reasoning thinking enable_thinking": (
        "reasoning_effort reasoning.effort thinking chat_template_kwargs"
    ),
    "messages input prompt": "messages input prompt",
    "system instructions": "system instructions messages prompt",
}
INSTEAD = {name: uses.split() for names, uses in _USES.items() for name in names.split()}
"""What another API or another server calls a field, and what the APIs here call it: the names that a path has count."""

_FOREIGN = {
    "guided_whitespace_pattern": REFUSED["guided_decoding_backend"],
    "functions": RefusedField("use tools"),
    "function_call": RefusedField("use tool_choice", but_for=("none", "auto")),
    "logits_processors": RefusedField("clients cannot send code to this server"),
    "modalities audio": RefusedField("this server answers with text only", but_for=(["text"],)),
    "web_search_options mcp_servers container tools.mcp tools.file_search tools.code_interpreter": RefusedField(
        "this server runs no tools: run them in your client"
    ),
    "lora_request lora_path": RefusedField("choose a LoRA adapter by its name, as model"),
    "extra_body sampling_params nvext": RefusedField("move its fields to the top level of the body"),
    "conversation": RefusedField("nothing is stored: put earlier turns into input"),
    "response_format.schema": RefusedField("use response_format.json_schema.schema and the type json_schema"),
    "reasoning.enabled reasoning.max_tokens": RefusedField("use reasoning.effort or chat_template_kwargs"),
    "text.schema": RefusedField("use text.format.schema"),
    "output_config.schema output_config.format.json_schema": RefusedField("use output_config.format.schema"),
}
FOREIGN = _each(_FOREIGN) | {name: REFUSED[name] for name in ("best_of", "guided_decoding_backend")}
"""Other fields of other servers, of newer APIs and of older vLLM versions. A dot leads into an object, or to the tools
of a type. Hosted tools that Codex sends unasked, such as web_search and local_shell, are not here."""
_NOTHING: tuple[Any, ...] = (None, [], {}, "")

HARMLESS = frozenset(
    {"include_reasoning", "max_tool_calls", "metadata", "parallel_tool_calls", "prompt_cache_key", "service_tier"}
    | {"session_id", "store", "stream_options", "user"}
)
"""Fields that change no answer on a path that lacks them: clients send them everywhere."""

HEADERS: dict[str, RefusedField] = {
    "x-vllm-priority": RefusedField(
        "X-Vllm-Priority must be 0 or absent: the router orders requests itself, fairly among clients",
        but_for=("0",),
    ),
    "x-data-parallel-rank": RefusedField(
        "X-data-parallel-rank must be 0 or absent: the router chooses the worker", but_for=("0",)
    ),
    "content-encoding": RefusedField(
        "this server does not unpack bodies: send them as they are, without Content-Encoding",
        but_for=("identity",),
        status=415,
    ),
}


def refusal(request: BaseModel) -> VLLMValidationError | None:
    """Return why this body is refused; None if it is not."""
    fields = type(request).model_fields
    for name in request.model_fields_set & fields.keys() & REFUSED.keys():
        rule, default = REFUSED[name], fields[name].get_default(call_default_factory=True)
        if getattr(request, name) not in (*_NOTHING, default, *rule.but_for):
            return VLLMValidationError(f"{name} is not supported by this server: {rule.sentence}", parameter=name)
    return None


def misplaced(path: str, body: Mapping[str, Any]) -> VLLMValidationError | None:
    """Return why a body is refused that has a field of another API or server; None if it is not.

    A field beside the one to use, with the same value, does no harm: some clients send a limit under two names.
    """
    path = path.removesuffix("/batch")
    if path == "/invocations":
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if path not in APIS:
        return None
    tools = body["tools"] if isinstance(body.get("tools"), list) else []
    inner = {name: _at(body, name) for name in FOREIGN if "." in name}
    typed = {f"tools.{tool.get('type')}": tool for tool in tools if isinstance(tool, dict)}
    for name, value in {**body, **inner, **typed}.items():
        rule = None if name in APIS[path].model_fields else _elsewhere(path, name)
        if rule is None or value in (*_NOTHING, *rule.but_for):
            continue
        if all(_at(body, use) != value for use in INSTEAD.get(name, ()) if use != name):
            return VLLMValidationError(f"{name} is not a field of {path}: {rule.sentence}", parameter=name)
    return None


def _at(body: Any, name: str) -> Any:
    for part in name.split("."):
        body = body.get(part) if isinstance(body, dict) else None
    return body


def _elsewhere(path: str, name: str) -> RefusedField | None:
    """Return why a field that this path does not have is refused on it; None if it does no harm or nobody knows it."""
    if name in FOREIGN:
        return FOREIGN[name]
    if uses := [use for use in INSTEAD.get(name, ()) if use.split(".")[0] in APIS[path].model_fields]:
        return RefusedField(f"use {' or '.join(uses)}")
    having = {each: model for each, model in APIS.items() if name in model.model_fields}
    if name in HARMLESS or not (having or name in INSTEAD):
        return None
    belongs = f"it is one of {', '.join(having)}, and " if having else ""
    neutral = () if name in INSTEAD else (getattr(SamplingParams(), name, None), _default(name, *having.values()))
    return RefusedField(f"{belongs}it has no equivalent here: remove it", but_for=neutral)


def _default(name: str, *models: type[BaseModel]) -> Any:
    """Return the default of a field that is the same in all bodies that say one."""
    found = [model.model_fields[name].get_default(call_default_factory=True) for model in models]
    said = [each for each in found if each is not None]
    return said[0] if said and said.count(said[0]) == len(said) else None


def beyond_share(request: BaseModel, most_sequences: int) -> VLLMValidationError | None:
    """Return why a list of prompts can never be answered in one request: each needs a place at the same time."""
    prompt, n = getattr(request, "prompt", None), getattr(request, "n", None) or 1
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    if prompts == 1 or prompts * n <= most_sequences:
        return None
    return VLLMValidationError(
        f"{prompts} prompts with n = {n} are {prompts * n} sequences, and {most_sequences} of one client can be served "
        "at a time (router.max_concurrent_requests, router.max_client_share): send fewer prompts in a request",
        parameter="prompt",
    )


def beyond_grammar(request: BaseModel, max_bytes: int) -> VLLMValidationError | None:
    """Return why a structured output is refused before vLLM reads it, which it does in the event loop."""
    extract = getattr(request, "extract_structured_outputs", None)
    params = None if extract is None else extract()
    if params is None or (why := grammars.refusal(params, max_bytes)) is None:
        return None
    return VLLMValidationError(why, parameter="structured_outputs")


def install(state: Any, most_sequences: int, max_grammar_bytes: int) -> None:
    """Make each handler in the state of vLLM's app check its body here first.

    `most_sequences` is how many sequences one client may have served at the same time, `max_grammar_bytes` the largest
    structured output.
    """
    for serving in vars(state)["_state"].values():
        for name in ("_check_model", "create_messages", "count_tokens"):  # Anthropic's convert the body first
            asked = getattr(serving, name, None)
            if asked is not None:
                vars(serving)[name] = _refusing(serving, asked, most_sequences, max_grammar_bytes)


def _refusing(
    serving: Any, handler: Callable[..., Awaitable[Any]], most_sequences: int, max_grammar_bytes: int
) -> Callable[..., Awaitable[Any]]:
    async def ask(request: Any, *rest: Any) -> Any:
        error = (
            refusal(request)
            or beyond_share(request, most_sequences)
            or beyond_grammar(request, max_grammar_bytes)
            or await beyond_strict(request, max_grammar_bytes * grammars.TAG_BYTES)
        )
        return await handler(request, *rest) if error is None else serving.create_error_response(error)

    return ask


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise HttpRefusal for a header that asks for something this server does not do."""
    for raw_name, value in headers:
        rule = HEADERS.get(raw_name.decode("latin-1"))
        if rule is not None and value.strip().decode("latin-1").lower() not in ("", *rule.but_for):
            asks = [(b"accept-encoding", b"identity")] if rule.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE else []
            raise HttpRefusal(rule.status, rule.sentence, param=raw_name.decode(), headers=asks)
