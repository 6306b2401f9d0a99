"""One real disaggregated deployment for all tests in this folder: real Ray, real engines, real gRPC, the real model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import hypothesis  # noqa: F401 - else its plugin does after the last test, where Python 3.11 once failed to parse it
import psutil
import pytest
import pytest_asyncio

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.doctor.checks import resolve_dtype
from ridgeline.contracts.rpc.tls import TlsFiles
from tests.engines.serve_process import SHARED_PARENT, START_WITHIN_S

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "deploy" / "local.yaml"
LEASE_S = 30.0  # as in that file
PARENT_MODULE = "ridgeline.cluster.runtime.service_process.child"
SHORT_STEPS = {f"pools.{pool}.max_num_batched_tokens": "128" for pool in ("prefill", "decode")}
"""For short prompts: an engine warms up with a full step, which takes seconds with the shipped size."""
TEXT = REPOSITORY / "loadtest" / "data" / "opticks.txt"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, then those that start engines of their own, then those that share the deployment.

    The shared deployment keeps its cores until the session ends: a deployment that starts beside it finds none left.
    """
    items.sort(key=lambda item: (item.get_closest_marker("engines") is not None, _shares_the_deployment(item)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The shared deployment has the number format that is asked for.

    A second one has float32, where that is another format, for what depends on exact tokens: engines with bfloat16
    instructions are not what runs on a CPU without them. The other way round is not tried, as such a CPU emulates
    bfloat16, which takes many times as long.
    """
    if "deployment" not in metafunc.fixturenames:
        return
    config = load_config(CONFIG, {"model.dtype": metafunc.config.getoption("--dtype")}).config
    formats: dict[str, Any] = {config.model.dtype: pytest.param(config.model.dtype, id=pytest.HIDDEN_PARAM)}
    if resolve_dtype(config) != "float32" and (exact := metafunc.definition.get_closest_marker("exact")):
        formats["float32"] = pytest.param("float32", marks=pytest.mark.second_format)
        formats = {name: formats[name] for name in exact.args or formats}
    metafunc.parametrize("deployment", formats.values(), indirect=True, scope="session")


def _shares_the_deployment(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "deployment" in item.fixturenames


@pytest.fixture(scope="session", autouse=True)
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Import vLLM once for all deployments that this process starts."""
    from ridgeline.cluster.runtime.actors import engine_environment
    from ridgeline.cluster.runtime.service_process.launch import PRELOADED, preloaded_parent
    from ridgeline.cluster.runtime.services import IMPORTED

    messages = tmp_path_factory.mktemp("preloaded") / "messages"
    with (
        preloaded_parent(IMPORTED, engine_environment(1, START_WITHIN_S, on_cpu=True), messages) as path,
        pytest.MonkeyPatch.context() as patch,
    ):
        (parent,) = [child for child in psutil.Process().children() if PARENT_MODULE in child.cmdline()]
        patch.setenv(PRELOADED, path)
        patch.setenv(SHARED_PARENT, str(parent.pid))
        yield
    assert "Traceback" not in messages.read_text()


@asynccontextmanager
async def deployed(overrides: dict[str, str], tls: TlsFiles | None = None) -> AsyncIterator[Any]:
    """One prefill and one decode worker on a free port, as deploy/local.yaml says but for the overrides."""
    from transformers import AutoTokenizer

    from ridgeline.cluster.runtime.deployment import deploy
    from ridgeline.cluster.runtime.plan import make_plan
    from ridgeline.cluster.runtime.ray_start import ray_runtime
    from tests.engines.harness import Engines, connected

    config = load_config(CONFIG, {"server.port": "0", **overrides}).config
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(ray_runtime(config))
        plan = await asyncio.to_thread(make_plan, config)
        deployment = await stack.enter_async_context(deploy(plan, print))
        clients = await stack.enter_async_context(connected([row.address for row in deployment.rows], tls))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=deployment.url, timeout=120))
        tokenizer = AutoTokenizer.from_pretrained(plan.model_path)
        yield Engines(
            deployment.url, plan.served_model_name, plan.dtype, str(plan.model_path), tokenizer, http, clients
        )


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings of a small random model by the name of the default one, which loads in a third of the time.

    For tests of what happens around engines, whatever their tokens are.
    """
    from tests.engines.tiny_model import make_tiny_model_like

    config = load_config(CONFIG, {"model.dtype": "float32"}).config
    model = make_tiny_model_like(config, tmp_path_factory.mktemp("small-model"), config.model.max_model_len)
    return {"model.path": str(model), "model.served_model_name": config.model.path}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def deployment(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """The deployment, once per session and number format."""
    chosen = {"model.dtype": request.param, "server_args.tool_call_parser": "hermes"}
    async with deployed(chosen) as engines:
        yield engines


@pytest_asyncio.fixture(loop_scope="session")
async def engines(deployment: Any, figure: Callable[[str], None]) -> Any:
    """The deployment of the session, holding nothing.

    What another test has left is waited out and told, so that one failure does not become many.
    """
    left = await deployment.leftovers()
    if left and (left := await deployment.becomes_idle(LEASE_S + 5.0)):
        figure(f"before this test, and not by it, was held: {left}")
    return deployment


@pytest.fixture(scope="session")
def text(deployment: Any) -> list[int]:
    """Tokens of a whole book, to cut prompts from."""
    return book(deployment)


def book(engines: Any) -> list[int]:
    """The same, for tests with a deployment of their own."""
    token_ids: list[int] = engines.tokenizer(TEXT.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    return token_ids
