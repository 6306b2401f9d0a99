"""A server with known timing for tests of the load generator: completions over SSE, /v1/models, /metrics.

It runs in a thread with its own event loop, so that delays of the client are the client's own.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ridgeline.loadtest.run.server_facts import ServerFacts
from ridgeline.loadtest.variants import Reached
from tests.support.http_server import listening
from tests.support.patience import PATIENCE_S, eventually


@dataclass
class Behaviour:
    """What the server does; `faults` maps the number of a completion request (warm-up included) to its fault."""

    ttft_s: float = 0.05
    tpot_s: float = 0.01
    mode: str = "disaggregated"
    fallback_every: int = 0
    in_one_piece: bool = False
    """Whether an answer comes in one event, as from a server that does not stream."""
    has_metrics: bool = True
    model: str = "fake"
    max_model_len: int = 8192
    tokenizer: str | None = None
    answers_after_requests: int = 0
    """Number of requests that must have come before any answer begins."""
    restarts_at: int = 0
    """Number of the completion request at which a worker is counted as restarted; 0 for never."""
    restarts_every: int = 0
    """The same at each multiple of this number."""
    key: str | None = None
    """The API key that it asks for."""
    resets_cache: bool = False
    cache_resets: int = 0
    faults: dict[int, str] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    bodies: list[dict] = field(default_factory=list)
    slos: list[str | None] = field(default_factory=list)
    """The TTFT SLO that each request named, in ms; None without one."""

    def wait_for_requests(self, count: int) -> None:
        """Block until `count` completion requests have arrived."""
        while len(self.bodies) < count:
            time.sleep(0.01)


class FakeMetrics:
    """Ridgeline's metrics as a server of 10 GFLOP/s and 1 GB/s per worker would count them."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("ridgeline_requests", "-", ["path", "outcome"], registry=registry)
        self.recomputes = Counter("ridgeline_recompute", "-", ["pool", "reason"], registry=registry)
        self.flops = Counter("ridgeline_flops", "-", ["pool", "worker"], registry=registry)
        self.bytes = Counter("ridgeline_bytes", "-", ["pool", "worker", "kind"], registry=registry)
        self.busy = Counter("ridgeline_busy_seconds", "-", ["pool", "worker"], registry=registry)
        self.restarts = Counter("ridgeline_worker_restarts", "-", ["pool", "worker", "reason"], registry=registry)
        self.steps = Counter("ridgeline_steps", "-", ["pool", "worker"], registry=registry)
        self.stages = Histogram("ridgeline_stage_seconds", "-", ["stage"], registry=registry)
        pools = {"colocated": 2} if mode == "colocated" else {"prefill": 1, "decode": 1}
        for name, value in (("ridgeline_peak_flops", 1e10), ("ridgeline_peak_bytes_per_second", 1e9)):
            gauge = Gauge(name, "-", ["pool"], registry=registry)
            for pool in pools:
                gauge.labels(pool).set(value)
        workers = Gauge("ridgeline_workers", "-", ["pool"], registry=registry)
        for pool, count in pools.items():
            workers.labels(pool).set(count)

    def finished(self, behaviour: Behaviour, fallback: bool, output_tokens: int) -> None:
        """Count one request: its prefill at 50 FLOP/byte and its decode at 2."""
        prefill, decode = ("prefill", "decode") if self.mode == "disaggregated" else ("colocated", "colocated")
        way = "colocated" if self.mode == "colocated" else "fallback" if fallback else "disaggregated"
        self.requests.labels(way, "finished").inc()
        for pool, flops, seconds, intensity in (
            (prefill, 1e8, behaviour.ttft_s / 2, 50),
            (decode, 2e6 * output_tokens, behaviour.tpot_s * output_tokens / 4, 2),
        ):
            self.flops.labels(pool, "0").inc(flops)
            self.bytes.labels(pool, "0", "weights").inc(flops / intensity)
            self.busy.labels(pool, "0").inc(seconds)
            self.steps.labels(pool, "0").inc(output_tokens)
        for stage, share in (("queue", 0.2), ("prefill", 0.7), ("wire", 0.1)):
            if stage != "wire" or self.mode == "disaggregated":
                self.stages.labels(stage).observe(behaviour.ttft_s * share)
        self.stages.labels("decode").observe(behaviour.tpot_s * (output_tokens - 1))


