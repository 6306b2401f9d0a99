"""The router as one object, which builds its parts, runs them and ends them.

It starts in two steps, so that the slow one (importing vLLM, loading the tokenizer) runs while the engines load:
`Router(settings)`, then `serve(worker addresses)`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry

from ridgeline.contracts.errors import EngineError
from ridgeline.contracts.rpc.address import http_url, join_host_port
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.decisions import OwnDecisions, SharedDecisions
from ridgeline.router.dispatch.orchestrator import HandoffReleaser, Orchestrator
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.pairing import PairingRefused
from ridgeline.router.fleet.request_route import pools_of
from ridgeline.router.fleet.roles import role_table
from ridgeline.router.flow.admission import LOOK_EVERY_S, Admission
from ridgeline.router.flow.held_bodies import HeldBodies
from ridgeline.router.front.admin import admin_routes, shown_operation
from ridgeline.router.front.app import VLLM_VERSION, build_app, frontend_config, server_args
from ridgeline.router.front.engine_client import RouterEngineClient
from ridgeline.router.front.health import HealthProbe, Readiness, probe_prompt_tokens
from ridgeline.router.front.http.types import Asgi
from ridgeline.router.front.metrics_page import NodeMetrics, metrics_endpoint
from ridgeline.router.front.middleware.http_protocol import BoundedHeads, watch_readers
from ridgeline.router.front.middleware.ingress import Gates
from ridgeline.router.front.operations import Asked, Operations, Progress
from ridgeline.router.idle_times import OUTPUT_TOKENS, measure, too_short
from ridgeline.router.live.view import LiveView, Sources
from ridgeline.router.observe.collectors import BuildInfo, WorkerCollector
from ridgeline.router.observe.ended_requests import EndedRequests
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.observe.tracing import Traces
from ridgeline.router.placement.pool_queue import QueueCollector, QueueNow
from ridgeline.router.router_control import RouterControl
from ridgeline.router.settings import PoolHardware, RouterSettings, SharedWith
from ridgeline.router.shared.link import NoDispatcher

DRAIN_POLL_S = 0.05
LAST_WORDS_S = 2
TCP_NOTSENT_LOWAT = 25
"""Linux's number for this option; `socket` has no name for it yet."""
KERNEL_UNSENT_BYTES = 128 << 10
"""Unsent bytes that the kernel may hold per connection; by default it hides megabytes that a client has not read."""
KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep an idle connection (5 to 60 s). If the server closed first, a request sent at
the same moment would be lost."""


class _Stopped(Exception):
    """Raised inside the router's task group to end all of it."""


