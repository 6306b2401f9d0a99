"""Reads bodies as clients write them, and tells what is wrong with one in a sentence.

vLLM checks a body against unions of types, which has two gaps. Turns that OpenAI's own API takes belong to no type:
the assistant's without a `type` in `/v1/responses`, parts named as there in a chat. And of a mistake it tells the
errors of every type, 239 for one turn.

A megabyte of text takes seconds of a core to tokenise. vLLM refuses only what could not fit if every token were the
longest of the vocabulary, which may have a hundred characters. It checks no length if the text is only tokenised or
will be cut. And its tokenizer calls half a surrogate pair (of a text that was cut) a value of the wrong type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMValidationError

_TEXT_OF_RESPONSES: Final = ("input_text", "output_text")
_LIMIT: Final = "Input should be "
_SHOWN: Final = 64
"""Characters of a key or a value that a sentence repeats; clients may send any number."""
CHARACTERS_PER_TOKEN: Final = 16
"""Average over a whole prompt; ordinary text and code have three to five."""

Refusal = Callable[[str, Mapping[str, Any]], Exception | None]


def install(app: Any, refusal: Refusal) -> None:
    """Make vLLM's FastAPI app read each body so; `refusal` says by path and body why one is not read at all."""

    async def read(raw_request: Request) -> None:
        """Do it between vLLM's own check of the head and its schemas, which read this same object."""
        await validate_json_request(raw_request)
        body = await raw_request.json()
        if isinstance(body, dict):
            if (error := refusal(raw_request.scope["route"].path, body)) is not None:
                raise error
            _write_out(body)

    app.dependency_overrides[validate_json_request] = read
    for kind in (RequestValidationError, ValidationError):
        app.add_exception_handler(kind, _refuse)


def _write_out(body: dict[str, Any]) -> None:
    for item in _objects(body.get("input")):
        if "role" in item:
            item.setdefault("type", "message")
    for message in _objects(body.get("messages")):
        for part in _objects(message.get("content")):
            if part.get("type") in _TEXT_OF_RESPONSES:
                part["type"] = "text"


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


async def _refuse(_request: Request, invalid: RequestValidationError | ValidationError) -> JSONResponse:
    late = isinstance(invalid, ValidationError)  # vLLM iterates over a chat's parts when it renders them
    errors = [{**each, "loc": ("content", *each["loc"])} if late else each for each in invalid.errors()]
    where, sentence = what_is_wrong(errors, getattr(invalid, "body", None))
    answer = create_error_response(sentence, param=where or None)
    return JSONResponse(answer.model_dump(), answer.error.code)


def what_is_wrong(errors: Sequence[Any], body: Any) -> tuple[str, str]:
    """Return the place of the innermost error, in the type of a union that the client meant, and a sentence of it."""
    if not isinstance(errors[0], dict):
        return "", str(errors[0])
    other_types = {each["loc"][:-1] for each in errors if _is_of_another_type(each)}
    ranked: dict[tuple[int, int, bool], list[tuple[str, Any]]] = {}
    for error in errors:
        loc = error["loc"]
        place = _place(error, body)
        mismatches = sum(loc[:end] in other_types for end in range(len(loc)))
        rank = (len(place), -mismatches, _is_of_another_type(error))
        ranked.setdefault(rank, []).append((".".join(str(part)[:_SHOWN] for part in place), error))
    best = ranked[max(ranked)]
    where, first = best[0]
    if first["type"] == "missing":
        return where, f"{where} is missing"
    told = dict.fromkeys(error["msg"] for place, error in best if place == where)
    if all(each.startswith(_LIMIT) for each in told):
        got = f", not {str(first['input'])[:_SHOWN]!r}" if isinstance(first["input"], str | int | float) else ""
        return where, f"{where or 'the body'} should be {' or '.join(each.removeprefix(_LIMIT) for each in told)}{got}"
    why = first.get("ctx", {}).get("error", "")
    words = (where or "the body", first["msg"].removeprefix("Value error, "), *([why] if isinstance(why, str) else []))
    return where, ": ".join(filter(None, words))


def _is_of_another_type(error: Any) -> bool:
    """Return whether an object says itself that it isn't of this type of a union."""
    return error["loc"][-1:] in (("type",), ("role",)) and error["type"] == "literal_error"


def _place(error: Any, body: Any) -> list[str | int]:
    """Return the keys and indices of an error's location, which names types of unions between them."""
    loc = error["loc"]
    if body is None:
        return [*loc[:1], *(part for part in loc[1:-1] if isinstance(part, int)), *loc[1:][-1:]]
    place: list[str | int] = []
    for part in loc:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            place.append(part)
            body = body[part]
    return [*place, loc[-1]] if error["type"] == "missing" else place


def bound_texts(renderer: Any, max_model_len: int) -> None:
    """Make vLLM's renderer refuse longer texts with VLLMValidationError (400) before it tokenises them."""
    tokenize = renderer._tokenize_prompt_async
    most = CHARACTERS_PER_TOKEN * max_model_len

    async def bounded(prompt: Any, params: Any) -> Any:
        text = prompt["prompt"]
        if len(text) > most:
            raise VLLMValidationError(
                f"the text has {len(text)} characters, and this server tokenises at most {most}: "
                f"{CHARACTERS_PER_TOKEN} for each of the {max_model_len} tokens of the model's context"
            )
        refuse_half_pairs(text, "the text")
        return await tokenize(prompt, params)

    renderer._tokenize_prompt_async = bounded


def refuse_half_pairs(text: str, name: str) -> None:
    """Raise VLLMValidationError (400) for a text that no message and no answer can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as half:
        raise VLLMValidationError(
            f"{name} has half a surrogate pair, U+{ord(text[half.start]):04X}, which is no character: a client "
            "that cuts text must cut between characters"
        ) from half
