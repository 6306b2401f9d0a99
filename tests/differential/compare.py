"""Two servers, one request: what each says, and where they differ.

Token ids, texts and reasons must be equal; log-probabilities may differ by what the number format makes of sums in
another order. A first differing token is forgiven where both are equally good to the format (`tests/ties.py`); what
follows it is another answer and is not compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.messages import PositionLogprobs
from tests import ties
from tests.differential.cases import Case

UNDEFINED = -9999.0
"""What vLLM's server says for a log-probability of minus infinity."""


@dataclass
class Choice:
    """One choice, whether it came in one piece or in many."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    prompt_token_ids: list[int] | None = None
    logprobs: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)
    prompt_logprobs: Any = None


@dataclass
class Answer:
    """Of one server."""

    status: int
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: str = ""


@dataclass
class Verdict:
    """What came of one case."""

    case: Case
    difference: str = ""
    ties: list[str] = field(default_factory=list)
    status: int = 200


async def ask(http: httpx.AsyncClient, case: Case, model: str) -> Answer:
    """The server's answer to one request."""
    response = await http.post(case.path, json={"model": model, **case.body})
    if response.status_code != 200:
        return Answer(response.status_code, error=response.text)
    answer = Answer(200)
    if response.headers["content-type"].startswith("text/event-stream"):
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                _take(answer, json.loads(line[6:]))
    else:
        _take(answer, response.json())
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = json.dumps(event["error"])
    answer.usage = event.get("usage") or answer.usage
    for said in event.get("choices", ()):
        choice = answer.choices.setdefault(said["index"], Choice())
        message = said.get("message") or said.get("delta") or {}
        choice.text += (said.get("text") or "") + (message.get("content") or "") + (message.get("reasoning") or "")
        choice.token_ids += said.get("token_ids") or []
        choice.finish_reason = said.get("finish_reason") or choice.finish_reason
        choice.stop_reason = said.get("stop_reason") or choice.stop_reason
        told = said.get("prompt_token_ids") or event.get("prompt_token_ids")
        choice.prompt_token_ids = told or choice.prompt_token_ids
        choice.prompt_logprobs = said.get("prompt_logprobs") or event.get("prompt_logprobs") or choice.prompt_logprobs
        choice.logprobs += _positions(said.get("logprobs") or {})


