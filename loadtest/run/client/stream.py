"""One streamed completion over HTTP, timed.

It uses aiohttp: httpx walks all of its connections at every request and every close, which made requests leave late.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec

from ridgeline.loadtest.run.records import GIVEN_UP, RequestRecord

EVENT_END = b"\n\n"
DATA = b"data:"
ERROR_CHARACTERS = 300
Endpoint = Literal["completions", "chat"]
PATHS: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
KEPT_OPEN_S = 2.0
"""Idle connections are closed before servers close theirs: uvicorn does so after 5 s."""
CLOSED_BY_SERVER_S = 1.0
"""A kept connection that fails sooner than this, before any answer, had been closed by the server while it was idle."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def is_output(self) -> bool:
        """Whether this is part of the answer; a chat begins with an event that only names the role."""
        texts = (self.content, self.reasoning, self.reasoning_content)
        return any(texts) or (self.role is None and any(text is not None for text in texts))


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _RequestError(Exception):
    """The server's answer is not a whole completion."""


class Completion(msgspec.Struct, frozen=True):
    """A request ready to send: its encoded body, and what its record will say about it.

    It is sent `think_s` after the last answer to the requests in `after`, by their index, and not before `scheduled_s`.
    """

    index: int
    scheduled_s: float
    input_tokens: int
    output_tokens: int
    body: bytes
    after: tuple[int, ...] = ()
    think_s: float = 0.0


@dataclass(slots=True)
class _Progress:
    """What has arrived of one answer so far; times are seconds since it was sent."""

    chunk_times_s: list[float] = field(default_factory=list)
    usage: _Usage | None = None
    finish_reason: str | None = None
    status: int | None = None
    on_kept_connection: bool = False


_chunk_decoder = msgspec.json.Decoder(_Chunk)


def encode_body(model: str, prompt: list[int] | str, output_tokens: int, endpoint: Endpoint = "completions") -> bytes:
    """Encode a streamed, greedy request for a fixed number of output tokens; a chat's prompt is its only message."""
    asked = {"prompt": prompt} if endpoint == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    fixed = {
        "max_tokens": output_tokens,
        "ignore_eos": True,  # not min_tokens too, which Ray Serve passes on to a prefill leg of one token
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode({"model": model} | asked | fixed)


class LoadClient:
    """Sends completions over as many connections as are needed at a time; a context manager.

    Request i goes to server i modulo their number. Load that is open-loop must not queue here, so nothing is limited.
    """

    def __init__(
        self, base_urls: Sequence[str], headers: Mapping[str, str], endpoint: Endpoint = "completions"
    ) -> None:
        self._urls = [url.rstrip("/") + PATHS[endpoint] for url in base_urls]
        self._headers = {"content-type": "application/json", **headers}
        self._session: aiohttp.ClientSession | None = None
        self.events = 0
        """Server-sent events that have arrived."""
        self.reconnects = 0
        """Requests sent again because the server had closed a kept connection."""

    async def __aenter__(self) -> Self:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_kept_connection)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_OPEN_S),
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[tracing],
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(
        self, request: Completion, start: float, deadline_s: float, scheduled_s: float | None = None
    ) -> RequestRecord:
        """Send one request and time its answer; whatever goes wrong becomes a record, not an exception.

        `start` is the run's start on time.perf_counter's scale; `scheduled_s` counts from it, by default the request's.
        """
        progress = _Progress()
        sent = time.perf_counter()
        error: str | None = None
        try:
            async with asyncio.timeout(deadline_s):
                await self._stream_until_answered(request, sent, progress)
        except TimeoutError:
            error = f"{GIVEN_UP} of {deadline_s:g} s"
        except Exception as caught:  # noqa: BLE001 - one request must never end the others and lose their records
            error = _reason(caught)
        elapsed_s = time.perf_counter() - sent
        scheduled_s = request.scheduled_s if scheduled_s is None else scheduled_s
        return _record(request, progress, scheduled_s, sent - start, elapsed_s, error)

    async def _stream_until_answered(self, request: Completion, sent: float, progress: _Progress) -> None:
        """Send again, over another connection, while the server turns out to have closed the kept one."""
        while True:
            try:
                return await self._stream(request, sent, progress)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                raced = progress.on_kept_connection and progress.status is None
                if not raced or time.perf_counter() - sent > CLOSED_BY_SERVER_S:
                    raise
                progress.on_kept_connection = False
                self.reconnects += 1

    async def _stream(self, request: Completion, sent: float, progress: _Progress) -> None:
        assert self._session is not None, "enter the client first"
        async with self._session.post(
            self._urls[request.index % len(self._urls)],
            data=request.body,
            headers=self._headers,
            trace_request_ctx=progress,
        ) as response:
            progress.status = response.status
            if response.status != 200:
                text = (await response.read()).decode(errors="replace")
                raise _RequestError(f"HTTP {response.status}: {text[:ERROR_CHARACTERS]}")
            async for event, came in _events(response.content):
                self.events += 1
                if event == b"[DONE]":
                    return
                _take(_chunk_decoder.decode(event), came - sent, progress)
        raise _RequestError("the stream ended before [DONE]")


async def _note_kept_connection(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
    context.trace_request_ctx.on_kept_connection = True


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[bytes, float]]:
    """Yield the data of each server-sent event, without comments and other fields, and when it was read."""
    buffer = b""
    async for part in content.iter_any():
        came = time.perf_counter()
        buffer = (buffer + part).replace(b"\r\n", b"\n")
        *events, buffer = buffer.split(EVENT_END)
        for event in events:
            data = [line[len(DATA) :].strip() for line in event.split(b"\n") if line.startswith(DATA)]
            if data:
                yield b"\n".join(data), came


def _take(chunk: _Chunk, now_s: float, progress: _Progress) -> None:
    if chunk.error is not None:
        raise _RequestError(f"error in the stream: {str(chunk.error)[:ERROR_CHARACTERS]}")
    if chunk.usage is not None:
        progress.usage = chunk.usage
    if chunk.choices:
        choice = chunk.choices[0]
        if choice.delta is None or choice.delta.is_output:
            progress.chunk_times_s.append(now_s)
        progress.finish_reason = choice.finish_reason or progress.finish_reason


def not_sent(request: Completion, scheduled_s: float, why: str) -> RequestRecord:
    """Return the record of a request that could not be sent."""
    return _record(request, _Progress(), scheduled_s, scheduled_s, 0.0, why)


def _record(
    request: Completion, progress: _Progress, scheduled_s: float, sent_s: float, elapsed_s: float, error: str | None
) -> RequestRecord:
    times_s = progress.chunk_times_s
    if error is None and not times_s:
        error = "the answer held no token"
    usage = progress.usage
    output_tokens = usage.completion_tokens if usage else len(times_s)
    if error is None and output_tokens != request.output_tokens:
        error = f"the answer has {output_tokens} tokens, and {request.output_tokens} were asked for"
    return RequestRecord(
        index=request.index,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        input_tokens=(usage.prompt_tokens if usage else 0) or request.input_tokens,
        output_tokens=output_tokens,
        requested_output_tokens=request.output_tokens,
        ttft_s=times_s[0] if times_s else None,
        second_token_s=times_s[1] if len(times_s) > 1 else None,
        latency_s=times_s[-1] if times_s and error is None else elapsed_s,
        itls_s=tuple(after - before for before, after in itertools.pairwise(times_s)),
        finish_reason=progress.finish_reason,
        status=progress.status,
        error=error,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, _RequestError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
