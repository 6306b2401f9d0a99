"""One cell of the matrix state x cause: a request in a state is cancelled, and we watch what is freed when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from tests.engines.harness import Engines, held

T = TypeVar("T")
State = Literal["queued", "prefilling", "hand-off", "decoding"]
Cause = Literal["client disconnect", "deadline"]
CAUSES: Final = ("client disconnect", "deadline")
DEADLINE_HEADER: Final = "x-ridgeline-timeout-s"
DEADLINE_S: Final = 1.5
POLL_S: Final = 0.02
QUIET_S: Final = 0.5
GIVE_UP_S: Final = 120.0
"""A step takes long on a busy machine. What was computed after a cancel, and which leases ended, is counted."""
ATTEMPTS: Final = 4


class TooLate(Exception):
    """The request's deadline came before it was in its state, as on a machine that stands still for a second."""


@dataclass
class Target:
    """A streaming request whose end somebody else decides."""

    request_id: str
    sent_s: float = 0.0
    tokens: int = 0
    ended: str = ""
    """What the server said in the end, if it did."""
    deadline_s: float | None = None
    task: asyncio.Task[None] | None = None

    def start(self, engines: Engines, body: Mapping[str, Any], deadline_s: float | None = None) -> None:
        """Send it."""
        headers = {"x-request-id": self.request_id}
        self.deadline_s = deadline_s
        if deadline_s is not None:
            headers[DEADLINE_HEADER] = f"{deadline_s:g}"
        self.sent_s = time.monotonic()
        self.task = asyncio.create_task(self._run(engines, body, headers))

    async def _run(self, engines: Engines, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        request = {"model": engines.model, "stream": True, "return_token_ids": True, **body}
        async with engines.http.stream("POST", "/v1/completions", json=request, headers=dict(headers)) as response:
            if response.status_code != 200:
                self.ended = f"{response.status_code} {(await response.aread()).decode()}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.ended = str(event["error"])
        for choice in event.get("choices", ()):
            self.tokens += len(choice.get("token_ids") or ())
            self.ended = choice.get("finish_reason") or self.ended

    def is_too_late(self) -> bool:
        """Return whether it ended by its deadline. Called while it is waited for to be in its state."""
        return self.deadline_s is not None and self.task is not None and self.task.done()

    async def leave(self) -> None:
        """Close the connection."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait((self.task,))


@dataclass
class Watch:
    """What both workers hold and have computed, asked of them every 20 ms."""

    engines: Engines
    computed_tokens: float = 0.0
    held: dict[str, float] = field(default_factory=dict)
    """What is not zero."""

    async def look(self) -> None:
        """Once."""
        statuses = [await worker.status() for worker in (self.engines.prefill, self.engines.decode)]
        counters = [(name, value) for status in statuses for name, value in status.counters.items()]
        self.computed_tokens = sum(value for name, value in counters if name.startswith("tokens_total."))
        self.held = {name: value for status in statuses for name, value in held(status).items() if value}

    async def until(self, condition: Callable[[], bool], target: Target | None = None) -> float:
        """Look until it holds; when that was, on the monotonic clock.

        Raises TimeoutError, and TooLate if the target's deadline comes first.
        """
        async with asyncio.timeout(GIVE_UP_S):
            await self.look()
            while not condition():
                if target is not None and target.is_too_late():
                    raise TooLate
                await asyncio.sleep(POLL_S)
                await self.look()
        return time.monotonic()


@dataclass(frozen=True)
class Freed:
    """How a cancelled request ended."""

    free_after_s: float
    """From the cancel until neither worker held anything of it."""
    tokens_after_cancel: float
    """Computed for it after the cancel: by steps that were running."""
    tokens_when_free: float
    """Computed in half a second after all was free: must be none."""
    tokens_seen: int
    lived_s: float
    """From sending to the cancel."""
    ended: str
    deadline_s: float | None


async def in_time(engines: Engines, attempt: Callable[[int], Awaitable[T]]) -> T:
    """Return what the first attempt returns whose request was in its state before its deadline."""
    for number in range(ATTEMPTS):
        try:
            return await attempt(number)
        except TooLate:  # a step that has begun for it may take seconds
            assert await engines.becomes_idle(GIVE_UP_S) == {}
    raise AssertionError(f"no request was in its state before its deadline, in {ATTEMPTS} attempts")


async def cancelled(
    engines: Engines,
    target: Target,
    cause: Cause,
    is_free: Callable[[dict[str, float]], bool],
    *,
    in_step: bool = False,
) -> Freed:
    """Cancel a request that is in its state, or wait for its deadline, and watch until `is_free` of what is held.

    An engine tells what it holds when a step ends. `in_step`: one that computes for the request is running, so what was
    told before its end does not count.
    """
    assert target.task is not None
    watch = Watch(engines)
    await watch.look()
    if cause == "client disconnect":
        cancelled_s = time.monotonic()
        await target.leave()
    else:
        await asyncio.wait((target.task,), timeout=GIVE_UP_S)
        cancelled_s = time.monotonic()
    await watch.look()
    computed_at_cancel = watch.computed_tokens
    free_s = await watch.until(
        lambda: is_free(watch.held) and (not in_step or watch.computed_tokens > computed_at_cancel)
    )
    computed_when_free = watch.computed_tokens
    await asyncio.sleep(QUIET_S)
    await watch.look()
    assert is_free(watch.held), f"free, and then not: {watch.held}"
    return Freed(
        free_after_s=free_s - cancelled_s,
        tokens_after_cancel=computed_when_free - computed_at_cancel,
        tokens_when_free=watch.computed_tokens - computed_when_free,
        tokens_seen=target.tokens,
        lived_s=cancelled_s - target.sent_s,
        ended=target.ended,
        deadline_s=target.deadline_s,
    )


async def expired_leases(engines: Engines) -> float:
    """Hand-offs so far whose blocks nobody has given back before their time was over."""
    return (await engines.metrics()).sum("ridgeline_expired_leases_total")


def assert_ended_by_deadline(freed: Freed) -> None:
    """In time, and with a sentence that says so, not with a finish reason."""
    assert freed.ended not in ("", "stop", "length", "abort"), freed
    assert freed.deadline_s is not None
    assert freed.deadline_s <= freed.lived_s <= freed.deadline_s + GIVE_UP_S, freed
