"""Compares the answers of two servers to one request.

Token ids, texts and reasons must be equal; log-probabilities may differ by what the number format makes of sums in
another order. A first differing token is accepted if the format cannot distinguish it from the other
(`tests/support/ties.py`). To judge that, plain vLLM is asked again with the two logits nudged by no more than a tie,
and must then choose our token. So seeds, penalties and grammars are part of the judgement. What follows such a token is
another answer and is not compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import httpx

from tests.support import ties
from tools.differential.cases import Case

SMALLEST_SCORE = 1e-30
NUDGES = (0.125, 0.5, 1.0)
"""Fractions of a tie, the smallest first, because a nudge can also change another token of the answer."""


@dataclass
class Choice:
    """One choice of an answer, whether it came whole or in chunks."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    prompt_token_ids: list[int] | None = None
    logprobs: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)
    prompt_logprobs: Any = None


@dataclass
class Answer:
    """One server's answer."""

    status: int
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    scores: list[float] = field(default_factory=list)
    """The probabilities that `/generative_scoring` returned."""
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether the server is at fault rather than the request."""
        return self.status >= 500 or (self.status == 200 and bool(self.error))


@dataclass
class Verdict:
    """The result of one case."""

    case: Case
    difference: str = ""
    plain_failed: str = ""
    """The error of plain vLLM in a case that we answered: there is nothing to compare with."""
    ties: list[str] = field(default_factory=list)
    status: int = 200


class NoAnswer(RuntimeError):
    """A server did not answer a request at all."""


async def ask(http: httpx.AsyncClient, case: Case, model: str) -> Answer:
    """Send one request and return the server's answer."""
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
    answer.scores += [scored["score"] for scored in event.get("data", ())]
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
    if "tokens" in said:  # the format of completions
        told = zip(said["tokens"], said["token_logprobs"], said["top_logprobs"], strict=True)
        return [(token, _number(logprob), top or {}) for token, logprob, top in told]
    return [
        (each["token"], each["logprob"], {top["token"]: top["logprob"] for top in each["top_logprobs"]})
        for each in said.get("content") or ()
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class Judge:
    """Compares answers, and asks the plain server how close the two tokens of a first difference are."""

    def __init__(
        self,
        split: httpx.AsyncClient,
        plain: httpx.AsyncClient,
        model: str,
        dtype: str,
        adapted: httpx.AsyncClient | None = None,
    ) -> None:
        """`adapted` is the plain server for requests that name an adapter as their model."""
        self._split, self._plain, self._model, self._dtype = split, plain, model, dtype
        self._adapted = adapted or plain
        self._salts = count()
        self.tolerance_nat = 2e-3 + 2 * ties.tie_nat(dtype)

    async def verdict(self, case: Case) -> Verdict:
        """Send the request to both servers. A difference is reported with what plain vLLM answers if asked again."""
        verdict = Verdict(case)
        try:
            ours, theirs = await self._said("ours", case), await self._said("plain vLLM", case)
            if theirs.failed:  # this happens occasionally in a stream with n, `echo` and log-probabilities
                theirs = await self._said("plain vLLM", _in_one_piece(case))
                theirs.usage = ours.usage
                for choice in theirs.choices.values():
                    choice.prompt_logprobs = None  # streams lack this field; `echo` shows the same there
            verdict.status = theirs.status
            if theirs.failed:
                verdict.plain_failed = "" if ours.failed else theirs.error
                return verdict
            await self._judge(verdict, ours, theirs)
            if verdict.difference:
                once_more = Verdict(case)
                await self._judge(once_more, await self._said("plain vLLM", self._cold(case)), theirs)
                if once_more.difference or once_more.ties:
                    itself = once_more.difference or once_more.ties[0]
                    verdict.difference += f"; plain vLLM differs from itself: {itself}"
        except NoAnswer as error:
            verdict.difference, verdict.status = str(error), 0
        return verdict

    async def _said(self, who: str, case: Case) -> Answer:
        plain = self._adapted if "model" in case.body else self._plain
        http = self._split if who == "ours" else plain
        try:
            answer = await ask(http, case, self._model)
            return await ask(http, case, self._model) if case.again else answer
        except httpx.TransportError as error:
            raise NoAnswer(f"no answer from {who}: {type(error).__name__} {error}".rstrip()) from error

    async def _judge(self, verdict: Verdict, ours: Answer, theirs: Answer) -> None:
        if (ours.status, bool(ours.error)) != (theirs.status, bool(theirs.error)):
            verdict.difference = f"{ours.status} {ours.error[:300]} for {theirs.status} {theirs.error[:300]}"
        elif ours.choices.keys() != theirs.choices.keys():
            verdict.difference = f"choices {sorted(ours.choices)} for {sorted(theirs.choices)}"
        else:
            verdict.difference = self._scores(ours.scores, theirs.scores)
            for index, choice in ours.choices.items():
                await self._compare(verdict, choice, theirs.choices[index], index)
            if not verdict.ties and not verdict.difference and ours.usage != theirs.usage:
                verdict.difference = f"usage {ours.usage} for {theirs.usage}"

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
            told = f"token {position} is {ours.token_ids[position:][:1]} for {theirs.token_ids[position:][:1]}"
            tie_nat = await self._tie(verdict.case, ours, theirs, index, position)
            if tie_nat is None:
                problem = problem or f"{told} of {ours.token_ids} for {theirs.token_ids}"
            else:
                verdict.ties.append(f"{where}{told}, {tie_nat:.2g} nat at most")
        if problem:
            verdict.difference = where + problem

    async def _tie(self, case: Case, ours: Choice, theirs: Choice, index: int, position: int) -> float | None:
        """Return the nudge in nats that makes plain vLLM choose our token; None if no nudge within a tie does."""
        if position >= min(len(ours.token_ids), len(theirs.token_ids)):
            return None
        for share in NUDGES:
            nudge_nat = share * ties.tie_nat(self._dtype)
            bias = dict(case.body.get("logit_bias") or {})
            for token, sign in ((ours.token_ids[position], 0.5), (theirs.token_ids[position], -0.5)):
                bias[str(token)] = bias.get(str(token), 0.0) + sign * nudge_nat
            nudged = replace(self._cold(case), body={**self._cold(case).body, "logit_bias": bias})
            choice = (await self._said("plain vLLM", nudged)).choices.get(index)
            if choice is not None and choice.token_ids[: position + 1] == ours.token_ids[: position + 1]:
                return nudge_nat
        return None

    def _cold(self, case: Case) -> Case:
        """Return the same request with a new cache salt, so that it finds no more of its prompt cached than before."""
        return case if case.again else replace(case, body={**case.body, "cache_salt": f"again-{next(self._salts)}"})

    def _scores(self, ours: Sequence[float], theirs: Sequence[float]) -> str:
        if len(ours) != len(theirs):
            return f"{len(ours)} scores for {len(theirs)}"
        for at, pair in enumerate(zip(ours, theirs, strict=True)):
            mine, its = (math.log(max(score, SMALLEST_SCORE)) / 2 for score in pair)  # a quotient has two errors
            if not self._near(mine, its):
                return f"score {at} is {pair[0]} for {pair[1]}"
        return ""

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
        """Compare top tokens; the last of them may change places with the next one.

        The sampled token is listed too, so there is one more if it is not among the most likely ones.
        """
        if abs(len(ours) - len(theirs)) > 1:
            return f"{ours} for {theirs}"
        for token in ours.keys() & theirs.keys():
            if not self._near(ours[token], theirs[token]):
                return f"{token}: {ours[token]} for {theirs[token]}"
        alone = [ours[token] for token in ours.keys() - theirs.keys()] + [
            theirs[t] for t in theirs.keys() - ours.keys()
        ]
        if len(ours) != len(theirs):
            alone.append(min(min(ours, theirs, key=len).values(), default=-math.inf))
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
        # Very unlikely tokens are only known to be that: a logit of -40 rounds in larger steps.
        return abs(one - other) <= self.tolerance_nat * max(1.0, abs(other) / 16)


def _in_one_piece(case: Case) -> Case:
    return replace(case, body={name: value for name, value in case.body.items() if not name.startswith("stream")})


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
