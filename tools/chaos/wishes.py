"""Plans the clients' requests: a mixed load in which each request depends only on the seed and its number."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ridgeline.loadtest.trace.prompts import TextWindows

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green", "blue"]},
        "angle": {"type": "integer", "minimum": 0, "maximum": 90},
    },
    "required": ["colour", "angle"],
    "additionalProperties": False,
}
GREEDY: Final = ("plain", "stop", "logprobs")
"""Kinds in which every token must be the model's best one."""


KINDS: Final = {
    "plain": 0.45,
    "stop": 0.10,
    "logprobs": 0.05,
    "sampled": 0.05,
    "seeded": 0.10,
    "penalty": 0.10,
    "two": 0.10,
    "json": 0.05,
}
"""Kinds of request and their shares."""
Lengths = tuple[tuple[float, int, int], ...]
PROMPT_TOKENS: Final[Lengths] = ((0.50, 5, 60), (0.37, 60, 300), (0.13, 300, 1500))
"""(weight, fewest, most): lengths in between are drawn evenly on a logarithmic scale."""
OUTPUT_TOKENS: Final[Lengths] = ((0.30, 1, 8), (0.45, 8, 40), (0.25, 40, 120))
CHAT_SHARE: Final = 0.35
STREAM_SHARE: Final = 0.8
LEAVE_SHARE: Final = 0.08
"""Of streams: clients that close the connection before the end."""


@dataclass(frozen=True)
class Wish:
    """One planned request, and what its answer must be like."""

    number: int
    kind: str
    path: str
    body: dict[str, Any]
    max_tokens: int
    num_choices: int = 1
    leave_after_tokens: int | None = None
    """Tokens after which the client closes the stream; 0: before the first one."""
    leave_after_s: float = 0.0
    """Seconds that it still waits then."""

    @property
    def stream(self) -> bool:
        return bool(self.body["stream"])

    @property
    def greedy(self) -> bool:
        """Whether every token can be compared with the model's best one."""
        return self.kind in GREEDY

    @property
    def whole_length(self) -> bool:
        """Whether each choice must have exactly max_tokens, because nothing else ends it."""
        return self.kind not in ("stop", "json")


class Mix:
    """A series of planned requests, each a function of the seed and its number."""

    def __init__(self, seed: int, model: str, text_tokens: Sequence[int], tokenizer: Any) -> None:
        self._seed = seed
        self._model = model
        self._windows = TextWindows(tuple(text_tokens), seed)
        self._tokenizer = tokenizer

    def wish(self, number: int) -> Wish:
        """Return the request with this number, from 0; no two begin with the same text."""
        rng = random.Random(f"{self._seed}/{number}")
        prompt = self._windows.window(number, _length(rng, PROMPT_TOKENS))
        max_tokens = _length(rng, OUTPUT_TOKENS)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        chat = rng.random() < CHAT_SHARE or kind == "json"
        stream = rng.random() < STREAM_SHARE
        leaves = stream and rng.random() < LEAVE_SHARE
        if kind == "json":
            max_tokens = max(max_tokens, 40)
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": kind != "json",
            "return_token_ids": True,
            "stream": stream,
            **self._prompt(prompt, chat),
            **_extra(kind, chat, rng),
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        return Wish(
            number=number,
            kind=kind,
            path=CHAT if chat else COMPLETIONS,
            body=body,
            max_tokens=max_tokens,
            num_choices=body.get("n", 1),
            leave_after_tokens=rng.randrange(max_tokens) if leaves else None,
        )

    def _prompt(self, token_ids: list[int], chat: bool) -> dict[str, Any]:
        if not chat:
            return {"prompt": token_ids}
        return {"messages": [{"role": "user", "content": self._tokenizer.decode(token_ids)}]}


def _length(rng: random.Random, parts: Lengths) -> int:
    _, fewest, most = rng.choices(parts, [weight for weight, _, _ in parts])[0]
    return round(math.exp(rng.uniform(math.log(fewest), math.log(most))))


def _extra(kind: str, chat: bool, rng: random.Random) -> dict[str, Any]:
    seed = rng.randrange(1_000_000)
    match kind:
        case "stop":
            return {"stop": [" the", "."]}
        case "logprobs":
            return {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        case "sampled":
            return {"temperature": 0.8}
        case "seeded":
            return {"temperature": 0.8, "seed": seed}
        case "penalty":
            return {"presence_penalty": 0.5, "frequency_penalty": 0.2}
        case "two":
            return {"n": 2, "temperature": 0.7}
        case "json":
            schema = {"name": "light", "schema": SCHEMA, "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {}
