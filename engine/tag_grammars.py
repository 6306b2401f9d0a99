"""Structural tags as grammars that guidance reads: those of vLLM's tool parsers, and what clients send.

vLLM writes tags for xgrammar, which drops keywords of a schema without a word, and makes a state for each character of
a `maxLength`. guidance does neither, and knows no tags. A format that has no equal in guidance is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from jsonschema import Draft202012Validator
from vllm.tool_parsers.utils import coerce_to_schema_type, extract_types_from_schema
from xgrammar import StructuralTag
from xgrammar.structural_tag import (
    AnyTextFormat,
    ConstStringFormat,
    JSONSchemaFormat,
    OptionalFormat,
    OrFormat,
    PlusFormat,
    RegexFormat,
    SequenceFormat,
    StarFormat,
    StructuralTagItem,
    TagFormat,
    TagsWithSeparatorFormat,
    TriggeredTagsFormat,
)

ANY: Final = "/(?s:.*)/"
MOST_CHARACTERS: Final = 512 << 10
"""Of all rules of a grammar: as many as a tag may have bytes. Each end of a text repeats what the text excludes."""
MOST_ENDS: Final = 64
"""Of one text, and most triggers in it: within each other, the ends of tags multiply."""
ANSWER_ENDS: Final = None
OTHER: Final = ""
"""What may follow a format: a text, the end of the answer, or something that is no fixed text."""
XML: Final = {
    "qwen_xml": ("<parameter=", ">", "</parameter>", r"<\s*\/?\s*(?:parameter|function|tool_call)"),
    "minimax_xml": ('<parameter name="', '">', "</parameter>", r"<\s*\/?\s*(?:parameter|invoke|minimax)"),
    "deepseek_xml": ('<｜DSML｜parameter name="', '" string="{}">', "</｜DSML｜parameter>", r"<\s*\/?\s*｜DSML"),
    "deepseek_v4_1_xml": ('<｜DSML｜ parameter name="', '" string="{}">', "</｜DSML｜ parameter>", r"<\s*\/?\s*｜DSML"),
    "glm_xml": ("<arg_key>", "</arg_key><arg_value>", "</arg_value>", r"<\s*\/?\s*(?:arg_|tool_call)"),
}
"""The styles of vLLM's tool parsers: before and after the name of an argument, after its value, and what a value may
not have, since the parser takes it for markup. `{}` is whether the value is a string."""
NO_MARKUP: Final = r"^(?:[^<]|<+[^<\s\/｜a-z])*$"
"""Of the strings within a JSON value as XML: none of the styles' markup."""
LIMIT: Final = 10**15
"""Of numbers as XML: vLLM's parsers read 1e999, and an integer of 5,000 digits, as strings."""
ASSERTIONS: Final = frozenset(Draft202012Validator.VALIDATORS)
"""The keywords that a validator of JSON Schema checks. Others describe."""
ASCII: Final = {r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]"}
"""JSON Schema's patterns are those of ECMAScript, in which these two are ASCII; in guidance's they are Unicode."""


class Unreadable(ValueError):
    """guidance has nothing equal to this tag."""


def as_lark(tag: dict[str, Any], special: Mapping[str, int], write_json: Callable[[Any], str]) -> str:
    """Return a tag as a grammar in guidance's Lark. Raises Unreadable, or pydantic's ValueError if it is no tag.

    `special` are tokens that no letters spell, by their text. `write_json` writes a schema with guidance's options.
    """
    try:
        if "structures" in tag:
            items = [StructuralTagItem.model_validate(one) for one in tag["structures"]]
            read = StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
        else:
            read = StructuralTag.model_validate(tag)
    except (KeyError, TypeError) as error:
        raise Unreadable(f"invalid structural tag: {error} is missing or has another type") from error
    writing = _Lark(special, write_json)
    start = writing.expression(read.format, (ANSWER_ENDS,))
    return "\n".join(
        ["%llguidance {}", f"start: {start}", *(f"{name}: {rule}" for rule, name in writing.rules.items())]
    )


_Follows = Sequence[str | None]


