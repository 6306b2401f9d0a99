"""Builds the router's HTTP server: vLLM's API server app on our engine client, and /metrics over the whole fleet.

Two steps, so that the slow one (importing vLLM, loading the tokenizer) runs while the engines load: `Router(settings)`,
then `serve(worker addresses)`. Owned by `cluster.actors.RouterActor`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import uvicorn
from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engine.errors import EngineError
from engine.messages import Pool, WorkerDescription
from router import http_guard
from router.engine_client import SUPPORTED_TASKS, RouterEngineClient
from router.fleet import Fleet, KvPair, PairingRefused
from router.http_guard import Asgi
from router.metrics import RequestMetrics, WorkerCollector
from router.orchestrator import Orchestrator
from router.releaser import HandoffReleaser
from router.settings import PoolHardware, RouterSettings

DRAIN_POLL_S = 0.05
RETRY_AFTER_S = b"1"


class _Stopped(Exception):
    """Raised inside the router's task group to end all of it."""


class Router:
    """The router process's one object; make it inside a running event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._args = _server_args(settings)
        self._metrics = RequestMetrics(REGISTRY, settings.mode)
        self._client = RouterEngineClient(
            _frontend_config(self._args), settings.max_outstanding_requests, self._metrics
        )
        self._releaser = HandoffReleaser()
        self._fleet = Fleet(router_id=secrets.token_hex(8), on_unclaimed=self._releaser.release)
        self._orchestrator = Orchestrator(self._fleet, settings, self._metrics, self._releaser.release)
        REGISTRY.register(
            WorkerCollector(
                workers=lambda: self._fleet.workers,
                hardware=lambda: self._hardware,
                in_flight=lambda: self._orchestrator.in_flight,
                kv_pairs=lambda: self._fleet.kv_pairs,
            )
        )
        self._hardware: dict[Pool, PoolHardware] = {}
        self._stop = asyncio.Event()
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._running: asyncio.Task[None] | None = None

    @property
    def workers(self) -> list[WorkerDescription]:
        """The workers it is connected to."""
        return [worker.description for worker in self._fleet.workers]

    @property
    def kv_pairs(self) -> list[KvPair]:
        """What carries KV between which workers."""
        return self._fleet.kv_pairs

    async def serve(self, worker_addresses: list[str], hardware: dict[Pool, PoolHardware]) -> str:
        """Connect to the workers, open the port, return the URL. Raises PairingRefused, WorkerLost, OSError.

        `hardware` has the peaks of one worker of each pool, for the metrics.
        """
        self._hardware = hardware
        self._running = asyncio.create_task(self._run(worker_addresses), name="router")
        waiting: list[asyncio.Future[Any]] = [self._running, self._url]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            await self._running  # raises what went wrong
        return await self._url

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the running ones; returns how many did not end in time."""
        self._client.close_admission()
        try:
            async with asyncio.timeout(timeout_s):
                while self._orchestrator.in_flight:  # noqa: ASYNC110 - a shutdown may poll
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            return self._orchestrator.in_flight
        return 0

    async def stop(self) -> None:
        """Close the port and every connection."""
        self._stop.set()
        if self._running is not None:
            await self._running

    async def _run(self, worker_addresses: list[str]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self._serve_until_stopped(worker_addresses, group)
                raise _Stopped
        except* _Stopped:
            pass
        except* (EngineError, PairingRefused, OSError) as errors:
            raise errors.exceptions[0] from None  # one cause: the caller shows its sentence

    async def _serve_until_stopped(self, worker_addresses: list[str], group: asyncio.TaskGroup) -> None:
        with _bound_socket(self._settings.host, self._settings.port) as sock:
            await self._fleet.connect(worker_addresses, group)
            group.create_task(self._releaser.run(), name="handoff-releaser")
            self._client.bind(self._orchestrator)
            server = uvicorn.Server(uvicorn.Config(await self._build_app(), log_level="warning", access_log=False))
            serving = group.create_task(server.serve(sockets=[sock]), name="http")
            while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has a flag for it, not an event
                await asyncio.sleep(0.01)
            host, port = sock.getsockname()[:2]
            self._url.set_result(f"http://{host}:{port}")
            await self._stop.wait()
            server.should_exit = True
            server.force_exit = True
            await serving

    async def _build_app(self) -> Asgi:
        app = build_app(self._args, SUPPORTED_TASKS, self._client.model_config)
        http_guard.install(app)
        await init_app_state(self._client, app.state, self._args, SUPPORTED_TASKS)
        app.state.server = SimpleNamespace()  # vLLM's error handler touches it; uvicorn is ours

        guarded = http_guard.with_ended_streams(app)

        async def with_fresh_metrics(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"].startswith("/metrics"):
                await self._fleet.refresh()
            await guarded(scope, receive, _with_retry_after(send))

        return with_fresh_metrics


def _with_retry_after(send: Any) -> Any:
    """Tell a refused client when to come back: vLLM's errors carry no headers."""

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start" and message["status"] in (429, 503):
            message = {**message, "headers": [*message["headers"], (b"retry-after", RETRY_AFTER_S)]}
        await send(message)

    return sending


def _server_args(settings: RouterSettings) -> Namespace:
    """vLLM's own server arguments, from its own parser, so that every default is vLLM's."""
    parser = make_arg_parser(FlexibleArgumentParser())
    args: Namespace = parser.parse_args(
        [
            *("--model", settings.model_path),
            *("--served-model-name", settings.served_name),
            *("--dtype", settings.dtype),
            *("--max-model-len", str(settings.max_model_len_tokens)),
            "--disable-log-stats",
        ]
    )
    return args


def _frontend_config(args: Namespace) -> VllmConfig:
    """A configuration for rendering and sampling parameters only, as vLLM's own GPU-less render server makes it."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    model_config.quantization = None
    return VllmConfig(
        model_config=model_config,
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )


def _bound_socket(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}; set server.port") from error
    return sock
