"""Makes random requests: all options that change what an engine does, alone and combined.

Prompts have from one token to four prefill steps. The same seed makes the same requests, each of which has a number.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

STEPS = 4
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["red", "green"]}, "b": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STRUCTURED: dict[str, Any] = {
    "choice": ["red", "green", "a blue one"],
    "regex": "[a-d]{2,5}",
    "json": SCHEMA,
    "json_object": True,
    "grammar": 'root ::= "yes" | "no" | "maybe " root',
}
"""No structural tags: plain vLLM has one backend for all requests, and guidance, which is ours, does not read these."""
NOT_DRAFTED = ("min_p", "logit_bias")
"""Refused beside speculation, as vLLM does not apply them to drafts."""


class _SeedAlone(HypothesisProvider):
    """Draws like Hypothesis, but without constants.

    Hypothesis takes those from all of our modules that happen to be imported, so a seed would make other requests in
    each program.
    """

    def _maybe_draw_constant(self, *args: Any, **kwargs: Any) -> None:
        return None


AVAILABLE_PROVIDERS["seed_alone"] = _SeedAlone


@dataclass(frozen=True)
class Material:
    """What requests are made from: the tokens of a text, and the tokenizer that decodes them."""

    book: Sequence[int]
    tokenizer: Any
    vocabulary_tokens: int
    step_tokens: int
    """A prompt longer than this takes several prefill steps."""
    longest_tokens: int
    adapters: tuple[str, ...] = ()
    """Each request asks for the model or for one of these."""
    speculates: bool = False
    """Whether all requests are greedy and make longer answers: drafts draw random numbers too."""


@dataclass(frozen=True)
class Case:
    """One request of a series."""

    number: int
    path: str
    body: dict[str, Any]
    again: bool
    """Whether it is sent twice and the second answer counts, so that the prefix is cached on both sides."""

    def __str__(self) -> str:
        long = {"prompt", "messages", "query"} & self.body.keys()
        shown = {**self.body, **{name: f"{str(self.body[name])[:60]}..." for name in long}}
        return f"case {self.number}: POST {self.path} {shown}{', again' if self.again else ''}"


def drawn(material: Material, at: int, count: int) -> list[Case]:
    """Draw `count` requests for seed `at`, no two alike."""
    found: dict[str, tuple[str, dict[str, Any], bool]] = {}
    for turn in itertools.count():

        @seed(at * 1_000_003 + turn)  # hypothesis varies earlier draws, and repeats many of them
        @settings(
            backend="seed_alone",
            max_examples=count,
            database=None,
            deadline=None,
            derandomize=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(_requests(material))
        def collect(made: tuple[str, dict[str, Any], bool]) -> None:
            found.setdefault(repr(made), made)

        collect()
        if len(found) >= count:
            return [Case(number, *made) for number, made in enumerate(list(found.values())[:count])]
    raise AssertionError("it counts for ever")


def _maybe(draw: st.DrawFn, percent: int) -> bool:
    return draw(st.integers(0, 99)) >= 100 - percent


@st.composite
def _requests(draw: st.DrawFn, material: Material) -> tuple[str, dict[str, Any], bool]:
    dice = random.Random(draw(st.integers(0, 2**32)))  # for values in which shrinking and boundaries mean nothing
    model: dict[str, Any] = {}
    if material.adapters:
        model = draw(st.sampled_from([{}, *({"model": name} for name in material.adapters)]))
    if _maybe(draw, 6):
        return "/generative_scoring", model | _scoring(draw, dice, material), _maybe(draw, 15)
    chat = _maybe(draw, 30)
    max_tokens = draw(st.integers(1, 40 if material.speculates else 10))
    body: dict[str, Any] = {**model, "max_tokens": max_tokens, "return_token_ids": True, "temperature": 0.0}
    body |= _prompt(draw, dice, material, chat=chat)
    body |= _sampling(draw, dice, material)
    body |= _ends(draw, dice)
    body |= _structure(draw, chat=chat)
    body |= _told(draw, dice, material, chat=chat)
    if _maybe(draw, 50):
        body["cache_salt"] = f"salt-{draw(st.integers(0, 3))}"
    return "/v1/chat/completions" if chat else "/v1/completions", body, _maybe(draw, 15)


def _scoring(draw: st.DrawFn, dice: random.Random, material: Material) -> dict[str, Any]:
    item_tokens = draw(st.integers(1, 12))
    query_tokens = max(1, _length(draw, material) - item_tokens)
    parts = [_stretch(dice, material, query_tokens)]
    parts += [_stretch(dice, material, item_tokens) for _ in range(draw(st.integers(1, 3)))]
    made: list[Any] = [material.tokenizer.decode(each) for each in parts] if draw(st.booleans()) else parts
    labels = [dice.choice(material.book) for _ in range(draw(st.integers(1, 5)))]
    fields: dict[str, Any] = {"query": made[0], "items": made[1:], "label_token_ids": list(dict.fromkeys(labels))}
    fields |= {"apply_softmax": draw(st.booleans()), "item_first": draw(st.booleans())}
    return fields | ({"cache_salt": f"salt-{draw(st.integers(0, 3))}"} if draw(st.booleans()) else {})


def _stretch(dice: random.Random, material: Material, num_tokens: int) -> list[int]:
    start = dice.randrange(len(material.book) - num_tokens)
    return list(material.book[start : start + num_tokens])


def _length(draw: st.DrawFn, material: Material) -> int:
    step = material.step_tokens
    around = st.sampled_from([step - 1, step, step + 1, 2 * step, 2 * step + 1, 31, 32, 33, 64, 65])
    several = st.integers(step + 2, STEPS * step)
    length = draw(st.one_of(st.integers(1, 40), st.integers(1, 40), st.integers(1, step), around, several))
    return min(length, material.longest_tokens)


def _prompt(draw: st.DrawFn, dice: random.Random, material: Material, *, chat: bool) -> dict[str, Any]:
    def ids() -> list[int]:
        return _stretch(dice, material, _length(draw, material))

    if chat:
        text = material.tokenizer.decode(ids())
        return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]}
    kind = draw(st.sampled_from(["ids", "ids", "text", "batch of ids", "batch of texts"]))
    prompts = [ids() for _ in range(2 if kind.startswith("batch") else 1)]
    made: list[Any] = [material.tokenizer.decode(each) for each in prompts] if "text" in kind else prompts
    fields: dict[str, Any] = {"prompt": made if kind.startswith("batch") else made[0]}
    if _maybe(draw, 8):
        fields["truncate_prompt_tokens"] = draw(st.integers(1, 40))
    return fields


def _sampling(draw: st.DrawFn, dice: random.Random, material: Material) -> dict[str, Any]:
    some = [dice.choice(material.book) for _ in range(12)]
    often, few = (
        (60, 4) if material.speculates else (8, 40)
    )  # with a few tokens an answer repeats itself: drafts are right
    fields: dict[str, Any] = {}
    if not material.speculates and _maybe(draw, 45):  # without a seed, no engine draws the same twice
        fields |= {"temperature": draw(st.sampled_from([0.3, 0.8, 1.0, 1.5])), "seed": draw(st.integers(0, 2**31))}
        fields |= {"n": draw(st.sampled_from([1, 1, 2, 3]))}
    options: list[tuple[int, str, st.SearchStrategy[Any]]] = [
        (25, "top_p", st.sampled_from([0.1, 0.6, 0.95])),
        (25, "top_k", st.sampled_from([1, 3, 40])),
        (20, "min_p", st.sampled_from([0.05, 0.3])),
        (20, "presence_penalty", st.sampled_from([-1.0, 0.7, 2.0])),
        (20, "frequency_penalty", st.sampled_from([-1.0, 0.7, 2.0])),
        (20, "repetition_penalty", st.sampled_from([0.8, 1.3])),
        (12, "logit_bias", st.just({str(token): dice.choice([-100, -3, 4, 30]) for token in some[:4]})),
        (often, "allowed_token_ids", st.just(sorted({dice.randrange(material.vocabulary_tokens) for _ in range(few)}))),
        (12, "bad_words", st.sampled_from([[" the"], ["a", " of", "e"], ["light"]])),
        (6, "repetition_detection", st.just({"max_pattern_size": 3, "min_count": 2})),
    ]
    if material.speculates:
        options = [option for option in options if option[1] not in NOT_DRAFTED]
    return fields | {name: draw(values) for percent, name, values in options if _maybe(draw, percent)}


def _ends(draw: st.DrawFn, dice: random.Random) -> dict[str, Any]:
    options: list[tuple[int, str, st.SearchStrategy[Any]]] = [
        (25, "stop", st.sampled_from([["e"], ["a", "o"], [" ", "t"], ["zzz"], "i"])),
        (20, "stop_token_ids", st.just([dice.randrange(1000) for _ in range(60)])),
        (20, "min_tokens", st.integers(1, 8)),
        (40, "ignore_eos", st.just(True)),
        (15, "include_stop_str_in_output", st.just(True)),
        (8, "skip_special_tokens", st.just(False)),
    ]
    return {name: draw(values) for percent, name, values in options if _maybe(draw, percent)}


def _structure(draw: st.DrawFn, *, chat: bool) -> dict[str, Any]:
    if not _maybe(draw, 18):
        return {}
    kind = draw(st.sampled_from([*STRUCTURED, "response_format"]))
    if kind == "response_format":
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}}
    return {"structured_outputs": {kind: STRUCTURED[kind]}}


def _told(draw: st.DrawFn, dice: random.Random, material: Material, *, chat: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if _maybe(draw, 35):
        fields |= (
            {"logprobs": True, "top_logprobs": draw(st.integers(0, 4))}
            if chat
            else {"logprobs": draw(st.integers(0, 4))}
        )
        if _maybe(draw, 25):
            fields["logprob_token_ids"] = sorted({dice.randrange(material.vocabulary_tokens) for _ in range(3)})
        if _maybe(draw, 20):
            fields["return_tokens_as_token_ids"] = True
    if _maybe(draw, 15):
        fields["echo"] = True
    if _maybe(draw, 25):
        fields["prompt_logprobs"] = draw(st.integers(0, 2))
    elif _maybe(draw, 40):
        fields["stream"] = True
        if _maybe(draw, 40):
            fields["stream_options"] = {"include_usage": True}
        if _maybe(draw, 30):
            fields["stream_interval"] = draw(st.integers(1, 6))
    return fields
