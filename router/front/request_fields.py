"""How each field that a client can send is treated: honoured, refused with 400, or without effect here, and why.

The names are vLLM's. `tests/components/router/front/test_request_fields.py` walks the routes of the app and the schemas
of their bodies, and fails on a field that is not listed here, so that a new vLLM version cannot add one that is
silently dropped. It also sends every field to a router and compares the result with this table.
`docs/reference/http.md` is generated from the table; `install` and `misplaced` enforce its refusals. A field with its
default value, or null, counts as not sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

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

FIELD_TESTS = "tests/components/router/front/test_request_fields.py"
SHOWN = f"{FIELD_TESTS}::test_what_is_honoured_changes_what_engines_are_asked_or_the_client_gets"
SALTS = "tests/engines/test_api.py::test_prefixes_are_cached_for_one_cache_salt_only_on_prefill_and_on_decode"
CHUNKS = (
    "tests/components/router/front/test_http.py::test_text_comes_in_the_clients_chunks_while_workers_send_every_token"
)
TIME_LIMITS = "tests/components/router/front/middleware/test_time_limits.py"


@dataclass(frozen=True)
class Honoured:
    """The field has its effect as in vLLM; `test` shows it."""

    test: str = SHOWN
    where: str = ""
    """Where it has its effect, if not everywhere; elsewhere it is accepted."""


@dataclass(frozen=True)
class RefusedField:
    """The field is refused with this sentence before any work is done. For vLLM's refusals it is a part of vLLM's."""

    sentence: str
    by: Literal["the router", "vLLM"] = "the router"
    but_for: tuple[Any, ...] = ()
    """Values, besides the default, that ask for nothing and are accepted."""
    status: int = 400


@dataclass(frozen=True)
class WithoutEffect:
    """The field is accepted, and the answer is the same without it."""

    why: str


FieldRule = Honoured | RefusedField | WithoutEffect

_NO_BEAMS = RefusedField("this server does no beam search")
_OTHER_KV = RefusedField("only the router may name hosts, ports and other requests' KV")
_RENDERED_ONLY = WithoutEffect(
    "vLLM reads it only where requests are rendered and not run, which this server does not offer"
)
_NO_MEDIA = RefusedField("are disabled by default", by="vLLM")
_NO_BEST_OF = RefusedField("this server returns every sequence that it generates: use n", but_for=(1,))
_NO_BACKEND = RefusedField("vLLM no longer offers a choice of backend per request")
_TEXT_ONLY = RefusedField("this server answers with text only", but_for=(["text"],))

FIELDS: dict[str, FieldRule] = {
    # what is asked
    "messages": Honoured(),
    "prompt": Honoured(),
    "input": Honoured(),
    "query": Honoured(),
    "items": Honoured(),
    "tokens": Honoured(),
    "label_token_ids": Honoured(),
    "model": Honoured(),
    "system": Honoured(),
    "instructions": Honoured(),
    "suffix": RefusedField("suffix is only supported for models with FIM completion", by="vLLM"),
    "prompt_embeds": RefusedField("enable-prompt-embeds", by="vLLM"),
    # how the prompt is made
    "tools": Honoured(),
    "tool_choice": Honoured(),
    "parallel_tool_calls": WithoutEffect("without a tool parser no answer has tool calls; with one vLLM honours it"),
    "documents": Honoured(),
    "reasoning_effort": Honoured(),
    "reasoning": Honoured(),
    "chat_template": RefusedField("Chat template is passed with request", by="vLLM"),
    "chat_template_kwargs": Honoured(),
    "add_generation_prompt": Honoured(),
    "continue_final_message": Honoured(),
    "add_special_tokens": Honoured(),
    "item_first": Honoured(),
    "truncate_prompt_tokens": Honoured(),
    "truncation_side": Honoured(),
    "truncation": Honoured(),
    "media_io_kwargs": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "mm_payload": _RENDERED_ONLY,
    "return_mm_kwargs": _RENDERED_ONLY,
    "previous_input_messages": RefusedField("vLLM reads it for some models only: put earlier messages into input"),
    "previous_response_id": RefusedField("not found", by="vLLM", status=404),
    # how tokens are chosen
    "temperature": Honoured(),
    "top_p": Honoured(),
    "top_k": Honoured(),
    "min_p": Honoured(),
    "seed": Honoured(),
    "n": Honoured(),
    "frequency_penalty": Honoured(),
    "presence_penalty": Honoured(),
    "repetition_penalty": Honoured(),
    "logit_bias": Honoured(),
    "allowed_token_ids": Honoured(),
    "bad_words": Honoured(),
    "structured_outputs": Honoured(),
    "response_format": Honoured(),
    "text": Honoured(),
    "output_config": Honoured(),
    "repetition_detection": Honoured(),
    "thinking_token_budget": RefusedField("reasoning_config is not configured", by="vLLM"),
    "thinking": Honoured(),
    "watermarking": RefusedField("this server has no watermark configured", but_for=(False,)),
    "use_beam_search": _NO_BEAMS,
    "length_penalty": RefusedField("it belongs to beam search, which this server does not do"),
    "early_stopping": RefusedField("it belongs to beam search, which this server does not do"),
    "best_of": _NO_BEST_OF,
    "guided_decoding_backend": _NO_BACKEND,
    # where the answer ends
    "max_tokens": Honoured(),
    "max_completion_tokens": Honoured(),
    "max_output_tokens": Honoured(),
    "min_tokens": Honoured(),
    "stop": Honoured(),
    "stop_sequences": Honoured(),
    "stop_token_ids": Honoured(),
    "include_stop_str_in_output": Honoured(),
    "ignore_eos": Honoured(),
    "max_tool_calls": WithoutEffect("it limits calls of tools that the server runs, and this server runs none"),
    # what the answer shows
    "stream": Honoured(),
    "stream_options": Honoured(),
    "stream_interval": Honoured(CHUNKS),
    "logprobs": Honoured(),
    "top_logprobs": Honoured(),
    "prompt_logprobs": Honoured(),
    "logprob_token_ids": Honoured(),
    "echo": Honoured(),
    "include": Honoured(),
    "include_reasoning": Honoured(),
    "apply_softmax": Honoured(),
    "skip_special_tokens": Honoured(),
    "spaces_between_special_tokens": Honoured(),
    "return_tokens_as_token_ids": Honoured(),
    "return_token_ids": Honoured(),
    "return_token_strs": Honoured(),
    "return_prompt_text": Honoured(),
    "return_token_offsets": RefusedField(
        "this server returns no offsets; /tokenize returns token_strs", but_for=(False,)
    ),
    "routed_experts_prompt_start": RefusedField("this server does not report which experts were chosen"),
    "enable_response_messages": Honoured(),
    # names, and what belongs to a server
    "request_id": Honoured(),
    "user": WithoutEffect("clients are told apart by API key or address"),
    "session_id": WithoutEffect("vLLM passes it to caches outside the engine, and there are none"),
    "metadata": Honoured(),
    "cache_salt": Honoured(SALTS),
    "prompt_cache_key": WithoutEffect("vLLM ignores it; `cache_salt` keeps caches apart"),
    "service_tier": WithoutEffect("there is one tier"),
    "store": WithoutEffect("nothing is stored"),
    "background": RefusedField("does not support `store=True`", by="vLLM"),
    "priority": RefusedField("the router orders requests itself, fairly among clients"),
    "kv_transfer_params": _OTHER_KV,
    "ec_transfer_params": _OTHER_KV,
    "vllm_xargs": RefusedField("it is for extensions of vLLM's engine, and this server offers clients none"),
}
"""The treatment of each field in all bodies except those below."""

SPECIAL: dict[tuple[str, str], FieldRule] = {
    ("ResponsesRequest", "prompt"): RefusedField("prompt template is not supported", by="vLLM"),
    ("BatchChatCompletionRequest", "n"): RefusedField("do not support `n > 1`", by="vLLM"),
    ("BatchChatCompletionRequest", "use_beam_search"): RefusedField("do not support beam search", by="vLLM"),
    ("BatchChatCompletionRequest", "tool_choice"): WithoutEffect("a batch takes no tools"),
    ("AnthropicMessagesRequest", "metadata"): WithoutEffect("clients are told apart by API key or address"),
    ("ResponsesRequest", "include_reasoning"): WithoutEffect(
        "without a reasoning parser no answer separates reasoning; with one vLLM honours it"
    ),
}

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

_NO_TOOLS = RefusedField("this server runs no tools: run them in your client")
_NO_LORA = RefusedField("this server has no LoRA adapters")
_WRAPPED = RefusedField("move its fields to the top level of the body")
FOREIGN: dict[str, FieldRule] = {
    "guided_whitespace_pattern": _NO_BACKEND,
    "guided_decoding_backend": _NO_BACKEND,
    "best_of": _NO_BEST_OF,
    "functions": RefusedField("use tools"),
    "function_call": RefusedField("use tool_choice", but_for=("none", "auto")),
    "logits_processors": RefusedField("clients cannot send code to this server"),
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "web_search_options": _NO_TOOLS,
    "mcp_servers": _NO_TOOLS,
    "container": _NO_TOOLS,
    "tools.mcp": _NO_TOOLS,
    "tools.file_search": _NO_TOOLS,
    "tools.code_interpreter": _NO_TOOLS,
    "lora_request": _NO_LORA,
    "lora_path": _NO_LORA,
    "extra_body": _WRAPPED,
    "sampling_params": _WRAPPED,
    "nvext": _WRAPPED,
    "conversation": RefusedField("nothing is stored: put earlier turns into input"),
    "response_format.schema": RefusedField("use response_format.json_schema.schema and the type json_schema"),
    "reasoning.enabled": RefusedField("use reasoning.effort or chat_template_kwargs"),
    "reasoning.max_tokens": RefusedField("use reasoning.effort or chat_template_kwargs"),
    "text.schema": RefusedField("use text.format.schema"),
    "output_config.schema": RefusedField("use output_config.format.schema"),
    "output_config.format.json_schema": RefusedField("use output_config.format.schema"),
    "stream_options": WithoutEffect("streams of /v1/responses and /v1/messages always tell usage"),
}
"""Other fields of other servers, of newer APIs and of older vLLM versions. A dot leads into an object, or to the tools
of a type. Hosted tools that Codex sends unasked, such as web_search and local_shell, are not here."""
_NOTHING: tuple[Any, ...] = (None, [], {}, "")

HEADERS: dict[str, FieldRule] = {
    "authorization": Honoured("tests/components/router/front/middleware/test_auth.py"),
    "x-api-key": Honoured("tests/components/router/front/middleware/test_auth.py"),
    "x-request-id": Honoured(f"{FIELD_TESTS}::test_a_request_id_comes_back_in_the_answer"),
    "x-ridgeline-timeout-s": Honoured(f"{FIELD_TESTS}::test_a_client_is_told_when_its_time_is_over"),
    "x-ridgeline-ttft-ms": Honoured(TIME_LIMITS, "in mode adaptive; other modes validate and remember it"),
    "x-ridgeline-tpot-ms": Honoured(TIME_LIMITS, "in mode adaptive; other modes validate and remember it"),
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
    "x-session-id": WithoutEffect("vLLM passes it to caches outside the engine, and there are none"),
    "traceparent": WithoutEffect("the router exports no traces"),
    "endpoint-load-metrics-format": WithoutEffect("it asks for the load of one engine, and the router has none"),
}


_OURS = WithoutEffect("clients cannot set it: each leg has a value of its own")
_NOT_OVER_HTTP = WithoutEffect("no field of a body sets it")
SAMPLING: dict[str, FieldRule] = {
    "detokenize": _OURS,
    "output_kind": _OURS,
    "skip_clone": _OURS,
    "extra_args": _OURS,
    "skip_reading_prefix_cache": _OURS,
    "output_text_buffer_length": WithoutEffect(
        "vLLM derives it from `stop`, and the router's output processor reads it"
    ),
    "_eos_token_id": WithoutEffect("vLLM derives it from the model and `ignore_eos`"),
    "_all_stop_token_ids": WithoutEffect("vLLM derives it from the model and `stop_token_ids`"),
    "_bad_words_token_ids": WithoutEffect("vLLM derives it from `bad_words`"),
    "_watermarking_skipped": WithoutEffect("vLLM derives it from `watermarking`"),
    "prompt_logprob_token_ids": _NOT_OVER_HTTP,
    "prompt_logprob_start": _NOT_OVER_HTTP,
    "flat_logprobs": _NOT_OVER_HTTP,
    "trace_decode_token_ids": _NOT_OVER_HTTP,
}
"""Fields of vLLM's SamplingParams that no body has under the same name."""


