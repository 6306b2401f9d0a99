"""One request as its client saw it: all tokens, endings and times. Failures are recorded, not raised."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import httpx

from tools.chaos.wishes import Wish

CLIENT_DEADLINE_S: Final = 300.0
"""Far above any correct duration: a request that is still open then has been lost."""
REFUSED: Final = (429, 503)


@dataclass
class Choice:
    """One of the n choices of an answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)


@dataclass
class Record:
    """The record of one request. Times are seconds on the monotonic clock."""

    wish: Wish
    sent_s: float
    status: int | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    usage_tokens: int | None = None
    dones: int = 0
    """How often `[DONE]` came; a whole answer without a stream counts as one."""
    errors: list[str] = field(default_factory=list)
    """Error events of a stream, or the error that answered the request."""
    after_end: int = 0
    """Number of events after `[DONE]`."""
    token_times_s: list[float] = field(default_factory=list)
    left: bool = False
    broken: str = ""
    """How the connection ended, if the answer had no ending."""
    ended_s: float = 0.0

    @property
    def refused(self) -> bool:
        """Whether it was answered with 429 or 503; a failed request without a stream gets these too."""
        return self.status in REFUSED

    @property
    def num_tokens(self) -> int:
        """Number of tokens over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def gap_after_s(self, moment_s: float) -> float | None:
        """Return its largest gap between tokens after this moment; None if no stream was running then."""
        times_s = self.token_times_s
        if not times_s or not times_s[0] < moment_s < times_s[-1]:
            return None
        return max(later - earlier for earlier, later in pairwise(times_s) if later > moment_s)


async def ask(
    http: httpx.AsyncClient, wish: Wish, stay_s: float | None = None, deadline_s: float = CLIENT_DEADLINE_S
) -> Record:
    """Send a request and record the answer until it ends or the client leaves, at the latest after `stay_s`."""
    record = Record(wish, sent_s=time.monotonic())
    try:
        async with asyncio.timeout(deadline_s), asyncio.timeout(stay_s) as stay:
            await (_stream(http, record) if wish.stream else _whole(http, record))
    except TimeoutError:
        record.left = stay.expired()
        record.broken = "" if record.left else f"no end within {deadline_s:.0f} s"
    except httpx.HTTPError as error:
        record.broken = f"{type(error).__name__}: {error}"
    record.ended_s = time.monotonic()
    return record


async def _whole(http: httpx.AsyncClient, record: Record) -> None:
    response = await http.post(record.wish.path, json=record.wish.body)
    record.status = response.status_code
    if response.status_code != httpx.codes.OK:
        record.errors.append(_error_text(response.text))
        return
    _take(record, response.json())
    record.dones += 1


async def _stream(http: httpx.AsyncClient, record: Record) -> None:
    wish = record.wish
    async with http.stream("POST", wish.path, json=wish.body) as response:
        record.status = response.status_code
        if response.status_code != httpx.codes.OK:
            record.errors.append(_error_text((await response.aread()).decode(errors="replace")))
            return
        if wish.leave_after_tokens == 0:
            record.left = True
            return
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                _take_event(record, line.removeprefix("data: "))
            if wish.leave_after_tokens is not None and record.num_tokens >= wish.leave_after_tokens:
                await asyncio.sleep(wish.leave_after_s)
                record.left = not record.dones
                return


def _take_event(record: Record, data: str) -> None:
    if record.dones:
        record.after_end += 1
    if data == "[DONE]":
        record.dones += 1
        return
    event = json.loads(data)
    if "error" in event:
        record.errors.append(_error_text(data))
        return
    _take(record, event)


def _take(record: Record, event: dict[str, Any]) -> None:
    """Record a chunk of a stream or a whole answer; only the place of the text differs."""
    record.prompt_token_ids = event.get("prompt_token_ids") or record.prompt_token_ids
    if event.get("usage"):
        record.usage_tokens = event["usage"]["completion_tokens"]
    for part in event.get("choices", ()):
        record.prompt_token_ids = part.get("prompt_token_ids") or record.prompt_token_ids
        choice = record.choices.setdefault(part["index"], Choice())
        choice.text += (part.get("delta") or part.get("message") or {}).get("content") or part.get("text") or ""
        if part.get("token_ids"):
            choice.token_ids += part["token_ids"]
            record.token_times_s.append(time.monotonic())
        if part.get("finish_reason"):
            choice.finish_reasons.append(part["finish_reason"])


def _error_text(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:200]
