"""What a request may ask of structured output, so that one client's grammar holds up nobody else.

A grammar costs when it is compiled, and again at each token. Before either, `refusal` bounds its size; the engine then
meters it (`engine.vllm_workarounds.bounded_grammars`). Called by `router.front.request_fields` and
`router.front.engine_client`; `choose_backend` is called by `engine.vllm_engine` too.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES: Final = 65_536
"""The default of `server.max_grammar_bytes`. The slowest grammars of this size found compile in 0.4 s of a core."""
BYTES_PER_PART: Final = 32
"""A schema may have one object for so many bytes of the limit: an object of 1,500 properties compiles in 0.4 s, one of
5,000 in 7 s, and their names may be two bytes long."""
TAG_BYTES: Final = 8
"""A structural tag may be so many times as long: a forced tool call has each tool once or twice, unread by the model's
client. 512 KiB are a hundred tools with schemas of 2 KiB."""
LARGEST_MULTIPLE: Final = 10_000
"""Largest `multipleOf`, in units of its last digit: its automaton has a state for each remainder. 9,973 compiles in
0.1 s, 99,991 in 1.5 s."""

_REPEATED: Final = re.compile(r"[*+]|\{(\d*)(,?)(\d*)\}")


def choose_backend(config: Any, tokenizer: Any) -> None:
    """Have vLLM's `auto` mean guidance where the tokenizer allows it: of vLLM's backends only that one bounds a step.

    A backend that an operator has chosen stays. `config` is vLLM's StructuredOutputsConfig.
    """
    if config.backend == "auto" and GuidanceBackend.is_tokenizer_supported(tokenizer):
        config.backend = "guidance"
    if config.backend != "guidance":
        logger.warning(
            "structured_outputs_config.backend is %s, which bounds neither the time of a step nor that of compiling: "
            "one grammar can hold up every stream of an engine for seconds; guidance bounds both",
            config.backend,
        )


def refusal(params: StructuredOutputsParams, max_bytes: int) -> str | None:
    """Return why a grammar is refused before it is compiled; None if it is not."""
    limit = max_bytes * (TAG_BYTES if params.structural_tag else 1)
    size = sum(len(text.encode(errors="surrogatepass")) for text in _texts(params))
    if size > limit:
        return (
            f"the structured output has {size} bytes, and {limit} are allowed (server.max_grammar_bytes): "
            "send a smaller schema, fewer choices or a shorter expression"
        )
    try:
        schema = json.loads(params.json) if isinstance(params.json, str) else params.json
        tag = json.loads(params.structural_tag) if params.structural_tag else None
    except (ValueError, RecursionError) as error:
        return f"the structured output is not JSON: {error}"
    return _schema_refusal(schema if tag is None else tag, limit) or _tag_refusal(tag)


def _texts(params: StructuredOutputsParams) -> Iterator[str]:
    for text in (params.regex, params.grammar, params.structural_tag):
        yield text or ""
    yield from params.choice or ()
    if params.json is not None:
        yield params.json if isinstance(params.json, str) else json.dumps(params.json)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in it, without recursion: vLLM limits the depth only later."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)


def _schema_refusal(schema: Any, limit: int) -> str | None:
    most, multiples = limit // BYTES_PER_PART, set()
    for count, part in enumerate(_objects(schema), 1):
        if count > most:
            return (
                f"the schema has more than {most} objects, one for {BYTES_PER_PART} bytes of server.max_grammar_bytes: "
                "send a smaller schema"
            )
        multiple = part.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and math.isfinite(multiple):
            digits = Decimal(str(multiple)).normalize().as_tuple().digits
            multiples.add(int("".join(map(str, digits))) or 1)
    if math.lcm(*multiples) > LARGEST_MULTIPLE:
        return (
            f"multipleOf: the least common multiple is more than {LARGEST_MULTIPLE} (0.25 counts as 25, 300 as 3): "
            "use fewer or rounder values"
        )
    return None


def _tag_refusal(tag: Any) -> str | None:
    """xgrammar, which reads tags, takes exponentially long over repetitions inside counted ones."""
    if tag is None:
        return None
    for part in _objects(tag):
        for key in ("pattern", "grammar"):
            if isinstance(text := part.get(key), str) and repeats_a_repetition(text):
                return (
                    f"{key}: in tools and structural tags no repetition may contain another one if either is "
                    f"counted ({{m,n}}): write {text[:60]!r} without, or use structured_outputs or response_format"
                )
        if any(repeats_a_repetition(name) for name in part.get("patternProperties") or ()):
            return (
                "patternProperties: a counted repetition ({m,n}) may not be inside or around another one: write the "
                "pattern without {m,n}"
            )
        if part.get("type") == "repeat" and any(one.get("type") == "repeat" for one in _objects(part.get("content"))):
            return "repeat: a structural tag's repeat may not contain another: flatten them"
    return None


def repeats_a_repetition(pattern: str) -> bool:
    """Whether a repetition in a regular expression is in another one, and one of both has a varying count."""
    inside: list[set[str]] = [set()]
    last: set[str] = set()
    place = 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place, last = place + 2, set()
        elif character == "[":
            end = place + 2
            while end < len(pattern) and pattern[end] != "]":
                end += 2 if pattern[end] == "\\" else 1
            place, last = end + 1, set()
        elif character == "(":
            inside.append(set())
            place += 1
        elif character == ")":
            last = inside.pop() if len(inside) > 1 else set()
            inside[-1] |= last
            place += 1
        elif found := _REPEATED.match(pattern, place):
            kind = "counted" if character == "{" and found[2] and found[1] != found[3] else "fixed"
            kind = "star" if character in "*+" else kind
            if last and kind != "fixed" and "counted" in (last | {kind}):
                return True
            inside[-1].add(kind)
            place, last = found.end(), last | {kind}
        else:
            place, last = place + 1, last if character == "?" else set()
    return False