class _Lark:
    """Writes formats as expressions. A rule that they need is kept once."""

    def __init__(self, special: Mapping[str, int], write_json: Callable[[Any], str]) -> None:
        self.rules: dict[str, str] = {}
        self._characters = 0
        self._special = special
        self._write_json = write_json
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
        self._at_special = re.compile(f"({names})" if names else "(?!)")
        escaped = "|".join(re.escape(re.escape(name)) for name in sorted(special, key=len, reverse=True))
        self._at_escaped = re.compile(f"({escaped})" if escaped else "(?!)")

    def expression(self, form: Any, follows: _Follows) -> str:
        """Write a format and what may follow it, since only that ends a free text."""
        match form:
            case AnyTextFormat(max_tokens=None, max_chars=None):
                return _one_of(self._free(form.excludes, one) for one in follows)
            case _ if len(follows) > MOST_ENDS:
                raise Unreadable(f"one text may have {MOST_ENDS} ends, and tags within each other multiply them")
            case SequenceFormat():
                return self._sequence(form.elements, follows)
            case OrFormat():
                return _one_of(self.expression(one, follows) for one in form.elements)
            case TagFormat():
                return self._tag(form, follows)
            case OptionalFormat() if self._after(follows):
                return _one_of([self.expression(form.content, follows), self._after(follows)])
            case OptionalFormat():
                return f"({self.expression(form.content, follows)})?"
        return f"{self._bounded(form, last=ANSWER_ENDS in follows)} {self._after(follows)}"

    def _bounded(self, form: Any, last: bool) -> str:
        """Write a format that ends by itself, or with the answer."""
        match form:
            case ConstStringFormat():
                return self._literal(form.value)
            case JSONSchemaFormat(style="json", any_order=False, max_whitespace_cnt=None, excludes=[]):
                return self._json(form.json_schema)
            case RegexFormat():
                return self._pattern(form.pattern)
            case PlusFormat():
                return f"({self.expression(form.content, (OTHER,))})+"
            case StarFormat():
                return f"({self.expression(form.content, (OTHER,))})*"
            case TriggeredTagsFormat() if last:
                return self._triggered(form)
            case TagsWithSeparatorFormat():
                # A rule, else it doubles at each level of nesting.
                one = self._rule("one", _one_of(self._tag(tag, (OTHER,)) for tag in form.tags))
                many = one if form.stop_after_first else f"{one} ({self._literal(form.separator)} {one})*"
                return many if form.at_least_one else f"({many})?"
        raise Unreadable(f"the format {form.type} is not supported here: use const_string, json_schema, regex or tag")

    def _pattern(self, pattern: str) -> str:
        """Write an expression in which the special tokens stand by themselves."""
        pieces = self._at_escaped.split(pattern)
        return " ".join(
            self._literal(re.sub(r"\\(.)", r"\1", piece)) if place % 2 else self._rule("REGEX", _regex(piece))
            for place, piece in enumerate(pieces)
            if piece
        )

    def _after(self, follows: _Follows) -> str:
        return _one_of(self._literal(one or "") for one in follows)

    def _free(self, without: Iterable[str], end: str | None) -> str:
        if end == OTHER:
            raise Unreadable("any_text must be last, or be followed by a const_string or the end of its tag")
        return self._text(without) if end is None else self._until(end, without)

    def _sequence(self, elements: Sequence[Any], follows: _Follows) -> str:
        written, left = list[str](), list(elements)
        while left:
            one = left.pop(0)
            after: _Follows = (OTHER,) if left else follows
            if left and isinstance(one, AnyTextFormat) and isinstance(left[0], ConstStringFormat):
                end = left.pop(0).value
                after = (end,) if left else [end + (more or "") for more in follows]
            written.append(self.expression(one, after))
        return " ".join(written)

    def _tag(self, tag: TagFormat, follows: _Follows, trigger: str = "") -> str:
        """Write a tag, or what is left of it after a trigger."""
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        if not isinstance(tag.begin, str) or not isinstance(ends, list):
            raise Unreadable("begin and end of a tag must be text")
        after = [end + (more or "") if end else more for end in ends for more in follows]
        begin = self._literal(tag.begin.removeprefix(trigger))
        try:
            if isinstance(tag.content, JSONSchemaFormat) and tag.content.style in XML:
                # Only the parsers of Qwen's format take one newline off each end of a value.
                newline = "\n" if tag.content.style == "qwen_xml" and tag.begin.endswith("\n") else ""
                return f"{begin} {self._xml(tag.content, newline)} {self._after(after)}"
            return f"{begin} {self.expression(tag.content, after)}"
        except Unreadable as error:
            raise Unreadable(f"{tag.begin.strip()[:100]!r}: {error}") from error

    def _triggered(self, form: TriggeredTagsFormat) -> str:
        if len(form.triggers) > MOST_ENDS:
            raise Unreadable(f"one text may have {MOST_ENDS} triggers: use a shorter one that tags share")
        of_trigger: dict[str, list[TagFormat]] = {}
        for tag in form.tags:
            trigger = next((one for one in form.triggers if str(tag.begin).startswith(one)), None)
            if not trigger:
                raise Unreadable(f"the tag {tag.begin!r} begins with none of the triggers: add one")
            of_trigger.setdefault(trigger, []).append(tag)
        without = [*form.excludes, *form.triggers]
        text = self._text(without)
        call = _one_of(
            f"{self._until(trigger, without)} {_one_of(self._tag(tag, (OTHER,), trigger) for tag in tags)}"
            for trigger, tags in of_trigger.items()
        )
        if form.at_least_one:
            first = _one_of(self._tag(tag, (OTHER,)) for tag in form.tags)
            return first if form.stop_after_first else f"{first} {call}* {text}"
        return f"({call} | {text})" if form.stop_after_first else f"{call}* {text}"

    def _xml(self, form: JSONSchemaFormat, newline: str) -> str:
        """Write the arguments of a tool as XML, in the order in which its schema names them."""
        before, after, end, markup = XML[form.style]
        schema = form.json_schema
        between = self._rule("BETWEEN", r"/\n?/")

        def argument(name: str, values: Iterable[tuple[bool, str]]) -> str:
            kinds = _one_of(
                f"{self._literal(after.format(str(string).lower()) + newline)} {value}" for string, value in values
            )
            return f"{between} {self._literal(before)} {name} {kinds}"

        if schema is True:
            name = self._rule("NAME", "/[A-Za-z_][A-Za-z0-9_.-]*/")
            return f"({argument(name, [(True, self._until(newline + end, [end]))])})* {between}"
        if re.search(markup, json.dumps(schema, ensure_ascii=False)):
            raise Unreadable("markup in a schema of XML arguments: send strict: false")
        if schema is False or set(schema) & ASSERTIONS - {"type", "properties", "required", "additionalProperties"}:
            raise Unreadable(
                "XML arguments have type, properties, required and additionalProperties alone: send strict: false"
            )
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if odd := [
            name for name in properties if not name or name != name.strip() or re.search(r'[<>"\n]', name)
        ] or set(required) - set(properties):
            raise Unreadable(f"arguments {sorted(odd)} cannot be written as XML: send strict: false")
        written = list[str]()
        for name, one in properties.items():
            try:
                values = list(self._xml_values(one, schema, newline + end, markup))
            except Unreadable as error:
                raise Unreadable(f"properties/{name}: {error}") from error
            text = argument(self._literal(name), values)
            written.append(text if name in required else f"({text})?")
        return " ".join([*written, between])

    def _xml_values(self, schema: Any, root: dict[str, Any], end: str, markup: str) -> Iterator[tuple[bool, str]]:
        """Yield whether each alternative of a value is a string, and its text with its end.

        vLLM's parsers turn the text into the first type that takes it. A schema under which that could give another
        value than the one that was written is Unreadable.
        """
        types = extract_types_from_schema(schema)
        choices = list(_alternatives(schema, root))
        strings = [one for one in choices if _is_string(one)]
        others = [one for one in choices if not _is_string(one)]
        if others and ("string" in types) != bool(strings):
            raise Unreadable("vLLM's parser would take this value for a string: write its type in place of $ref")
        bounded = any(set(one) & ASSERTIONS - {"type"} for one in choices)
        if strings and bounded and any(one.get("type") != "null" and one.get("const", 0) is not None for one in others):
            raise Unreadable(
                "a string or another type cannot have limits in XML arguments: use one type, or send strict: false"
            )
        for one in others:
            yield False, f"{self._json(_within_xml(one))} {self._literal(end)}"
        for one in strings:
            if unknown := set(one) & ASSERTIONS - {"type", "enum", "const", "minLength", "maxLength", "pattern"}:
                raise Unreadable(
                    f"{sorted(unknown)[0]} of a string is not enforced in XML arguments: send strict: false"
                )
            if "enum" in one or "const" in one:
                values = [value for value in one.get("enum", [one.get("const")]) if isinstance(value, str)]
                if set(one) & ASSERTIONS not in ({"type", "enum"}, {"type", "const"}, {"const"}) or any(
                    coerce_to_schema_type(value, types) not in (value, None) for value in values
                ):
                    raise Unreadable("these values would be read as another type in XML arguments: send strict: false")
                yield True, _one_of(self._literal(value + end) for value in values)
                continue
            least, most = one.get("minLength", 0), one.get("maxLength", "")
            bounds = [f"~({ANY} /{markup}/ {ANY})"]
            if least or most != "":
                bounds.append(f"/(?s:.{{{least},{most}}})/")
            if "pattern" in one:
                bounds.append(_search(one["pattern"]))
            yield True, self._until(end, [], bounds)

    def _json(self, schema: Any) -> str:
        return self._rule("json", f"%json {self._write_json(schema)}")

    def _until(self, end: str, without: Iterable[str], bounds: Sequence[str] = ()) -> str:
        """Write any text up to the first place where it ends so."""
        text = self._text([*without, end], bounds)
        if not self._at_special.search(end):
            return self._rule("until[lazy]", f"{text} {json.dumps(end)}")
        if not self._at_special.match(end):
            raise Unreadable("a text that ends with a special token after letters")
        return f"{text} {self._literal(end)}"

    def _text(self, without: Iterable[str], bounds: Sequence[str] = ()) -> str:
        found = " | ".join(map(json.dumps, dict.fromkeys(without)))
        return self._rule("TEXT", " & ".join([ANY, *bounds, *([f"~({ANY} ({found}) {ANY})"] if found else [])]))

    def _literal(self, text: str) -> str:
        pieces = [piece for piece in self._at_special.split(text) if piece]
        return " ".join(f"<[{self._special[one]}]>" if one in self._special else json.dumps(one) for one in pieces)

    def _rule(self, kind: str, rule: str) -> str:
        self._characters += len(rule)
        if self._characters > MOST_CHARACTERS:
            raise Unreadable("a grammar that is too long")
        name, _, options = kind.partition("[")
        known = self.rules.setdefault(rule, f"{name}_{len(self.rules)}{'[' * bool(options)}{options}")
        return known.partition("[")[0]


