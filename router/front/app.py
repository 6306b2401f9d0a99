"""vLLM's API server app on our engine client, and the layers before it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

from fastapi import APIRouter
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from vllm.config import LoRAConfig, SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers import app as vllm_app
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.lora.request import LoRARequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import __version__ as vllm_version

from ridgeline.contracts.tasks import Adapter
from ridgeline.engine.passed_args import words
from ridgeline.engine.vllm_arguments import refusing
from ridgeline.router.client_identity import AddressClients
from ridgeline.router.fleet.adapters import Adapters
from ridgeline.router.flow.concurrency_limiter import AT_A_TIME
from ridgeline.router.front import request_fields, strict
from ridgeline.router.front.admin import adapter_routes
from ridgeline.router.front.engine_client import SUPPORTED_TASKS, RouterEngineClient
from ridgeline.router.front.health import Readiness, ready_endpoint
from ridgeline.router.front.http.context import WithContext
from ridgeline.router.front.http.routes import keep_known_routes, name_the_right_path
from ridgeline.router.front.http.types import Asgi, Receive, Scope, Send
from ridgeline.router.front.middleware.admin_access import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH, AdminAccess
from ridgeline.router.front.middleware.anthropic_errors import anthropic_errors
from ridgeline.router.front.middleware.auth import Access, KeyGuard, for_pages
from ridgeline.router.front.middleware.ingress import Gates, Ingress
from ridgeline.router.front.page import PageFacts, page_routes
from ridgeline.router.front.vllm_workarounds import app_gaps, bodies, messages, responses, stream_chunks, whole_calls
from ridgeline.router.settings import RouterSettings

VLLM_VERSION = vllm_version
Layer = Callable[[Asgi], Asgi]


def layers(settings: RouterSettings, gates: Gates) -> tuple[Layer, ...]:
    """Return the layers that a request passes before vLLM's app, outermost first."""
    clients_are_remote = bool(settings.api_key_hashes or settings.server.trusted_proxies)
    operators = AdminAccess(settings.admin_key_hashes, clients_are_remote)
    access = Access(settings.api_key_hashes, operators, AddressClients(settings.server.trusted_proxies))
    return (
        WithContext,
        anthropic_errors,
        partial(for_pages, allowed_origins=settings.server.cors_allowed_origins),
        partial(KeyGuard, access=access),
        partial(Ingress, settings=settings, gates=gates),
        app_gaps.ended_streams,
    )


def behind(app: Asgi, outermost_first: tuple[Layer, ...]) -> Asgi:
    """Wrap the app in these layers, which see requests and not the events of its start and end."""
    layered = app
    for layer in reversed(outermost_first):
        layered = layer(layered)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (layered if scope["type"] == "http" else app)(scope, receive, send)

    return serve


async def build_app(
    args: Namespace,
    settings: RouterSettings,
    client: RouterEngineClient,
    operators: APIRouter,
    adapters: Adapters,
    readiness: Readiness,
    gates: Gates,
    metrics: Callable[[Request], Awaitable[Response]],
) -> Asgi:
    """Build the whole HTTP application: vLLM's app with our routes, behind the layers.

    `operators` are the routes of `ridgeline.router.front.admin`, `metrics` is the endpoint of GET /metrics.
    """
    with app_gaps.root_logger_kept():
        app = vllm_app.build_app(args, SUPPORTED_TASKS, client.model_config)
    app_gaps.install(app)
    bodies.install(app, request_fields.misplaced)
    stream_chunks.install()
    await init_app_state(client, app.state, args, SUPPORTED_TASKS)
    request_fields.install(app.state, gates.most_sequences, settings.server.max_grammar_bytes)
    app_gaps.name_settings(app.state)
    strict.install()
    app_gaps.refuse_unknown_ids(app.state)
    whole_calls.install(app.state)
    messages.install(app.state)
    responses.install(app.state)
    name_the_right_path(app)
    adapters.on_change(lambda: offer(app.state, adapters.known))
    ours = ("/metrics", LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in ours]
    app.include_router(operators)
    app.include_router(adapter_routes(adapters))
    app.include_router(page_routes(PageFacts(settings.name, settings.served_names[0], version("ridgeline"))))
    app.state.server = SimpleNamespace()  # vLLM's error handler accesses it, but we run uvicorn ourselves
    app.add_route("/ready", ready_endpoint(readiness, lambda: client.draining), methods=["GET"])
    app.add_route("/metrics", metrics, methods=["GET"])
    keep_known_routes(app)
    return behind(app, layers(settings, gates))


def offer(state: State, adapters: Mapping[str, Adapter]) -> None:
    """Let requests choose these LoRA adapters as `model`, and list them at /v1/models."""
    state.openai_serving_models.lora_requests = {
        name: LoRARequest(name, adapter.number, adapter.path) for name, adapter in adapters.items()
    }


def server_args(settings: RouterSettings) -> Namespace:
    """Build vLLM's server arguments with vLLM's own parser, so that every default is vLLM's."""
    parser = refusing(make_arg_parser(FlexibleArgumentParser()))
    args: Namespace = parser.parse_args(
        [
            *("--renderer-num-workers", str(AT_A_TIME)),  # one thread would let a long text hold up all others
            *words(settings.engine_args),
            *("--model", settings.model_path),
            *("--served-model-name", *settings.served_names),
            *("--dtype", settings.dtype),
            *("--max-model-len", str(settings.max_model_len)),
            "--disable-log-stats",
            "--enable-offline-docs",  # else /docs runs a script from elsewhere, on the origin where operators have keys
        ]
    )
    vars(args).update(settings.server_args)
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    return args


def frontend_config(args: Namespace, *, speculates: bool) -> VllmConfig:
    """Build a configuration for rendering and sampling parameters only, as vLLM's own GPU-less render server does.

    If engines speculate, vLLM's check refuses here what they would refuse, when a client may have a token already.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    model_config.quantization = None
    config = VllmConfig(
        model_config=model_config,
        lora_config=LoRAConfig(max_lora_rank=args.max_lora_rank) if args.enable_lora else None,
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )
    if speculates:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=1,
            prompt_lookup_max=1,
            target_model_config=model_config,
            target_parallel_config=config.parallel_config,
        )
    return config
