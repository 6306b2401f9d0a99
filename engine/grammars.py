"""What a request may ask of structured output, so that one client's grammar holds up nobody else.

A grammar costs when it is compiled, and again at each token. Before either, `refusal` bounds its size; the engine then
meters it (`ridgeline.engine.vllm_workarounds.bounded_grammars`).
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from operator import itemgetter
from typing import Any, Final

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

from ridgeline.engine.tag_grammars import as_lark

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES: Final = 65_536
"""The default of `server.max_grammar_bytes`. The slowest grammars of this size found compile in 0.4 s of a core."""
BYTES_PER_PART: Final = 32
"""A schema may have one object for so many bytes of the limit: an object of 1,500 properties compiles in 0.4 s, one of
5,000 in 7 s, and their names may be two bytes long."""
TAG_BYTES: Final = 8
"""A structural tag may be so many times as long: a forced tool call has each tool once or twice, unread by the model's
client. 512 KiB are a hundred tools with schemas of 2 KiB."""
BEYOND: Final = 10**9
"""Stands for every larger number of parts."""
SHOWN: Final = 100
"""Characters of a name that an error repeats."""
LARGEST_MULTIPLE: Final = 65_536
"""Largest `multipleOf`, in units of its last digit: its automaton has a state for each remainder. 65,536 compiles in
0.04 s, 99,991 in 1.1 s."""
LARGEST_ODD_MULTIPLE: Final = 10_000
"""Of that, the largest part that neither 2 nor 5 divides: 9,973 compiles in 0.1 s, 65,521 in 0.9 s. Whether a number is
a multiple of the other part is seen in its last digits."""
MOST_PARTS: Final = 1_024
"""Parts that all patterns of the tools of a request may have once xgrammar has unrolled them. A part compiles in 2.5 to
4.5 ms with 49,000 tokens, so they take 5 s, beside the step loop. The largest ordinary pattern found has 567."""
UNROLLED: Final = 128
"""xgrammar unrolls counts up to this one. A larger one takes an eighth of the time for each part, or less."""
WIDE_PARTS: Final = 4
"""Parts of a character of any kind: it may be four bytes long, and each has a state. A string with a `maxLength` of 50
compiles in 0.9 s, of 128 in 3 s, and of more in 3.5 to 4.5 s."""
PAIRS_PER_PART: Final = 400
"""With a `minProperties` or `maxProperties`, xgrammar writes a rule for each property after each other one: 0.3 s for
200 of them, 7 s for 800."""

IGNORED: Final = (
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords of JSON Schema that a grammar of guidance does not enforce: those of which it says "Unimplemented keys"."""
_OFF: Final = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
_SCHEMAS: Final = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf")
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_COUNT: Final = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_RULE: Final = re.compile(r"(?=\b[\w-]+\s*::=)")
_WIDE: Final = re.compile(r"\.|\[\^|\[?.*(?:\\[WSDpPu]|[^\x00-\x7f])", re.DOTALL)


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
    try:
        size = sum(len(text.encode(errors="surrogatepass")) for text in _texts(params))
        if size > limit:
            return (
                f"the structured output has {size} bytes, and {limit} are allowed (server.max_grammar_bytes): "
                "send a smaller schema, fewer choices or a shorter expression"
            )
        schema = json.loads(params.json) if isinstance(params.json, str) else params.json
        tag = json.loads(params.structural_tag) if params.structural_tag else None
    except (ValueError, RecursionError) as error:
        return f"the structured output is not JSON: {error}"
    if (path := ignored(schema)) is not None:
        _say_ignored(path.rpartition("/")[2])
    return _schema_refusal(schema if tag is None else tag, limit) or _tag_refusal(tag)


@functools.cache
def _say_ignored(keyword: str) -> None:
    """Once for each keyword: a client can send a schema as often as it likes."""
    logger.warning("a schema has %s, which its grammar does not enforce; with strict: true it gets 400", keyword)


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


def ignored(schema: Any, path: str = "") -> str | None:
    """Return the path of a keyword in a schema that its grammar does not enforce; None if there is none.

    Neither properties with the name of a keyword count, nor what is in values (`const`, `enum`, `default`).
    """
    left: list[tuple[dict[str, Any], _Path]] = [(schema, (None, path))] if isinstance(schema, dict) else []
    while left:
        part, at = left.pop()
        for keyword in IGNORED:
            if part.get(keyword) not in (None, {}, _OFF.get(keyword)):
                return _written((at, keyword))
        for keyword, value in part.items():
            inner = (at, keyword)
            left.extend((one, (inner, place) if place else inner) for place, one in _in(keyword, value))
    return None


