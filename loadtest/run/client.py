"""One streamed completion over HTTP, timed. Called by `loadtest.run.replay` for each request, warm-ups included."""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from loadtest.errors import ServerError
from loadtest.run.records import RequestRecord

EVENT_END = b"\n\n"
DATA = b"data:"
ERROR_CHARACTERS = 300
KEY_VARIABLE = "RIDGELINE_API_KEY"


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _RequestError(Exception):
    """The server's answer is not a whole completion."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A request ready to send: its encoded body, and what its record will say about it."""

    index: int
    scheduled_s: float
    input_tokens: int
    output_tokens: int
    body: bytes


@dataclass(slots=True)
class _Progress:
    """What has arrived of one answer so far; times are seconds since it was sent."""

    chunk_times_s: list[float] = field(default_factory=list)
    usage: _Usage | None = None
    finish_reason: str | None = None
    status: int | None = None
    done: bool = False


class ModelCard(msgspec.Struct):
    """The part of GET /v1/models that a load test needs."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


_chunk_decoder = msgspec.json.Decoder(_Chunk)


def encode_body(model: str, prompt: list[int], output_tokens: int) -> bytes:
    """Encode a streamed, greedy completion request whose input and output token counts are fixed."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def key_headers() -> dict[str, str]:
    """Return the HTTP header with the API key in RIDGELINE_API_KEY; empty without one."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


def open_client(base_url: str) -> httpx.AsyncClient:
    """Open a client without limits: open-loop load must not queue on this side, and deadlines are per request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False, headers=key_headers())


async def first_model(client: httpx.AsyncClient, name: str | None = None) -> ModelCard:
    """Return the first served model, or the one called `name`. Raises ServerError if there is none."""
    try:
        response = await client.get("/v1/models", timeout=30.0)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ServerError(f"{client.base_url} asks for an API key: set {KEY_VARIABLE} to one that it knows")
        response.raise_for_status()
        cards = msgspec.json.decode(response.content, type=_ModelList).data
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        raise ServerError(f"no OpenAI-compatible server answers at {client.base_url}: {_reason(error)}") from error
    card = next((card for card in cards if name in (None, card.id)), None)
    if card is None:
        served = ", ".join(card.id for card in cards) or "none"
        raise ServerError(f"{client.base_url} does not serve '{name or 'any model'}'; it serves {served}")
    return card


async def complete(client: httpx.AsyncClient, request: Completion, start: float, deadline_s: float) -> RequestRecord:
    """Send one request and time its answer; a failure becomes a record, not an exception.

    `start` is the run's start on time.perf_counter's scale.
    """
    progress = _Progress()
    sent = time.perf_counter()
    error: str | None = None
    try:
        async with asyncio.timeout(deadline_s):
            await _stream(client, request.body, sent, progress)
    except TimeoutError:
        error = f"no complete answer within the deadline of {deadline_s:g} s"
    except (httpx.HTTPError, msgspec.DecodeError, _RequestError) as caught:
        error = _reason(caught)
    return _record(request, progress, sent - start, time.perf_counter() - sent, error)


async def _stream(client: httpx.AsyncClient, body: bytes, sent: float, progress: _Progress) -> None:
    headers = {"content-type": "application/json"}
    async with client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
        progress.status = response.status_code
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            raise _RequestError(f"HTTP {response.status_code}: {text[:ERROR_CHARACTERS]}")
        async for event in _events(response):
            if event == b"[DONE]":
                progress.done = True
                return
            _take(_chunk_decoder.decode(event), time.perf_counter() - sent, progress)
    raise _RequestError("the stream ended before [DONE]")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event, without comments and other fields."""
    buffer = b""
    async for part in response.aiter_bytes():
        buffer = (buffer + part).replace(b"\r\n", b"\n")
        *events, buffer = buffer.split(EVENT_END)
        for event in events:
            data = [line[len(DATA) :].strip() for line in event.split(b"\n") if line.startswith(DATA)]
            if data:
                yield b"\n".join(data)


def _take(chunk: _Chunk, now_s: float, progress: _Progress) -> None:
    if chunk.error is not None:
        raise _RequestError(f"error in the stream: {str(chunk.error)[:ERROR_CHARACTERS]}")
    if chunk.usage is not None:
        progress.usage = chunk.usage
    if chunk.choices:
        progress.chunk_times_s.append(now_s)
        progress.finish_reason = chunk.choices[0].finish_reason or progress.finish_reason


def _record(
    request: Completion, progress: _Progress, sent_s: float, elapsed_s: float, error: str | None
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
        scheduled_s=request.scheduled_s,
        sent_s=sent_s,
        input_tokens=usage.prompt_tokens if usage else request.input_tokens,
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