class Router(RouterControl):
    """The router. There is one per process; create it inside a running event loop."""

    TITLE = "router"

    def __init__(self, settings: RouterSettings) -> None:
        clients, admins = {*settings.api_key_hashes}, {*settings.admin_key_hashes}
        settings = replace(settings, api_key_hashes=clients, admin_key_hashes=admins)
        self._keys = clients, admins, metrics_readers(settings)
        """Changed in place: whoever checks keys has them."""
        self._settings = settings
        self._args = server_args(settings)
        router_id, shares = secrets.token_hex(8), settings.routers > 1
        requests = CollectorRegistry() if shares else REGISTRY
        self._node_metrics = NodeMetrics(settings.start) if shares else None
        tracing = settings.router.tracing
        self._traces = None if tracing.endpoint is None else Traces(tracing, settings.served_names[0])
        send = None if self._traces is None else self._traces.send
        self._metrics = RequestMetrics(requests, ended=EndedRequests(send_trace=send, routers=settings.routers))
        self._releaser = HandoffReleaser(settings.tls)
        fleet = Fleet(
            router_id,
            self._releaser.release,
            settings.tls,
            on_gone=self._releaser.forget,
            stall_timeout_s=settings.stall_timeout_s,
            roles=role_table(settings),
            reuses_decode_kv=settings.reuse_decode_kv,
            leads=not shares,
        )
        super().__init__(fleet)
        self._shared = SharedDecisions(self.fleet, settings) if shares else None
        self._decisions = self._shared or OwnDecisions(self.fleet, settings)
        if isinstance(self._decisions, OwnDecisions):
            self.comparing = self._decisions.comparing
        self._admission = Admission(
            settings, self._decisions.waits, self.fleet, self._metrics, look_every_s=LOOK_EVERY_S
        )
        if self._shared is not None:
            self._shared.attach(self._admission)
        if self._node_metrics is not None:
            self._node_metrics.show(requests)
            REGISTRY.register(self._node_metrics)
        self._gates = Gates(
            check_share=self._admission.check_share,
            most_sequences=self._admission.most_of_one_client,
            bodies=HeldBodies(settings.server.max_request_bytes, lambda why: self._metrics.rejected.labels(why).inc()),
        )
        self._client = RouterEngineClient(
            frontend_config(self._args, speculates=settings.speculates),
            self._admission,
            settings.server.max_grammar_bytes,
            lambda: self.fleet.adapters,
        )
        self._orchestrator = Orchestrator(self._decisions.placement, settings, self._metrics, self._releaser.release)
        self.operations = Operations()
        """Operations of operators, for whoever starts and ends workers."""
        self._hardware: dict[Pool, PoolHardware] = {}
        self._wanted: Mapping[Pool, int] = {}
        REGISTRY.register(
            WorkerCollector(
                workers=lambda: self.fleet.workers,
                hardware=lambda: {pool: self._hardware[pool] for pool in self._pools if pool in self._hardware},
                mode=lambda: self.fleet.mode,
                kv_pairs=lambda: self.fleet.kv_pairs,
                restarts=lambda: self.fleet.restarts,
                away=lambda: self.fleet.away,
                wanted=lambda: self._wanted,
            )
        )
        REGISTRY.register(BuildInfo(VLLM_VERSION, settings.served_names[0]))
        REGISTRY.register(QueueCollector(lambda: self.queues))
        REGISTRY.register(self._lag)
        REGISTRY.register(self._client.turns)
        self._stop = asyncio.Event()
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def _pools(self) -> tuple[Pool, ...]:
        return pools_of(self.fleet.mode)

    async def serve(
        self,
        worker_addresses: list[str],
        hardware: dict[Pool, PoolHardware],
        shared: SharedWith | None = None,
        *,
        some: bool = False,
    ) -> str:
        """Connect to the workers, open the port and return the URL; with `some`, begin with those that are reached.

        `hardware` holds the peaks of one worker of each pool, for the metrics. One of several routers needs `shared`.
        Raises PairingRefused, WorkerLost, NoDispatcher, OSError.
        """
        self._hardware = hardware
        if self._shared is not None:
            assert shared is not None
            await self._shared.link.follow(shared.dispatcher)
        self._running = asyncio.create_task(self._run(worker_addresses, shared, some), name="router")
        waiting: list[asyncio.Future[Any]] = [self._running, self._url]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            await self._running  # raises the cause
        return await self._url

    @property
    def queues(self) -> Mapping[Pool, QueueNow]:
        """The prompts that wait."""
        return self._decisions.queues()

    def fleet_changed(self) -> None:
        """Look again what can start, now that there are other workers."""
        self._decisions.fleet_changed()

    async def note_wanted(self, workers: Mapping[Pool, int]) -> None:
        """Note how many workers of each pool autoscaling wants, for the metrics."""
        self._wanted = workers

    async def follow_dispatcher(self, address: str) -> None:
        """Join the dispatcher at this address, where another one has been started."""
        if self._shared is not None:
            await self._shared.link.follow(address)

    @property
    def streams(self) -> int:
        """The number of answers in progress, those included that their clients have not read."""
        return len(self._client.streams)

    async def take_operation(self, within_s: float, cancelling: str) -> Asked:
        """Return what operators want beside what the driver is `cancelling`, or wait for it up to this many seconds."""
        asked = await self.operations.take(within_s, cancelling)
        return replace(asked, mode=self.fleet.mode)

    async def report(self, progress: Progress) -> None:
        """Note how an operation goes on, for whoever asks."""
        self.operations.report(progress)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the accepted ones; return how many did not end in time."""
        self._client.close_admission()
        try:
            async with asyncio.timeout(timeout_s):
                while self._client.accepted:  # noqa: ASYNC110 - a shutdown may poll
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            return self._client.accepted
        return 0

    async def stop(self) -> None:
        """Refuse new requests, end the running ones with an error, close the port and all connections.

        Clients get `LAST_WORDS_S` to read the error.
        """
        self._client.close_admission()
        self._client.end_all("the router is shutting down")
        self._stop.set()
        if self._running is not None:
            await self._running

    def forget_counts(self) -> None:
        """Remove the files in which one of several routers counts, since the deployment ends."""
        if self._node_metrics is not None:
            self._node_metrics.close()

    async def _run(self, worker_addresses: list[str], shared: SharedWith | None, some: bool) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self._serve_until_stopped(worker_addresses, shared, group, some)
                raise _Stopped
        except* _Stopped:
            pass
        except* (EngineError, NoDispatcher, PairingRefused, OSError) as errors:
            raise errors.exceptions[0] from None  # there is one cause, whose message the caller shows

    async def _serve_until_stopped(
        self, worker_addresses: list[str], shared: SharedWith | None, group: asyncio.TaskGroup, some: bool
    ) -> None:
        with _bound_socket(self._settings, shared) as sock:
            group.create_task(self._decisions.run(), name="decisions")
            await self.fleet.connect(worker_addresses, group, some=some)
            if isinstance(self._decisions, OwnDecisions):
                await self._decisions.adapters.load_first(self._settings.lora_modules, again=some)
            if self._shared is not None:
                await self._shared.joined()
            group.create_task(self._releaser.run(), name="handoff-releaser")
            group.create_task(self._lag.watch(), name="loop-lag")
            group.create_task(self._metrics.count_cpu(self._settings.start.name), name="cpu")
            group.create_task(self._client.turns.watch(), name="text-turns")
            if self._traces is not None:
                group.create_task(self._traces.run(), name="traces")
            self._client.bind(self._orchestrator)
            self._readiness = self._make_readiness()
            live = LiveView(self._live_sources())
            group.create_task(live.run(), name="live-page")
            self._readiness.mode = lambda: self.fleet.mode
            app = await build_app(
                self._args,
                self._settings,
                self._client,
                admin_routes(
                    self.fleet,
                    self._decisions.modes,
                    self.operations,
                    self._metrics.ended,
                    live,
                    self._decisions.record,
                    self._stop,
                    self._decisions.placement.forget_prefixes,
                ),
                self._decisions.adapters,
                self._readiness,
                self._gates,
                metrics_endpoint(self._refresh_metrics, REGISTRY, self._keys[-1]),
            )
            server = uvicorn.Server(self._uvicorn_config(app))
            serving = group.create_task(server.serve(sockets=[sock]), name="http")
            group.create_task(self._watch_unread(server), name="unread")
            while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has a flag for this, not an event
                await asyncio.sleep(0.01)
            host, port = sock.getsockname()[:2]
            self._url.set_result(http_url(host, port))
            await self._stop.wait()
            self._readiness.check.cancel()
            server.should_exit = True
            await serving

    def _live_sources(self) -> Sources:
        return Sources(
            settings=self._settings,
            fleet=self.fleet,
            metrics=self._metrics,
            lag=self._lag,
            text=self._client.turns.sent,
            queues=lambda: self.queues,
            hardware=lambda: self._hardware,
            operation=lambda: shown_operation(self.operations.last),
        )

    async def _refresh_metrics(self) -> None:
        refreshing = [self.fleet.refresh()]
        if self._node_metrics is not None:
            refreshing.append(self._node_metrics.refresh())
        await asyncio.gather(*refreshing)

    async def _watch_unread(self, server: uvicorn.Server) -> None:
        await watch_readers(
            connections=server.server_state.connections,
            send_timeout_s=self._settings.server.send_timeout_s,
            max_send_buffer_bytes=self._settings.server.max_send_buffer_bytes,
            on_end=lambda why: self._metrics.unread.labels(why).inc(),
        )

    def _probe(self) -> HealthProbe:
        """Return a health probe; its size depends on the connected workers."""
        known = self.fleet.workers[0].description
        return HealthProbe(
            self._orchestrator,
            vocabulary_size=self._client.model_config.get_vocab_size(),
            prompt_tokens=probe_prompt_tokens(known.layout.block_size, known.max_model_len),
        )

    async def use_keys(self, settings: RouterSettings) -> None:
        """Let the keys of these settings open what the former ones did, from the next request on."""
        now = settings.api_key_hashes, settings.admin_key_hashes, metrics_readers(settings)
        for held, hashes in zip(self._keys, now, strict=True):
            held.clear()
            held.update(hashes)

    async def limits_too_short(self) -> list[str]:
        """Return which limits of `router.slo` an idle server cannot keep, as measured now; call it after the start."""
        slo, probe = self._settings.router.slo, self._probe()
        limits_s = slo.ttft_limit_s, slo.tpot_limit_s
        idle = await measure(lambda emit: probe(emit, OUTPUT_TOKENS)) if limits_s != (None, None) else None
        return too_short(*limits_s, idle, probe.prompt_tokens) if idle is not None else []

    def _make_readiness(self) -> Readiness:
        settings = self._settings
        return Readiness(
            pools=lambda: {name: self.fleet.pool(name) for name in self._pools},
            probe=self._probe(),
            refresh=self.fleet.refresh,
            deadline_s=settings.router.ready_deadline_s,
            metrics=self._metrics,
            away=lambda: self.fleet.away,
            late=lambda: self._client.turns.late,
        )

    def _uvicorn_config(self, app: Asgi) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            http=BoundedHeads,
            ws="none",
            log_config=None,
            log_level=None,
            access_log=False,
            proxy_headers=False,  # the key guard reads them, from trusted proxies only, and keeps the real peer
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )


def metrics_readers(settings: RouterSettings) -> set[bytes]:
    """Return the hashes of the keys that open /metrics; none if it is open to all."""
    return {*settings.metrics_key_hashes, *settings.admin_key_hashes} if settings.metrics_key_hashes else set()


def _bound_socket(settings: RouterSettings, shared: SharedWith | None) -> socket.socket:
    """Return a socket for HTTP. Raises OSError, with what to change.

    Routers of one deployment share their port on a node. The first one makes sure that nobody else has it.
    """
    host, port = settings.server.host, settings.server.port if shared is None else shared.port
    try:
        if shared is not None and port and not shared.joins_port:
            _new_socket(host, port, shares=False).close()
        return _new_socket(host, port, shares=shared is not None)
    except OSError as error:
        where = join_host_port(host, port)
        raise OSError(
            error.errno, f"cannot listen on {where}: {error.strerror}; set server.host or server.port"
        ) from error


def _new_socket(host: str, port: int, *, shares: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    with suppress(OSError):  # connections inherit it; Linux and macOS have this option
        sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, KERNEL_UNSENT_BYTES)
    try:
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