def _in(keyword: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema that a keyword has, by its place there: "" if it is the value itself."""
    found: Iterable[tuple[Any, Any]] = ()
    if keyword in _SCHEMAS:
        found = enumerate(value) if isinstance(value, list) else [("", value)]
    elif keyword in _NAMED_SCHEMAS and isinstance(value, dict):
        found = value.items()
    return ((str(place), one) for place, one in found if isinstance(one, dict))


_Path = tuple[Any, str]
"""The path of what is around it, and a name in there. To write out each path would take the square of a schema."""


def _written(path: _Path | None) -> str:
    names: list[str] = []
    while path is not None:
        path, name = path
        names.append(name if len(name) <= SHOWN else f"{name[:SHOWN]}...")
    return "/".join(reversed(names))


def _schema_refusal(schema: Any, limit: int) -> str | None:
    most, common = limit // BYTES_PER_PART, 1
    for count, part in enumerate(_objects(schema), 1):
        if count > most:
            return (
                f"the schema has more than {most} objects, one for {BYTES_PER_PART} bytes of server.max_grammar_bytes: "
                "send a smaller schema"
            )
        if common <= LARGEST_MULTIPLE:  # beyond, it would only grow, and each further step would take longer
            common = math.lcm(common, _digits(part.get("multipleOf")))
    odd = common
    while (divisor := math.gcd(odd, 10)) > 1:
        odd //= divisor
    if common > LARGEST_MULTIPLE or odd > LARGEST_ODD_MULTIPLE:
        return (
            f"multipleOf: the least common multiple is more than {LARGEST_MULTIPLE}, or more than "
            f"{LARGEST_ODD_MULTIPLE} once it is divided by 2 and 5 as often as that goes (0.25 counts as 25): "
            "use fewer or rounder values"
        )
    return None


def _digits(multiple: Any) -> int:
    """Return the digits of a number without the zeros around them, as a whole number; 1 for what is no number."""
    if type(multiple) not in (int, float) or (type(multiple) is float and not math.isfinite(multiple)):
        return 1
    digits = Decimal(multiple if type(multiple) is int else str(multiple)).normalize().as_tuple().digits
    return int("".join(map(str, digits))) or 1


def _tag_refusal(tag: Any) -> str | None:
    """xgrammar, which reads most tags, unrolls counted repetitions, those inside each other too."""
    if tag is None:
        return None
    for part in _objects(tag):
        if part.get("type") == "repeat" and any(one.get("type") == "repeat" for one in _objects(part.get("content"))):
            return "repeat: a structural tag's repeat may not contain another: flatten them"
    parts = tag_parts(tag)
    if (total := sum(count for count, _ in parts)) <= MOST_PARTS or tag_as_lark(tag, {}, json.dumps) is not None:
        return None
    worst = _written(max(parts, key=itemgetter(0))[1])
    return (
        f"tools and structural tags whose arguments are no JSON text may have {MOST_PARTS} parts together once each "
        f"{{m,n}}, and each length, is written out, and these have {total}, most of them at {worst[-200:]}: "
        "use smaller counts, or * and + instead, leave the limit out, or send strict: false"
    )


def tag_as_lark(tag: Any, special: Mapping[str, int], write_json: Callable[[Any], str]) -> str | None:
    """Return a tag as a grammar of guidance; None if only xgrammar can read it."""
    try:
        return as_lark(tag, special, write_json)
    except (ValueError, KeyError, TypeError):  # xgrammar says what is wrong with it, if anything is
        return None


def tag_parts(tag: Any) -> list[tuple[int, _Path]]:
    """Return how many parts xgrammar makes of each pattern, grammar and length in a structural tag, with its path.

    It makes those that are alike once.
    """
    parts, seen = list[tuple[int, _Path]](), set[Any]()
    left: list[tuple[Any, _Path]] = [(tag, (None, ""))]
    while left:
        part, path = left.pop()
        if isinstance(part, list):
            left.extend((one, (path, str(place))) for place, one in enumerate(part))
        elif isinstance(part, dict):
            left.extend((one, (path, name)) for name, one in part.items())
            for name, value, count in _own_parts(part):
                if (name, value) not in seen:
                    seen.add((name, value))
                    parts.append((count, (path, name)))
    return parts


def _own_parts(part: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    names = part.get("patternProperties")
    for pattern in (part.get("pattern"), *(names if isinstance(names, dict) else ())):
        if isinstance(pattern, str):
            yield f"pattern {pattern[:60]!r}", pattern, unrolled_parts(pattern)
    if isinstance(grammar := part.get("grammar"), str):
        yield "grammar", grammar, _grammar_parts(grammar)
    limits = part.get("minLength"), part.get("maxLength")
    if (most := max((limit for limit in limits if type(limit) is int), default=0)) > 0:
        yield "maxLength", limits, min(most, 2 * UNROLLED) * WIDE_PARTS
    counted = next((name for name in ("minProperties", "maxProperties") if part.get(name)), None)
    if counted is not None and isinstance(properties := part.get("properties"), dict):
        yield counted, tuple(properties), len(properties) ** 2 // PAIRS_PER_PART


def _grammar_parts(grammar: str) -> int:
    """Return the most parts that a grammar may have: a rule may repeat what another one repeats."""
    rules = _RULE.split(grammar)
    parts = sum(map(unrolled_parts, rules))
    for times in sorted(max(_counts(rule), default=1) for rule in rules)[:-1]:
        parts = min(parts * times, BEYOND)
    return parts


def _counts(text: str) -> Iterator[int]:
    for found in _COUNT.finditer(text):
        written = found[2] or found[1] or "1"
        yield BEYOND if len(written) >= len(str(BEYOND)) else max(1, int(written))


def unrolled_parts(pattern: str) -> int:
    """Return how many characters and classes a regular expression has once its counted repetitions are written out.

    A pattern that is not well formed has some number too: the compiler refuses it.
    """
    groups: list[int] = [0]
    last, place = 0, 0
    while place < len(pattern):
        end, character = place + 1, pattern[place]
        if character == "(":
            groups.append(0)
            last = 0
        elif character == ")":
            last = groups.pop() if len(groups) > 1 else 0
            groups[-1] += last
        elif character == "{" and (found := _COUNT.match(pattern, place)):
            count, end = next(_counts(found[0])), found.end()
            times = count if count <= UNROLLED else max(1, count // 8)
            groups[-1] += min(last * (times - 1), BEYOND)
            last = min(last * times, BEYOND)
        elif character not in "*+?|^$":
            end = _end_of_atom(pattern, place)
            last = WIDE_PARTS if _WIDE.match(pattern[place:end]) else 1
            groups[-1] += last
        place = end
    return sum(groups)


def _end_of_atom(pattern: str, place: int) -> int:
    if pattern[place] == "\\":
        return place + 2
    if pattern[place] != "[":
        return place + 1
    end = place + 1
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return end + 1
