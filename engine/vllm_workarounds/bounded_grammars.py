"""Bounds the work that one request's grammar is for an engine.

vLLM masks tokens in the step loop, for all requests one after the other, and nothing in it limits how long a grammar
may take there. `ridgeline.engine.grammars.limits` does, in llguidance's own steps, which are the same on every machine:
a limit in seconds of CPU ended ordinary grammars where the host was busy. `bound_grammars` is for the engine process,
`bound_validation` for any that accepts grammars.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import llguidance
import llguidance.torch
from vllm.exceptions import VLLMValidationError
from vllm.v1 import structured_output
from vllm.v1.structured_output import StructuredOutputManager, backend_guidance
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    GuidanceGrammar,
    process_for_additional_properties,
    serialize_guidance_grammar,
)
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions
from vllm.v1.structured_output.request import get_structured_output_key

from ridgeline.engine.grammars import json_options, limits
from ridgeline.engine.tag_grammars import Unreadable, as_lark

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CHECKED_BYTES: Final = 8192
"""Longer grammars are compiled in the engine only, which refuses them alike: the router's event loop has no time for
them. One of this size takes it 15 ms at most."""
COMPILING_NICENESS: Final = 10
"""Of the thread that compiles, which shares the engine's core: the step loop keeps nine tenths of it."""
MOST_DIGITS: Final = 39
"""Tokens of digits in a row that a number of a JSON answer may have: the digits of an integer of 128 bits. A grammar
sets no end to `1.0000`, and a model may write it until `max_tokens`."""
JSON_KINDS: Final = (
    StructuredOutputOptions.JSON,
    StructuredOutputOptions.JSON_OBJECT,
    StructuredOutputOptions.STRUCTURAL_TAG,
)
_SPECIAL: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")


def serialize(kind: StructuredOutputOptions, text: str, compact: bool = False, closed: bool = False) -> str:
    """As vLLM's, but with our options for JSON, which a client's own do not replace."""
    if kind not in (StructuredOutputOptions.JSON, StructuredOutputOptions.JSON_OBJECT):
        return str(serialize_guidance_grammar(kind, text, compact, closed))
    schema: Any = {"type": "object"} if kind is StructuredOutputOptions.JSON_OBJECT else text
    schema = process_for_additional_properties(schema) if closed else schema
    options: Any = json_options(compact)
    return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options))


def serialize_in_tag(schema: bool | dict[str, Any], compact: bool = False) -> str:
    """As `serialize`, for a tag: closed as xgrammar reads it, which allows only the properties that a schema names."""
    if schema is False:
        raise Unreadable("the schema false allows no value: replace it")
    closed = process_for_additional_properties(json.dumps({} if schema is True else schema))
    return json.dumps(closed | {"x-guidance": json_options(compact)})


def bound_validation() -> None:
    """Have this process check grammars by the same limits as the engine compiles them."""
    backend_guidance.validate_guidance_grammar = _validate


def bound_grammars() -> None:
    """Have this engine limit grammars, and end a request whose grammar takes more; a second call does nothing."""
    structured_output.GuidanceBackend = BoundedGuidance
    StructuredOutputManager._create_grammar = _create_grammar
    StructuredOutputManager.accept_tokens = _accept_tokens