def _positions(said: dict[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
    if "tokens" in said:  # of completions
        told = zip(said["tokens"], said["token_logprobs"], said["top_logprobs"], strict=True)
        return [(token, _number(logprob), top or {}) for token, logprob, top in told]
    return [
        (each["token"], each["logprob"], {top["token"]: top["logprob"] for top in each["top_logprobs"]})
        for each in said.get("content") or ()
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class Judge:
    """Compares; asks the plain server what the two tokens of a first difference are worth."""

    def __init__(
        self,
        split: httpx.AsyncClient,
        plain: httpx.AsyncClient,
        model: str,
        dtype: str,
        before_each: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`before_each`: what is done before one of them is asked."""
        self._split, self._plain, self._model, self._dtype = split, plain, model, dtype
        self._before_each = before_each
        self.tolerance_nat = 2e-3 + 2 * ties.tie_nat(dtype)

    async def verdict(self, case: Case) -> Verdict:
        """Send the request to both."""
        answers = []
        for http in (self._split, self._plain):
            if self._before_each is not None:
                await self._before_each()
            answer = await ask(http, case, self._model)
            answers.append(await ask(http, case, self._model) if case.again else answer)
        ours, theirs = answers
        verdict = Verdict(case, status=theirs.status)
        if (ours.status, bool(ours.error)) != (theirs.status, bool(theirs.error)):
            verdict.difference = f"{ours.status} {ours.error[:300]} for {theirs.status} {theirs.error[:300]}"
        elif ours.choices.keys() != theirs.choices.keys():
            verdict.difference = f"choices {sorted(ours.choices)} for {sorted(theirs.choices)}"
        else:
            for index, choice in ours.choices.items():
                await self._compare(verdict, choice, theirs.choices[index], index)
            if not verdict.ties and not verdict.difference and ours.usage != theirs.usage:
                verdict.difference = f"usage {ours.usage} for {theirs.usage}"
        return verdict

    async def _compare(self, verdict: Verdict, ours: Choice, theirs: Choice, index: int) -> None:
        where = f"choice {index}: "
        if ours.prompt_token_ids != theirs.prompt_token_ids:
            verdict.difference = where + "prompts differ"
            return
        problem = self._prompt_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)
        position = _first_difference(ours.token_ids, theirs.token_ids)
        if position is None:
            names = ("text", "finish_reason", "stop_reason")
            for name in names:
                if getattr(ours, name) != getattr(theirs, name):
                    problem = problem or f"{name} {getattr(ours, name)!r} for {getattr(theirs, name)!r}"
            problem = problem or self._logprobs(ours.logprobs, theirs.logprobs)
        else:
            tie = await self._tie(verdict.case, ours, theirs, position)
            told = f"token {position} is {ours.token_ids[position:][:1]} for {theirs.token_ids[position:][:1]}"
            if tie is None:
                problem = problem or f"{told} of {ours.token_ids} for {theirs.token_ids}"
            else:
                verdict.ties.append(f"{where}{told}, {tie:.2g} nat")
        if problem:
            verdict.difference = where + problem

    async def _tie(self, case: Case, ours: Choice, theirs: Choice, position: int) -> float | None:
        """How far apart the two tokens are, if the format cannot tell them apart."""
        pair = [each.token_ids[position] for each in (ours, theirs) if position < len(each.token_ids)]
        if len(pair) < 2 or theirs.prompt_token_ids is None:
            return None
        common = theirs.token_ids[:position]
        body = {"model": self._model, "prompt": [*theirs.prompt_token_ids, *common], "max_tokens": 1, "temperature": 0}
        body |= {"logprobs": 1, "logprob_token_ids": pair, "return_tokens_as_token_ids": True}
        said = (await self._plain.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]["top_logprobs"][
            0
        ]
        told = [said.get(f"token_id:{token}", -math.inf) for token in pair]
        position_logprobs = PositionLogprobs(pair, told, 1)
        penalties = {token: _penalty(case.body, common, token) for token in pair}
        behind = max(ties.behind_best_nat(position_logprobs, token, penalties) for token in pair)
        return behind if ties.is_tie(behind, self._dtype) else None

    def _logprobs(self, ours: Sequence[Any], theirs: Sequence[Any]) -> str:
        if len(ours) != len(theirs):
            return f"{len(ours)} log-probabilities for {len(theirs)}"
        for at, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            if mine[0] != its[0] or not self._near(mine[1], its[1]):
                return f"log-probability {at} is {mine[:2]} for {its[:2]}"
            if problem := self._top(mine[2], its[2]):
                return f"top log-probabilities {at}: {problem}"
        return ""

    def _top(self, ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
        """The last of the best may change places with the next one."""
        if len(ours) != len(theirs):
            return f"{ours} for {theirs}"
        for token in ours.keys() & theirs.keys():
            if not self._near(ours[token], theirs[token]):
                return f"{token}: {ours[token]} for {theirs[token]}"
        alone = [ours[token] for token in ours.keys() - theirs.keys()] + [
            theirs[t] for t in theirs.keys() - ours.keys()
        ]
        return "" if not alone or self._near(min(alone), max(alone)) else f"{ours} for {theirs}"

    def _prompt_logprobs(self, ours: Any, theirs: Any) -> str:
        if (ours is None, len(ours or ())) != (theirs is None, len(theirs or ())):
            return f"{len(ours or ())} prompt log-probabilities for {len(theirs or ())}"
        for at, (mine, its) in enumerate(zip(ours or (), theirs or (), strict=True)):
            if (mine is None) != (its is None):
                return f"prompt log-probability {at} is {mine} for {its}"
            if mine is not None:
                flat = [{token: each["logprob"] for token, each in said.items()} for said in (mine, its)]
                if problem := self._top(*flat):
                    return f"prompt log-probabilities {at}: {problem}"
        return ""

    def _near(self, one: float, other: float) -> bool:
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) == math.isnan(other)
        # Of what is next to impossible nothing but that is known: a logit of -40 rounds in larger steps.
        return abs(one - other) <= self.tolerance_nat * max(1.0, abs(other) / 16)


def _penalty(body: Mapping[str, Any], made: Sequence[int], token: int) -> float:
    count = list(made).count(token)
    bias = (body.get("logit_bias") or {}).get(str(token), 0.0)
    return count * body.get("frequency_penalty", 0.0) + (count > 0) * body.get("presence_penalty", 0.0) - bias


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
