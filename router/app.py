"""Builds the router's HTTP server: vLLM's API server app on our engine client, and /metrics over the whole fleet.

Two steps, so that the slow one (importing vLLM, loading the tokenizer) runs while the engines load: `Router(settings)`,
then `serve(worker addresses)`. Owned by `cluster.actors.RouterActor`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from argparse import Namespace
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engine.errors import EngineError
from engine.messages import Pool, WorkerDescription
from engine.passed_args import words
from engine.vllm_arguments import refusing
from kv_transfer.address import http_url, join_host_port
from router import app_gaps, request_fields, unread
from router.admin import admin_routes
from router.admin_access import AdminAccess
from router.admission import Admission
from router.arrival import with_arrival
from router.asgi import Asgi
from router.client_identity import AddressClients
from router.cors import with_cors
from router.deadline import with_deadline
from router.engine_client import SUPPORTED_TASKS, RouterEngineClient
from router.fleet import Fleet
from router.guard import Access, guarded
from router.http_protocol import BoundedHeads
from router.intake import Intake, in_fair_order, refused_early
from router.json_cost import with_bounded_json, with_whole_bodies
from router.loop_lag import LoopLag
from router.metrics import QueueCollector, RequestMetrics, WorkerCollector
from router.metrics_page import metrics_endpoint
from router.orchestrator import Orchestrator
from router.pairing import KvPair, PairingRefused
from router.prefill_queue import prompt_queues
from router.readiness import Canary, Readiness, canary_prompt_tokens, canary_settings, ready_endpoint
from router.releaser import HandoffReleaser
from router.retry_after import with_retry_after
from router.routes import keep_known_routes
from router.settings import PoolHardware, RouterSettings

DRAIN_POLL_S = 0.05
LAST_WORDS_S = 2
TCP_NOTSENT_LOWAT = 25
"""Linux's number; `socket` has no name for it yet."""
KERNEL_UNSENT_BYTES = 128 << 10
"""Of one connection, so that what a client does not read is counted here and not hidden in megabytes of the kernel."""
KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep an idle connection (5 to 60 s): who closes first must not be the one that is
asked next, or a request is lost between the two."""


class _Stopped(Exception):
    """Raised inside the router's task group to end all of it."""