def _validate(sampling_params: Any, tokenizer: Any = None) -> None:
    params = sampling_params.structured_outputs
    if params is None:
        return
    kind, text = get_structured_output_key(params)
    is_tag = kind is StructuredOutputOptions.STRUCTURAL_TAG
    if kind is StructuredOutputOptions.CHOICE or (len(text) > CHECKED_BYTES and not is_tag):
        return
    try:
        # A long tag too: only here is a client told why its tools cannot be enforced.
        grammar = as_lark(json.loads(text), {}, serialize_in_tag) if is_tag else serialize(kind, text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VLLMValidationError(f"Invalid grammar specification: {error}") from error
    if is_tag and len(grammar) > CHECKED_BYTES:
        return
    if why := llguidance.LLMatcher.validate_grammar(grammar, tokenizer, limits=limits()):
        raise VLLMValidationError(f"Grammar error: {why}")


@functools.cache
def _say_once(warning: str) -> None:
    logger.warning("a schema without strict: true is not enforced in full: %s", warning)


class Digits:
    """The tokens that have digits alone, and whether a mask is one within a number."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self.mask = llguidance.torch.allocate_token_bitmask(1, tokenizer.vocab_size)[0]
        matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("regex", "[0-9]+"), log_level=0)
        llguidance.torch.fill_next_token_bitmask(matcher, self.mask.unsqueeze(0), 0)
        self._words = self.mask.tolist()
        self._letter = tokenizer.tokenize_str("a")[0]

    def __contains__(self, token: int) -> bool:
        return bool(self._words[token // 32] >> (token % 32) & 1)

    def forbid(self, row: torch.Tensor) -> None:
        """Take the digits from a mask, unless nothing else is left, or letters are allowed and so it is a text."""
        others = row & ~self.mask
        if not int(row[self._letter // 32]) >> (self._letter % 32) & 1 and others.any():
            row.copy_(others)


class BoundedGuidance(GuidanceBackend):  # type: ignore[misc]
    """vLLM's, with limits. Choices are one expression, and structural tags are rewritten."""

    def __post_init__(self) -> None:
        """Find the tokens of digits."""
        super().__post_init__()
        self.digits = Digits(self.ll_tokenizer)

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        """Compile in this thread."""
        if request_type is StructuredOutputOptions.STRUCTURAL_TAG:
            write_json = functools.partial(serialize_in_tag, compact=self.disable_any_whitespace)
            text = as_lark(json.loads(grammar_spec), self._special_tokens, write_json)
        elif request_type is StructuredOutputOptions.CHOICE:
            # A grammar has an item for each choice in every row, an expression a state for each common beginning.
            choices = (_SPECIAL.sub(r"\\\g<0>", choice) for choice in json.loads(grammar_spec))
            text = llguidance.grammar_from("regex", "|".join(choices))
        else:
            text = serialize(
                request_type, grammar_spec, self.disable_any_whitespace, self.disable_additional_properties
            )
        matcher = llguidance.LLMatcher(self.ll_tokenizer, text, log_level=0, limits=limits())
        for warning in matcher.get_grammar_warnings():
            if warning.startswith(
                "Unimplemented keys"
            ):  # others have names that a client chose, who could fill the log
                _say_once(warning)
        return GuidanceGrammar(ll_matcher=matcher, ll_tokenizer=self.ll_tokenizer, vocab_size=self.vocab_size)

    @functools.cached_property
    def _special_tokens(self) -> dict[str, int]:
        added = self.tokenizer.get_added_vocab()
        return {name: token for name, token in added.items() if self.ll_tokenizer.is_special_token(token)}


@dataclass
class Bounded(StructuredOutputGrammar):  # type: ignore[misc]
    """A grammar of any backend, which says why it cannot go on."""

    grammar: Any
    digits: Digits | None = None
    """Where an answer is JSON, of whose numbers it bounds the length."""
    _runs: list[int] = field(default_factory=list)
    """After each token, how many in a row had digits alone."""

    @property
    def why(self) -> str | None:
        """Why the request ends; None as long as it goes on."""
        matcher = getattr(self.grammar, "ll_matcher", None)
        if matcher is None or not matcher.is_error():
            return None
        line = matcher.get_error().partition("\n")[0].rstrip(".")
        return (
            f"structured output: this grammar is too complex, or cannot go on here: {line}. Use fewer "
            "alternatives or nested repetitions"
        )

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance; False ends the request, see `_accept_tokens`."""
        if self.digits is not None:
            for token in tokens:
                self._runs.append(self._runs[-1] + 1 if self._runs and token in self.digits else token in self.digits)
        return bool(self.grammar.accept_tokens(request_id, tokens)) and self.why is None

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """Fill one row; of a request that ends any token will do."""
        self.grammar.fill_bitmask(bitmask, idx)
        if self.why is not None:
            bitmask[idx].fill_(-1)
        elif self.digits is not None and self._runs and self._runs[-1] >= MOST_DIGITS:
            self.digits.forbid(bitmask[idx])

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Pass on."""
        return list(self.grammar.validate_tokens(tokens))

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        del self._runs[len(self._runs) - num_tokens :]
        self.grammar.rollback(num_tokens)

    def is_terminated(self) -> bool:
        """Pass on."""
        return bool(self.grammar.is_terminated())

    def reset(self) -> None:
        """Forget all tokens."""
        self._runs.clear()
        self.grammar.reset()


_vllm_create = StructuredOutputManager._create_grammar
_vllm_accept = StructuredOutputManager.accept_tokens


def _create_grammar(manager: Any, request: Any) -> StructuredOutputGrammar:
    """Compile without taking the core from the step loop, in vLLM's thread for it."""
    if manager._use_async_grammar_compilation:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILING_NICENESS)
    grammar = _vllm_create(manager, request)
    is_json = request.structured_output_request.structured_output_key[0] in JSON_KINDS
    return Bounded(grammar, getattr(manager.backend, "digits", None) if is_json else None)


def _accept_tokens(manager: Any, request: Any, new_token_ids: list[int]) -> bool:
    """As vLLM's, which ends the request if it is False; its output then says why."""
    accepted: bool = _vllm_accept(manager, request, new_token_ids)
    if not accepted and isinstance(grammar := request.structured_output_request.grammar, Bounded):
        request.stop_reason = grammar.why
    return accepted
