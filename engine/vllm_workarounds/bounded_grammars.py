"""Bounds the time that one request's grammar takes of an engine.

vLLM masks tokens in the step loop, for all requests one after the other, and nothing in it limits how long a grammar
may take there. `bound_grammars` is for the engine process, `bound_validation` for any that accepts grammars.
"""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
import threading
import time
from dataclasses import dataclass
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
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar
from vllm.v1.structured_output.request import get_structured_output_key

from ridgeline.engine.grammars import MOST_PARTS, tag_as_lark, tag_parts

if TYPE_CHECKING:
    import torch

ALLOWED_S: Final = 0.05
"""CPU time that a grammar may take at once, beyond `PER_TOKEN_S`: first masks of large schemas take up to 30 ms."""
PER_TOKEN_S: Final = 0.001
"""CPU time that it may take for each token in the long run, at least. JSON schemas take 0.2 ms; masks of expressions
that are made to be slow take 2 to 200 ms, and growing."""
ORDINARY: Final = r"[A-Za-z0-9 ,.'-]{1,1000}"
"""An ordinary expression whose masks walk most of the vocabulary: 0.8 to 1.1 ms with 49,000 tokens, 1.4 to 1.9 ms with
152,000. `ordinary_mask_s` times it on this machine."""
ORDINARY_MASKS: Final = 2
"""A token may take so many ordinary masks: a core that another one slows takes up to 1.6 times as long."""
CHECKED_BYTES: Final = 8192
"""Longer grammars are compiled in the engine only, which refuses them alike: the router's event loop has no time for
them. One of this size takes it 15 ms at most."""
COMPILING_NICENESS: Final = 10
"""Of the thread that compiles, which shares the engine's core: the step loop keeps nine tenths of it."""
CHECKED_PARTS: Final = 64
"""Structural tags with as many parts in their patterns are compiled in the engine only, too: xgrammar takes 2 s to read
`.{0,1000}` (500 parts), and 4 to 10 ms for less than 64."""
_SPECIAL: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")


def limits() -> Any:
    """Return llguidance's limits; where a step's differ, half or less was enough for every schema tried.

    Its mask of 50,000 items takes 10 ms. The number of lexer states is its own: a string with a `maxLength` takes about
    15 a token (46,000 states are 26 MB), so 250,000 last 16,000 tokens.
    """
    return llguidance.LLParserLimits(step_max_items=20_000, step_lexer_fuel=100_000)


def serialize(kind: StructuredOutputOptions, text: str, compact: bool = False, closed: bool = False) -> str:
    """As vLLM's, but ignore the keywords of a schema that guidance lacks, as xgrammar does, and read oneOf as anyOf."""
    if kind is not StructuredOutputOptions.JSON:
        return str(serialize_guidance_grammar(kind, text, compact, closed))
    schema = process_for_additional_properties(text) if closed else text
    defaults: Any = {"whitespace_flexible": not compact, "lenient": True, "coerce_one_of": True}
    return str(llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=defaults))


def serialize_in_tag(schema: bool | dict[str, Any]) -> str:
    """As `serialize`, for a tag: closed as xgrammar reads it, which allows only the properties that a schema names."""
    closed = process_for_additional_properties({} if schema is True else schema)
    options = {"whitespace_flexible": True, "lenient": True, "coerce_one_of": True}
    return json.dumps(closed | {"x-guidance": options})


def ordinary_mask_s(tokenizer: Any) -> float:
    """Return the CPU time of a mask of `ORDINARY` with this vocabulary, on this machine."""
    grammar = llguidance.grammar_from("regex", ORDINARY)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    row = llguidance.torch.allocate_token_bitmask(1, tokenizer.vocab_size)
    token = tokenizer.tokenize_str("a")[0]
    times_s = []
    for _ in range(21):
        began_s = time.thread_time()
        llguidance.torch.fill_next_token_bitmask(matcher, row, 0)
        times_s.append(time.thread_time() - began_s)
        matcher.consume_token(token)
    return statistics.median(times_s)


def bound_validation() -> None:
    """Have this process check grammars by the same limits as the engine compiles them."""
    backend_guidance.validate_guidance_grammar = _validate


def bound_grammars() -> None:
    """Have this engine meter grammars, and end a request whose grammar takes too long; a second call does nothing."""
    structured_output.GuidanceBackend = BoundedGuidance
    StructuredOutputManager._create_grammar = _create_grammar
    StructuredOutputManager.accept_tokens = _accept_tokens


def _validate(sampling_params: Any, tokenizer: Any = None) -> None:
    params = sampling_params.structured_outputs
    if params is None:
        return
    kind, text = get_structured_output_key(params)
    if kind is StructuredOutputOptions.CHOICE or len(text) > CHECKED_BYTES:
        return
    if kind is StructuredOutputOptions.STRUCTURAL_TAG:
        if sum(count for count, _ in tag_parts(json.loads(text))) < CHECKED_PARTS:
            validate_xgrammar_grammar(sampling_params)
        return
    try:
        grammar = serialize(kind, text)
    except (ValueError, KeyError, TypeError) as error:
        raise VLLMValidationError(f"Invalid grammar specification: {error}") from error
    if why := llguidance.LLMatcher.validate_grammar(grammar, tokenizer, limits=limits()):
        raise VLLMValidationError(f"Grammar error: {why}")