def make_app(behaviour: Behaviour) -> Starlette:
    """Build the application; `behaviour` may be changed while it runs."""
    metrics = FakeMetrics(behaviour.mode)

    async def models(request: Request) -> Response:
        if behaviour.key and request.headers.get("authorization") != f"Bearer {behaviour.key}":
            return Response(status_code=401)
        card = {"id": behaviour.model, "root": behaviour.tokenizer, "max_model_len": behaviour.max_model_len}
        return JSONResponse({"object": "list", "data": [card]})

    async def metrics_page(_: Request) -> Response:
        if not behaviour.has_metrics:
            return Response(status_code=404)
        return Response(generate_latest(metrics.registry), media_type="text/plain")

    async def completions(request: Request) -> Response:
        if behaviour.key and request.headers.get("authorization") != f"Bearer {behaviour.key}":
            return Response(status_code=401)
        body = await request.json()
        number = len(behaviour.bodies)
        behaviour.bodies.append(body)
        behaviour.slos.append(request.headers.get("x-ridgeline-ttft-ms"))
        behaviour.prompts.append(body.get("prompt") or body["messages"])
        if number + 1 == behaviour.restarts_at or (behaviour.restarts_every and number % behaviour.restarts_every == 0):
            metrics.restarts.labels("colocated", "0", "engine_died").inc()
        if behaviour.faults.get(number) == "refuse":
            return JSONResponse({"error": {"message": "too busy"}}, status_code=503)
        return StreamingResponse(answer(behaviour, metrics, body, number), media_type="text/event-stream")

    async def reset_prefix_cache(_: Request) -> Response:
        behaviour.cache_resets += 1
        return Response(status_code=200 if behaviour.resets_cache else 404)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/metrics", metrics_page),
            Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", completions, methods=["POST"]),
        ]
    )


async def answer(behaviour: Behaviour, metrics: FakeMetrics, body: dict, number: int) -> AsyncIterator[bytes]:
    """Stream one completion with a pause before each token, or the fault planned for this request."""
    total, fault = body["max_tokens"], behaviour.faults.get(number, "")
    await eventually(lambda: len(behaviour.bodies) >= behaviour.answers_after_requests)
    chat = "messages" in body
    if chat:
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    if behaviour.in_one_piece:
        yield event({"choices": [{"index": 0, "text": "word " * total, "finish_reason": "length"}]})
    for token in range(0 if behaviour.in_one_piece else total):
        await asyncio.sleep(behaviour.tpot_s if token else behaviour.ttft_s)
        if fault == "short" and token == 2:
            total = token
            break
        if fault and token == 2:
            if fault == "hang":
                await asyncio.sleep(2 * PATIENCE_S)
            if fault == "disconnect":
                raise ConnectionError("the fake drops the connection")
            if fault == "error":
                yield event({"error": {"message": "engine died"}})
                yield b"data: [DONE]\n\n"
            return
        reason = "length" if token == total - 1 else None
        words = {"delta": {"content": "word "}} if chat else {"text": "word "}
        yield event({"choices": [{"index": 0, **words, "finish_reason": reason}]})
    metrics.finished(behaviour, bool(behaviour.fallback_every and number % behaviour.fallback_every == 0), total)
    asked = len(body["prompt"]) if "prompt" in body else len(body["messages"][0]["content"])
    yield event({"choices": [], "usage": {"prompt_tokens": asked, "completion_tokens": total}})
    yield b"data: [DONE]\n\n"


def event(payload: dict) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


@contextlib.contextmanager
def running(behaviour: Behaviour) -> Iterator[str]:
    """Serve on a free port of this machine; yield the base URL."""

    async def serve() -> None:
        async with listening(make_app(behaviour), log_level="critical") as url:
            end = asyncio.Event()
            started.set_result((url, asyncio.get_running_loop(), end))
            await end.wait()

    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    url, loop, end = started.result(PATIENCE_S)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(PATIENCE_S)


class Ready:
    """A variant whose server runs all the time, and is always ready; `at_round` is told the number of each round."""

    start_s, devices, context_tokens, facts = 0.0, None, None, ServerFacts()

    def __init__(self, url: str, mode: str = "colocated", at_round: Callable[[int], None] = lambda _: None) -> None:
        self.mode, self._url, self._at_round, self._rounds = mode, url, at_round, 0

    async def ready(self, why: str = "") -> Reached:
        self._rounds += 1
        self._at_round(self._rounds)
        return Reached(self._url, is_fresh=False)