def rule_of(model: str, field: str) -> FieldRule | None:
    """Return how a field of one of vLLM's bodies is treated; None if it is not listed."""
    return SPECIAL.get((model, field)) or FIELDS.get(field)


def refusal(request: BaseModel) -> VLLMValidationError | None:
    """Return why this body is refused; None if it is not."""
    fields = type(request).model_fields
    for name in request.model_fields_set & fields.keys():
        rule = rule_of(type(request).__name__, name)
        if not isinstance(rule, RefusedField) or rule.by == "vLLM":
            continue
        default = fields[name].get_default(call_default_factory=True)
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
        if not isinstance(rule, RefusedField) or value in (*_NOTHING, *rule.but_for):
            continue
        if all(_at(body, use) != value for use in INSTEAD.get(name, ()) if use != name):
            return VLLMValidationError(f"{name} is not a field of {path}: {rule.sentence}", parameter=name)
    return None


def _at(body: Any, name: str) -> Any:
    for part in name.split("."):
        body = body.get(part) if isinstance(body, dict) else None
    return body


def _elsewhere(path: str, name: str) -> FieldRule | None:
    """Return how a field that this path does not have is treated on it; None if nobody knows it."""
    if name in FOREIGN:
        return FOREIGN[name]
    if uses := [use for use in INSTEAD.get(name, ()) if use.split(".")[0] in APIS[path].model_fields]:
        return RefusedField(f"use {' or '.join(uses)}")
    having = {each: model for each, model in APIS.items() if name in model.model_fields}
    rules = [rule_of(model.__name__, name) for model in having.values()]
    if any(isinstance(rule, WithoutEffect) for rule in rules) or not (having or name in INSTEAD):
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
        "at a time (router.max_outstanding_requests, router.max_client_share): send fewer prompts in a request",
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
        for name in (
            "_check_model",
            "create_messages",
            "count_tokens",
        ):  # Anthropic's convert the body first
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
        if isinstance(rule, RefusedField) and value.strip().decode("latin-1").lower() not in ("", *rule.but_for):
            asks = [(b"accept-encoding", b"identity")] if rule.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE else []
            raise HttpRefusal(rule.status, rule.sentence, param=raw_name.decode(), headers=asks)