class BoundedGuidance(GuidanceBackend):  # type: ignore[misc]
    """vLLM's, with limits. Choices are one expression; structural tags go to xgrammar, unless it would take long."""

    _tags: XgrammarBackend | None = None

    def __post_init__(self) -> None:
        """Measure, once an engine, how long an ordinary mask takes."""
        super().__post_init__()
        self.per_token_s = max(PER_TOKEN_S, ORDINARY_MASKS * ordinary_mask_s(self.ll_tokenizer))

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        """Compile in this thread."""
        if request_type is StructuredOutputOptions.STRUCTURAL_TAG:
            return self._compile_tag(grammar_spec, stop_token_ids)
        if request_type is StructuredOutputOptions.CHOICE:
            # A grammar has an item for each choice in every row, an expression a state for each common beginning.
            choices = (_SPECIAL.sub(r"\\\g<0>", choice) for choice in json.loads(grammar_spec))
            text = llguidance.grammar_from("regex", "|".join(choices))
        else:
            text = serialize(
                request_type, grammar_spec, self.disable_any_whitespace, self.disable_additional_properties
            )
        return self._guided(text)

    def _guided(self, text: str) -> GuidanceGrammar:
        matcher = llguidance.LLMatcher(self.ll_tokenizer, text, log_level=0, limits=limits())
        return GuidanceGrammar(ll_matcher=matcher, ll_tokenizer=self.ll_tokenizer, vocab_size=self.vocab_size)

    def _compile_tag(self, text: str, stop_token_ids: set[int] | None) -> StructuredOutputGrammar:
        """By xgrammar, which takes what vLLM expects; by guidance if that would take long."""
        tag = json.loads(text)
        if (parts := sum(count for count, _ in tag_parts(tag))) >= CHECKED_PARTS:
            lark = tag_as_lark(tag, self._special_tokens, serialize_in_tag)
            grammar = None if lark is None else self._guided(lark)
            if grammar is not None and (parts > MOST_PARTS or not grammar.ll_matcher.is_error()):
                return grammar
            if parts > MOST_PARTS:
                raise ValueError("this structural tag would take xgrammar too long, and guidance cannot read it")
        return self._by_xgrammar(text, stop_token_ids)

    def _by_xgrammar(self, tag: str, stop_token_ids: set[int] | None) -> StructuredOutputGrammar:
        if self._tags is None:
            self._tags = XgrammarBackend(self.vllm_config, self.tokenizer, self.ll_tokenizer.vocab_size)
        return self._tags.compile_grammar(StructuredOutputOptions.STRUCTURAL_TAG, tag, stop_token_ids)

    @functools.cached_property
    def _special_tokens(self) -> dict[str, int]:
        added = self.tokenizer.get_added_vocab()
        return {name: token for name, token in added.items() if self.ll_tokenizer.is_special_token(token)}


@dataclass
class Metered(StructuredOutputGrammar):  # type: ignore[misc]
    """A grammar of any backend, and the CPU time that it may still take."""

    grammar: Any
    per_token_s: float = PER_TOKEN_S
    left_s: float = ALLOWED_S
    why: str | None = None
    """Why the request ends; None as long as it goes on."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance; False ends the request, see `_accept_tokens`."""
        if self.why is not None:
            return False
        began_s = time.thread_time()
        accepted = bool(self.grammar.accept_tokens(request_id, tokens))
        self._spend(time.thread_time() - began_s)
        return accepted and self.why is None

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """Fill one row; of a request that ends any token will do."""
        if self.why is None:
            began_s = time.thread_time()
            self.grammar.fill_bitmask(bitmask, idx)
            self.left_s = min(ALLOWED_S, self.left_s + self.per_token_s)
            self._spend(time.thread_time() - began_s)
        if self.why is not None:
            bitmask[idx].fill_(-1)

    def _spend(self, seconds: float) -> None:
        self.left_s -= seconds
        if self.left_s < 0:
            self.why = (
                f"structured output: this grammar takes too long. It may take {self.per_token_s * 1e3:.2g} ms of CPU "
                f"time a token, and {ALLOWED_S * 1e3:g} ms more at once: use fewer nested repetitions and alternatives"
            )
        elif (matcher := getattr(self.grammar, "ll_matcher", None)) is not None and matcher.is_error():
            line = matcher.get_error().partition("\n")[0].rstrip(".")
            self.why = (
                f"structured output: this grammar is too complex, or cannot go on here: {line}. Use fewer "
                "alternatives or nested repetitions"
            )

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Pass on."""
        return list(self.grammar.validate_tokens(tokens))

    def rollback(self, num_tokens: int) -> None:
        """Pass on."""
        self.grammar.rollback(num_tokens)

    def is_terminated(self) -> bool:
        """Pass on."""
        return bool(self.grammar.is_terminated())

    def reset(self) -> None:
        """Pass on."""
        self.grammar.reset()


_vllm_create = StructuredOutputManager._create_grammar
_vllm_accept = StructuredOutputManager.accept_tokens


def _create_grammar(manager: Any, request: Any) -> StructuredOutputGrammar:
    """Compile without taking the core from the step loop, in vLLM's thread for it."""
    if manager._use_async_grammar_compilation:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILING_NICENESS)
    grammar = _vllm_create(manager, request)
    return Metered(grammar, getattr(manager.backend, "per_token_s", PER_TOKEN_S))


def _accept_tokens(manager: Any, request: Any, new_token_ids: list[int]) -> bool:
    """As vLLM's, which ends the request if it is False; its output then says why."""
    accepted: bool = _vllm_accept(manager, request, new_token_ids)
    if not accepted and isinstance(grammar := request.structured_output_request.grammar, Metered):
        request.stop_reason = grammar.why
    return accepted
