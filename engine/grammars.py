"""What a request may ask of structured output, so that one client's grammar holds up nobody else.

A grammar costs when it is compiled, and again at each token. Before either, `refusal` bounds its size; `limits` bound
each token's work in the engine (`ridgeline.engine.vllm_workarounds.bounded_grammars`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

import llguidance
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, process_for_additional_properties

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES: Final = 65_536
"""The default of `server.max_grammar_bytes`. The slowest grammars of this size found compile in 0.4 s of a core."""
BYTES_PER_PART: Final = 32
"""A schema may have one object for so many bytes of the limit: an object of 1,500 properties compiles in 0.4 s, one of
5,000 in 7 s, and their names may be two bytes long."""
TAG_BYTES: Final = 8
"""A structural tag may be so many times as long: a forced tool call has each tool once or twice, unread by the model's
client. 512 KiB are a hundred tools with schemas of 2 KiB."""
LARGEST_MULTIPLE: Final = 65_536
"""Largest `multipleOf`, in units of its last digit: its automaton has a state for each remainder. 65,536 compiles in
0.04 s, 99,991 in 1.1 s."""
LARGEST_ODD_MULTIPLE: Final = 10_000
"""Of that, the largest part that neither 2 nor 5 divides: 9,973 compiles in 0.1 s, 65,521 in 0.9 s. Whether a number is
a multiple of the other part is seen in its last digits."""
NO_EFFECT: Final = (
    ("uniqueItems", False),
    ("unevaluatedProperties", True),
    ("unevaluatedItems", True),
    ("propertyNames", {"type": "string"}),
)
"""Keywords that guidance lacks, with the value that asks for nothing."""
FORMATS: Final = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "uri-template", "iri", "iri-reference", "uuid", "regex"),
        *("json-pointer", "relative-json-pointer"),
    }
)
"""Those of JSON Schema 2020-12; another one, such as OpenAPI's `binary`, binds nothing."""


def choose_backend(config: Any, tokenizer: Any) -> None:
    """Have vLLM's `auto` mean guidance where the tokenizer allows it: of vLLM's backends only that one bounds a step.

    A backend that an operator has chosen stays. `config` is vLLM's StructuredOutputsConfig.
    """
    if config.backend == "auto" and GuidanceBackend.is_tokenizer_supported(tokenizer):
        config.backend = "guidance"
    if config.backend != "guidance":
        logger.warning(
            "the backend of structured outputs is %s, which limits the time of neither a step nor a compilation: one "
            "grammar can hold up every stream of an engine for seconds, and strict schemas may be broken. Set "
            "structured_outputs_config.backend to guidance, which needs a fast tokenizer",
            config.backend,
        )


def json_options(compact: bool = False, strict: bool = False) -> dict[str, Any]:
    """Return how guidance reads a schema, and writes an answer: on one line, since a model may write blanks forever.

    Unless `strict`, keywords that it lacks are ignored, and `oneOf` is read as `anyOf`.
    """
    blank = "" if compact else " ?"
    return {
        "whitespace_flexible": False,
        "item_separator": f",{blank}",
        "key_separator": f":{blank}",
        "lenient": not strict,
        "coerce_one_of": not strict,
    }


def limits() -> Any:
    """Return llguidance's limits; its own are 50,000 items and 200,000 of fuel.

    A mask of an ambiguous grammar takes up to 20 ms at 4,000 items, 110 ms and more at 20,000. An object of 100
    optional properties needs 1,000 with a vocabulary of 49,000 tokens and 3,000 with 131,000, a choice of 300 objects
    2,000. A mask of 100,000 fuel takes 15 ms; a string without a tool's markup needs 50,000 of it. The number of lexer
    states is llguidance's: a string with a `maxLength` takes about 15 a token (46,000 states are 26 MB), so 250,000
    last 16,000 tokens.
    """
    return llguidance.LLParserLimits(step_max_items=4_000, step_lexer_fuel=100_000)


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
    return _schema_refusal(schema if tag is None else tag, limit)


def strict_refusal(schema: Any, max_bytes: int, closed: bool = False) -> str | None:
    """Return why a schema cannot be enforced, in guidance's words; None if it can.

    `closed` objects have only the properties that they name. Takes up to 0.1 s of a core, most of it without the GIL.
    """
    if not isinstance(schema, dict):
        return None
    if (why := refusal(StructuredOutputsParams(json=schema), max_bytes)) is not None:
        return why
    if closed and schema and schema.get("type") != "object":
        return "the parameters of a tool need the type object"
    options: Any = json_options(strict=True)
    try:
        asked = json.loads(json.dumps(schema), object_hook=_without_what_asks_for_nothing)
        asked = process_for_additional_properties(asked) if closed else asked
        grammar = llguidance.LLMatcher.grammar_from_json_schema(asked, overrides=options)
    except (ValueError, RecursionError) as error:
        return f"this schema cannot be read: {error}"
    return llguidance.LLMatcher.validate_grammar(grammar, None, limits=limits()) or None


def _without_what_asks_for_nothing(part: dict[str, Any]) -> dict[str, Any]:
    part = {name: value for name, value in part.items() if (name, value) not in NO_EFFECT}
    if isinstance(form := part.get("format"), str) and form not in FORMATS:
        del part["format"]
    return part


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