def as_markdown() -> str:
    """Return the lists of fields and headers in `docs/reference/http.md`."""
    fields = [
        (f"`{name}` (all but {models})" if (models := _special(name)) else f"`{name}`", rule)
        for name, rule in FIELDS.items()
    ]
    fields += [(f"`{name}` (`{model}`)", rule) for (model, name), rule in SPECIAL.items()]
    fields += [(f"`{name}`" + " (elsewhere)" * isinstance(rule, WithoutEffect), rule) for name, rule in FOREIGN.items()]
    headers = [(f"`{name}`", rule) for name, rule in HEADERS.items()]
    uses = {_code(uses): [_code(names)] for names, uses in _USES.items()}
    others = _table("field", "use, where the path has it", uses)
    return (
        f"### Body fields\n\n{_listed('field', fields)}\n### Fields of another API\n\n{others}\n"
        f"### Headers\n\n{_listed('header', headers)}"
    )


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _listed(kind: str, rows: Iterable[tuple[str, FieldRule]]) -> str:
    """Return a sentence of what is honoured, and a table each of what is refused and what has no effect."""
    honoured: list[str] = []
    refused: dict[str, list[str]] = {}
    without_effect: dict[str, list[str]] = {}
    for name, rule in sorted(rows, key=lambda row: row[0]):
        if isinstance(rule, Honoured):
            honoured.append(f"{name} ({rule.where})" if rule.where else name)
        elif isinstance(rule, RefusedField):
            refused.setdefault(_refusal_in_words(rule), []).append(name)
        else:
            without_effect.setdefault(rule.why, []).append(name)
    return "\n".join(
        [
            f"Honoured: {', '.join(honoured)}.\n",
            "Refused, with 400 if no other status is noted:\n",
            _table(kind, "message", refused),
            "Without effect:\n",
            _table(kind, "since", without_effect),
        ]
    )


def _table(kind: str, head: str, rows: Mapping[str, Sequence[str]]) -> str:
    lines = [f"| {kind} | {head} |", "|---|---|"]
    lines += [f"| {', '.join(dict.fromkeys(names))} | {words} |" for words, names in rows.items()]
    return "\n".join([*lines, ""])


def _special(name: str) -> str:
    return ", ".join(f"`{model}`" for model, field in SPECIAL if field == name)


def _refusal_in_words(rule: RefusedField) -> str:
    unless = f"unless {' or '.join(repr(value) for value in rule.but_for)}" if rule.but_for else ""
    status = str(rule.status) if rule.status != HTTPStatus.BAD_REQUEST else ""
    conditions = ", ".join(filter(None, ("by vLLM" if rule.by == "vLLM" else "", status, unless)))
    return f"{rule.sentence} ({conditions})" if conditions else rule.sentence
