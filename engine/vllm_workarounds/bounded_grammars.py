"""Bounds the time that one request's grammar takes of an engine.

vLLM masks tokens in the step loop, for all requests one after the other, and nothing in it limits how long a grammar
may take there. `bound_grammars` is for the engine process, `bound_validation` for any that accepts grammars.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import statistics
import threading
import time
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

ALLOWED_S: Final = 0.1
"""CPU time that a grammar may take beyond `PER_TOKEN_S`: ten of the slowest masks that `limits` allows."""
MOST_OF_A_CALL_S: Final = 0.01
"""No call counts for more, the time of a mask at llguidance's limit. A thread's CPU time includes those when the host
runs another machine: with four busy processes on two cores, masks of 0.05 ms took up to 5.5 ms, and more in CI."""
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
        """Measure, once an engine, how long an ordinary mask takes."""
        super().__post_init__()
        self.per_token_s = max(PER_TOKEN_S, ORDINARY_MASKS * ordinary_mask_s(self.ll_tokenizer))
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
class Metered(StructuredOutputGrammar):  # type: ignore[misc]
    """A grammar of any backend, and the CPU time that it may still take."""

    grammar: Any
    per_token_s: float = PER_TOKEN_S
    left_s: float = ALLOWED_S
    digits: Digits | None = None
    """Where an answer is JSON, of whose numbers it bounds the length."""
    why: str | None = None
    """Why the request ends; None as long as it goes on."""
    _runs: list[int] = field(default_factory=list)
    """After each token, how many in a row had digits alone."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance; False ends the request, see `_accept_tokens`."""
        if self.why is not None:
            return False
        began_s = time.thread_time()
        accepted = bool(self.grammar.accept_tokens(request_id, tokens))
        self._spend(time.thread_time() - began_s)
        if self.digits is not None:
            for token in tokens:
                self._runs.append(self._runs[-1] + 1 if self._runs and token in self.digits else token in self.digits)
        return accepted and self.why is None

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """Fill one row; of a request that ends any token will do."""
        if self.why is None:
            began_s = time.thread_time()
            self.grammar.fill_bitmask(bitmask, idx)
            if self.digits is not None and self._runs and self._runs[-1] >= MOST_DIGITS:
                self.digits.forbid(bitmask[idx])
            self.left_s = min(ALLOWED_S, self.left_s + self.per_token_s)
            self._spend(time.thread_time() - began_s)
        if self.why is not None:
            bitmask[idx].fill_(-1)

    def _spend(self, seconds: float) -> None:
        self.left_s -= min(seconds, MOST_OF_A_CALL_S)
        if self.left_s < 0:
            self.why = (
                f"structured output: this grammar takes too long. It may take {self.per_token_s * 1e3:.2g} ms of CPU "
                f"time a token, and {ALLOWED_S * 1e3:g} ms more in all: use fewer nested repetitions and alternatives"
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
    per_token_s = getattr(manager.backend, "per_token_s", PER_TOKEN_S)
    is_json = request.structured_output_request.structured_output_key[0] in JSON_KINDS
    return Metered(grammar, per_token_s, digits=getattr(manager.backend, "digits", None) if is_json else None)


def _accept_tokens(manager: Any, request: Any, new_token_ids: list[int]) -> bool:
    """As vLLM's, which ends the request if it is False; its output then says why."""
    accepted: bool = _vllm_accept(manager, request, new_token_ids)
    if not accepted and isinstance(grammar := request.structured_output_request.grammar, Metered):
        request.stop_reason = grammar.why
    return accepted