class Router:
    """The router process's one object; make it inside a running event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._args = _server_args(settings)
        self._metrics = RequestMetrics(REGISTRY)
        self._releaser = HandoffReleaser(settings.tls)
        self._fleet = Fleet(
            secrets.token_hex(8),
            self._releaser.release,
            settings.tls,
            on_gone=self._releaser.forget,
            stall_timeout_s=settings.stall_timeout_s,
        )
        self._queues = prompt_queues(self._fleet, settings)
        self._admission = Admission(settings, self._queues, self._fleet.pool, self._metrics)
        self._intake = Intake()
        self._client = RouterEngineClient(
            _frontend_config(self._args),
            self._admission,
            settings.max_unread_stream_bytes,
            self._count_unread,
        )
        self._orchestrator = Orchestrator(self._fleet, self._queues, settings, self._metrics, self._releaser.release)
        self._hardware: dict[Pool, PoolHardware] = {}
        REGISTRY.register(
            WorkerCollector(
                workers=lambda: self._fleet.workers,
                hardware=lambda: self._hardware,
                in_flight=lambda: self._orchestrator.in_flight,
                kv_pairs=lambda: self._fleet.kv_pairs,
                restarts=lambda: self._fleet.restarts,
            )
        )
        REGISTRY.register(QueueCollector(self._queues.values()))
        self._lag = LoopLag()
        REGISTRY.register(self._lag)
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

    async def replace_worker(self, address: str, reason: str) -> None:
        """Take in a worker that was started again because of `reason`, in place of its older incarnation.

        Raises WorkerLost or PairingRefused.
        """
        await self._fleet.replace(address, reason)
        self._wake()

    async def remove_worker(self, worker_id: str) -> None:
        """Forget a worker that has left for good."""
        await self._fleet.remove(worker_id)
        self._wake()

    def unreached(self, for_s: float) -> list[str]:
        """Addresses of the workers that it has not reached for so long."""
        return self._fleet.unreached(for_s)

    def _wake(self) -> None:
        """The fleet has changed: who waits for a worker may find one."""
        for queue in self._queues.values():
            queue.wake()

    @property
    def loop_silent_s(self) -> float:
        """For how long the event loop has done nothing but one thing; may be asked from another thread."""
        return self._lag.silent_s

    @property
    def ended(self) -> bool:
        """Whether it has served and does not any more, asked to or not."""
        return self._running is not None and self._running.done()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the accepted ones; returns how many did not end in time."""
        self._client.close_admission()
        try:
            async with asyncio.timeout(timeout_s):
                while self._client.accepted:  # noqa: ASYNC110 - a shutdown may poll
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            return self._client.accepted
        return 0

    async def stop(self) -> None:
        """Refuse new requests, end the running ones with an error that says why, close the port and every connection.

        Clients get `LAST_WORDS_S` to read it.
        """
        self._client.close_admission()
        self._client.end_all("the router is shutting down")
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
            group.create_task(self._lag.watch(), name="loop-lag")
            self._client.bind(self._orchestrator)
            self._readiness = self._make_readiness()
            app = guarded(await self._build_app(), _access(self._settings), self._settings.max_request_bytes)
            app = with_arrival(with_cors(app, self._settings.cors_allowed_origins))
            server = uvicorn.Server(self._uvicorn_config(app))
            serving = group.create_task(server.serve(sockets=[sock]), name="http")
            group.create_task(self._watch_unread(server), name="unread")
            while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has a flag for it, not an event
                await asyncio.sleep(0.01)
            host, port = sock.getsockname()[:2]
            self._url.set_result(http_url(host, port))
            await self._stop.wait()
            self._readiness.close()
            server.should_exit = True
            await serving

    def _count_unread(self, why: unread.Why) -> None:
        self._metrics.unread.labels(why).inc()

    async def _watch_unread(self, server: uvicorn.Server) -> None:
        await unread.watch(
            connections=lambda: (one for one in server.server_state.connections if isinstance(one, BoundedHeads)),
            streams=lambda: self._client.streams,
            write_deadline_s=self._settings.write_deadline_s,
            max_unread_bytes=self._settings.max_unread_bytes,
            on_end=self._count_unread,
        )

    def _make_readiness(self) -> Readiness:
        """Once connected: the canary is made to the workers' measure."""
        settings = self._settings
        uncounted = RequestMetrics(CollectorRegistry())
        canary = Canary(
            Orchestrator(self._fleet, self._queues, canary_settings(settings), uncounted, self._releaser.release),
            vocabulary_size=self._client.model_config.get_vocab_size(),
            prompt_tokens=canary_prompt_tokens(self._fleet.workers[0].description.block_size_tokens),
        )
        names: tuple[Pool, ...] = ("colocated",) if settings.mode == "colocated" else ("prefill", "decode")
        return Readiness(
            pools=lambda: {name: self._fleet.pool(name) for name in names},
            canary=canary,
            refresh=self._fleet.refresh,
            deadline_s=settings.ready_deadline_s,
            metrics=self._metrics,
        )

    def _uvicorn_config(self, app: Asgi) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            http=BoundedHeads,
            ws="none",
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # the guard reads them, from trusted proxies only, and leaves the real peer as it is
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )

    async def _build_app(self) -> Asgi:
        with app_gaps.root_logger_kept():
            app = build_app(self._args, SUPPORTED_TASKS, self._client.model_config)
        app_gaps.install(app)
        await init_app_state(self._client, app.state, self._args, SUPPORTED_TASKS)
        request_fields.install(app.state)
        app_gaps.name_settings(app.state)
        app.include_router(admin_routes(self._fleet))
        app.state.server = SimpleNamespace()  # vLLM's error handler touches it; uvicorn is ours
        app.add_route("/ready", ready_endpoint(self._readiness, lambda: self._client.draining), methods=["GET"])

        app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != "/metrics"]
        app.add_route("/metrics", metrics_endpoint(self._fleet.refresh, REGISTRY), methods=["GET"])
        keep_known_routes(app)
        bounded = with_bounded_json(with_retry_after(app_gaps.with_ended_streams(app)))
        in_turn = with_whole_bodies(in_fair_order(with_deadline(bounded), self._intake))
        return request_fields.with_headers_checked(refused_early(in_turn, self._intake, self._admission.check_share))


def _access(settings: RouterSettings) -> Access:
    return Access(
        key_hashes=settings.api_key_hashes,
        admin=AdminAccess(
            key_hashes=settings.admin_key_hashes,
            clients_are_remote=bool(settings.api_key_hashes or settings.trusted_proxies),
        ),
        addresses=AddressClients(settings.trusted_proxies),
    )


def _server_args(settings: RouterSettings) -> Namespace:
    """vLLM's own server arguments, from its own parser, so that every default is vLLM's."""
    parser = refusing(make_arg_parser(FlexibleArgumentParser()))
    args: Namespace = parser.parse_args(
        [
            *words(settings.engine_args),
            *("--model", settings.model_path),
            *("--served-model-name", settings.served_name),
            *("--dtype", settings.dtype),
            *("--max-model-len", str(settings.max_model_len_tokens)),
            "--disable-log-stats",
        ]
    )
    vars(args).update(settings.server_args)
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
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
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # its connections inherit it; Linux and macOS have it
            sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, KERNEL_UNSENT_BYTES)
        try:
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        where = join_host_port(host, port)
        raise OSError(
            error.errno, f"cannot listen on {where}: {error.strerror}; set server.host or server.port"
        ) from error
    return sock