def _within_xml(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of a JSON value whose texts are no markup, and which vLLM's parsers read as it was written."""
    match schema:
        case {"type": "integer" | "number"}:
            return {"minimum": -LIMIT, "maximum": LIMIT} | schema
        case {"type": "boolean" | "null"} | {"const": int() | float() | None} | {"type": "string", "enum": _}:
            return schema
        case {"type": "string"}:
            return schema | {"allOf": [*schema.get("allOf", ()), {"pattern": NO_MARKUP}]}
        case {"type": "array", "items": dict(items)} if not set(schema) & ASSERTIONS - {
            *("type", "items", "minItems", "maxItems")
        }:
            return schema | {"items": _within_xml(items)}
        case {"type": "object", "properties": dict(properties)} if not (
            set(schema) & ASSERTIONS - {"type", "properties", "required", "additionalProperties"}
            or schema.get("additionalProperties")
        ):
            named = {name: _within_xml(one) for name, one in properties.items()}
            return schema | {"properties": named, "additionalProperties": False}
        case {"anyOf": [one, {"type": "null"} as null]} if set(schema) & ASSERTIONS == {"anyOf"}:
            return {"anyOf": [_within_xml(one), null]}
    raise Unreadable("lists and objects as XML have parts of one type each, or null: send strict: false")


def _alternatives(schema: Any, root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas of which a value has to meet one, each with one type or one value."""
    left, seen = [{"type": "string"} if schema in (True, {}) else schema], set[str]()
    while left:
        one = left.pop(0)
        keys = set(one) & ASSERTIONS if isinstance(one, dict) else set()
        if keys in ({"anyOf"}, {"oneOf"}):
            left = [*one[keys.pop()], *left]
        elif keys == {"$ref"} and (found := re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", one["$ref"])):
            if one["$ref"] in seen:
                raise Unreadable(f"{one['$ref']} comes twice: write it out, or send strict: false")
            seen.add(one["$ref"])
            left.insert(0, root.get(found[1], {}).get(found[2]))
        elif "type" in keys and isinstance(kinds := one["type"], list):
            left = [*(one | {"type": kind} for kind in kinds), *left]
        elif "enum" in keys and "type" not in keys:
            left = [
                *({name: one[name] for name in one if name != "enum"} | {"const": value} for value in one["enum"]),
                *left,
            ]
        elif keys & {"type", "const"}:
            yield one
        else:
            raise Unreadable("XML arguments need a type here: add one, or send strict: false")


def _is_string(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "string" or ("type" not in schema and isinstance(schema.get("const"), str))


def _search(pattern: str) -> str:
    """Write a pattern of JSON Schema, which may match anywhere, as one of the whole text."""
    ascii_only = re.sub(r"\\.", lambda found: ASCII.get(found[0], found[0]), pattern, flags=re.DOTALL)
    head = "" if pattern.startswith("^") else "(?s:.*)"
    tail = "" if re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) else "(?s:.*)"
    return _regex(f"{head}(?:{ascii_only}){tail}")


def _regex(pattern: str) -> str:
    return "/" + re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern) + "/"


def _one_of(choices: Iterable[str]) -> str:
    different = dict.fromkeys(choices)
    return f"({' | '.join(different)})" if any(different) else ""
