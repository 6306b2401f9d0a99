"""Encodes the chunks of streamed answers with msgspec.

vLLM makes two pydantic models for each token, three in a chat, which check what vLLM itself has just written: a sixth
of what a token costs the router. Its streaming functions get structs with the same fields here, which are encoded to
the same bytes. Whatever is a pydantic model in a chunk (log-probabilities, usage, a chat's delta) stays one.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec
from msgspec import UNSET
from pydantic import BaseModel
from vllm.entrypoints.openai.chat_completion import protocol as chat_protocol
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.completion import protocol as completion_protocol
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.serve.utils import tool_calls_utils


def _model_as_json(value: Any) -> msgspec.Raw:
    """Encode a pydantic model inside of a chunk, as it would be encoded in a pydantic chunk."""
    if isinstance(value, BaseModel):
        return msgspec.Raw(value.model_dump_json(exclude_unset=True).encode())
    raise TypeError(f"a chunk cannot hold {type(value).__name__}")


_encode: Final = msgspec.json.Encoder(enc_hook=_model_as_json).encode


class _Chunk(msgspec.Struct):
    """What both kinds of chunk have in common."""

    MODEL: ClassVar[type[BaseModel]]
    """vLLM's model of the chunk."""

    def model_dump_json(self, *, exclude_unset: bool = False, exclude_none: bool = False) -> str:
        """Encode the chunk as vLLM's model of it would; the last one, which has no choices, is left to the model."""
        if exclude_unset and not exclude_none:
            return _encode(self).decode()
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        model = self.MODEL(**{name: value for name, value in values if value is not UNSET})
        text: str = model.model_dump_json(exclude_unset=exclude_unset, exclude_none=exclude_none)
        return text


def _struct(model: type[BaseModel], *bases: type[msgspec.Struct], **constants: Any) -> Any:
    """Return a struct with the fields of vLLM's model in their order; one that has not been set is not encoded."""
    fields = [(name, Any, UNSET) for name in model.model_fields]
    return msgspec.defstruct(model.__name__, fields, bases=bases, namespace=constants, kw_only=True)


def _chunk(model: type[BaseModel]) -> Any:
    return _struct(model, _Chunk, MODEL=model)


CompletionChoice: Final = _struct(completion_protocol.CompletionResponseStreamChoice)
CompletionChunk: Final = _chunk(completion_protocol.CompletionStreamResponse)
ChatChoice: Final = _struct(chat_protocol.ChatCompletionResponseStreamChoice)
ChatChunk: Final = _chunk(chat_protocol.ChatCompletionStreamResponse)
REPLACED: Final = {
    completion_serving: {
        "CompletionStreamResponse": CompletionChunk,
        "CompletionResponseStreamChoice": CompletionChoice,
    },
    chat_serving: {
        "ChatCompletionStreamResponse": ChatChunk,
        "ChatCompletionResponseStreamChoice": ChatChoice,
    },
    tool_calls_utils: {"ChatCompletionResponseStreamChoice": ChatChoice},
}
"""For each of vLLM's streaming modules, the names that it gets other classes for."""


def install() -> None:
    """Give vLLM's streaming functions the structs. Installing them again changes nothing."""
    for module, classes in REPLACED.items():
        vars(module).update(classes)
