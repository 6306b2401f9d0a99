"""Structural tags as grammars that guidance reads: those of vLLM's tool parsers whose arguments are JSON.

xgrammar reads every tag, but makes a state for each character of a `maxLength` and tries the whole vocabulary in each.
guidance does neither, knows no tags, and none of the XML styles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from xgrammar import StructuralTag
from xgrammar.structural_tag import (
    AnyTextFormat,
    ConstStringFormat,
    JSONSchemaFormat,
    OptionalFormat,
    OrFormat,
    RegexFormat,
    SequenceFormat,
    StructuralTagItem,
    TagFormat,
    TagsWithSeparatorFormat,
    TriggeredTagsFormat,
)

ANY: Final = "/(?s:.*)/"
MOST_CHARACTERS: Final = 4 << 20
"""Of all rules of a grammar: each end of a text, and each trigger, repeats all that the text may not contain."""


class Unreadable(ValueError):
    """Only xgrammar reads this tag."""


def as_lark(tag: dict[str, Any], special: Mapping[str, int], write_json: Callable[[Any], str]) -> str:
    """Return a tag as a grammar in guidance's Lark. Raises Unreadable, or pydantic's ValueError if it is no tag.

    `special` are tokens that no letters spell, by their text. `write_json` writes a schema with guidance's options.
    """
    if "structures" in tag:
        items = [StructuralTagItem.model_validate(one) for one in tag["structures"]]
        read = StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
    else:
        read = StructuralTag.model_validate(tag)
    writing = _Lark(special, write_json)
    start = writing.expression(read.format, last=True)
    return "\n".join(
        ["%llguidance {}", f"start: {start}", *(f"{name}: {rule}" for rule, name in writing.rules.items())]
    )


class _Lark:
    """Writes formats as expressions. A rule that they need is kept once."""

    def __init__(self, special: Mapping[str, int], write_json: Callable[[Any], str]) -> None:
        self.rules: dict[str, str] = {}
        self._characters = 0
        self._special = special
        self._write_json = write_json
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
        self._at_special = re.compile(f"({names})" if names else "(?!)")

    def expression(self, form: Any, last: bool) -> str:
        """Write a format. Free text may only be last, since nothing else would end it."""
        match form:
            case ConstStringFormat():
                return self._literal(form.value)
            case JSONSchemaFormat(style="json", any_order=False, max_whitespace_cnt=None, excludes=[]) if (
                form.json_schema is not False
            ):
                return self._rule("json", f"%json {self._write_json(form.json_schema)}")
            case RegexFormat(pattern=r"\d+" | "[0-9]+"):
                return self._rule("DIGITS", "/[0-9]+/")
            case AnyTextFormat(max_tokens=None, max_chars=None) if last:
                return self._text(form.excludes)
            case SequenceFormat():
                end = len(form.elements) - 1
                return " ".join(self.expression(one, last and at == end) for at, one in enumerate(form.elements))
            case OrFormat():
                return _one_of(self.expression(one, last) for one in form.elements)
            case OptionalFormat():
                return f"({self.expression(form.content, last)})?"
        return self._tags(form, last)

    def _tags(self, form: Any, last: bool) -> str:
        match form:
            case TagFormat():
                return self._tag(form)
            case TriggeredTagsFormat() if last:
                return self._triggered(form)
            case TagsWithSeparatorFormat():
                one = self._rule("one", _one_of(map(self._tag, form.tags)))  # else it doubles at each level of nesting
                many = one if form.stop_after_first else f"{one} ({self._literal(form.separator)} {one})*"
                return many if form.at_least_one else f"({many})?"
        raise Unreadable(f"only xgrammar reads {form.type} here")

    def _tag(self, tag: TagFormat, trigger: str = "") -> str:
        """Write a tag, or what is left of it after a trigger."""
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        if not isinstance(tag.begin, str) or not isinstance(ends, list):
            raise Unreadable("a tag that tokens begin or end")
        if isinstance(content := tag.content, AnyTextFormat):
            if not all(ends) or content.max_tokens is not None or content.max_chars is not None:
                raise Unreadable("a text that nothing ends, or a length")
            rest = _one_of(self._until(end, content.excludes) for end in ends)
        else:
            rest = f"{self.expression(content, last=False)} {_one_of(map(self._literal, ends))}"
        return f"{self._literal(tag.begin.removeprefix(trigger))} {rest}"

    def _triggered(self, form: TriggeredTagsFormat) -> str:
        of_trigger: dict[str, list[TagFormat]] = {}
        for tag in form.tags:
            trigger = next((one for one in form.triggers if str(tag.begin).startswith(one)), None)
            if not trigger:
                raise Unreadable("a tag without a trigger")
            of_trigger.setdefault(trigger, []).append(tag)
        without = [*form.excludes, *form.triggers]
        text, first = self._text(without), _one_of(map(self._tag, form.tags))
        call = _one_of(
            f"{self._until(trigger, without)} {_one_of(self._tag(tag, trigger) for tag in tags)}"
            for trigger, tags in of_trigger.items()
        )
        if form.at_least_one:
            return first if form.stop_after_first else f"{first} {call}* {text}"
        return f"({call} | {text})" if form.stop_after_first else f"{call}* {text}"

    def _until(self, end: str, without: Iterable[str]) -> str:
        """Write any text up to the first place where it ends so."""
        text = self._text([*without, end])
        if not self._at_special.search(end):
            return self._rule("until[lazy]", f"{text} {json.dumps(end)}")
        if not self._at_special.match(end):
            raise Unreadable("a text that ends with a special token after letters")
        return f"{text} {self._literal(end)}"

    def _text(self, without: Iterable[str]) -> str:
        found = " | ".join(map(json.dumps, dict.fromkeys(without)))
        return self._rule("TEXT", f"{ANY} & ~({ANY} ({found}) {ANY})" if found else ANY)

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


def _one_of(choices: Iterable[str]) -> str:
    different = dict.fromkeys(choices)
    return f"({' | '.join(different)})" if any(different) else ""
