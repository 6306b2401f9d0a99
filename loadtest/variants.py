"""The variants of a comparison, and the ways to reach one."""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import httpx
import msgspec

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.plan import Mode
from ridgeline.loadtest.run.server import Servers
from ridgeline.loadtest.run.server_facts import ServerFacts

Serve = Callable[[Mode], AbstractAsyncContextManager[str]]
"""Starts a deployment in a mode, yields its base URL, and stops it."""
MODE_PATH = "/ridgeline/mode"
SWITCH_WITHIN_S = 90.0
"""More than a server takes for a change of mode while another one is under way: a minute with several routers."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A variant that is ready for a round."""

    server: str | Servers
    """Its base URL, or servers that get the requests in turn."""
    is_fresh: bool
    """Whether its server has only just started, so that every worker must be warmed up."""
    plan_changes: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the plan that differ for this variant, such as the endpoint."""
    processes: Collection[int] | None = None
    """Processes on this machine that serve it, with their descendants; None: those that this command started."""
    is_watched: bool = True
    """Whether other work on this machine can be told from its own."""


class Devices(msgspec.Struct, frozen=True):
    """The devices of one variant: cores on CPU, else GPUs."""

    unit: Literal["core", "GPU"]
    count: int
    per_worker: dict[str, int]
    """Devices of one worker, by pool."""


class Variant(Protocol):
    """One side of a comparison."""

    @property
    def mode(self) -> str:
        """Its name in tables and sentences."""

    @property
    def start_s(self) -> float:
        """Seconds that it takes to reach it after the other variant, if a server must be started; else 0."""

    @property
    def devices(self) -> Devices | None:
        """The cores or GPUs that it runs on; None if nobody said which."""

    @property
    def context_tokens(self) -> int | None:
        """The longest request that it serves, if that is known before it is reached."""

    @property
    def facts(self) -> ServerFacts:
        """The settings of its engines that must be equal in a comparison."""

    async def ready(self, why: str = "") -> Reached:
        """Make it ready to serve a round. Raises ServerError if it cannot be. `why` is shown on the server's page."""


class Deployments(AsyncExitStack):
    """One deployment at a time: a variant that has its turn stops the other variant's and starts its own.

    Two variants of the same mode are restarted too, so that an A/A run is treated as a comparison is.
    """

    def __init__(self, serve: Serve) -> None:
        super().__init__()
        self._serve = serve
        self._running: object = None
        self._base_url = ""
        self.is_unused = False
        """Whether the deployment that runs has served no round yet."""
        self.last_start_s = 0.0
        self.variants = 0
        """The number of variants that take turns."""

    def variant(
        self, mode: Mode, devices: Devices | None = None, facts: ServerFacts | None = None
    ) -> "RestartedVariant":
        """Return a variant that restarts the deployment in this mode."""
        self.variants += 1
        return RestartedVariant(mode, self, devices, facts or ServerFacts())

    async def start(self, variant: "RestartedVariant") -> str:
        """Run the variant's deployment and no other; return its base URL."""
        if self._running is not variant:
            await self.aclose()
            self._running = None
            began_s = time.monotonic()
            self._base_url = await self.enter_async_context(self._serve(variant.mode))
            self.last_start_s = time.monotonic() - began_s
            self._running, self.is_unused = variant, True
        return self._base_url


@dataclass(frozen=True, slots=True, eq=False)
class RestartedVariant:
    """A mode of a deployment that must be restarted to change it."""

    mode: Mode
    deployments: Deployments
    devices: Devices | None
    facts: ServerFacts
    context_tokens: int | None = None

    @property
    def start_s(self) -> float:
        """Seconds of the last start; 0 for the only variant, whose deployment runs until the end."""
        return self.deployments.last_start_s if self.deployments.variants > 1 else 0.0

    async def ready(self, why: str = "") -> Reached:
        """Restart the deployment in this mode, unless it is this variant's already; then it has served a round."""
        base_url = await self.deployments.start(self)
        is_fresh, self.deployments.is_unused = self.deployments.is_unused, False
        return Reached(base_url, is_fresh)


class _ModeAnswer(msgspec.Struct):
    mode: str
    modes: list[str] = []
    why_not: dict[str, str] = {}


@dataclass(slots=True)
class SwitchedVariant:
    """A mode of one running deployment, which is switched by its admin route without a restart."""

    base_url: str
    mode: Mode
    headers: dict[str, str] = field(default_factory=dict)
    """The headers that carry an admin key."""
    transport: httpx.AsyncBaseTransport | None = None
    start_s: float = 0.0
    devices: Devices | None = None
    facts: ServerFacts = field(default_factory=ServerFacts)
    context_tokens: int | None = None
    _was_ready: bool = False

    async def obstacle(self) -> str | None:
        """Say why the deployment cannot be switched to this mode; None if it can."""
        try:
            return self._why_not(await self._ask("GET"))
        except ServerError as error:
            return str(error)

    async def ready(self, why: str = "") -> Reached:
        """Switch the deployment to this mode. Raises ServerError if it cannot be switched or does not confirm it."""
        answer = await self._ask("GET")
        if why_not := self._why_not(answer):
            raise ServerError(f"this deployment cannot serve {self.mode}: {why_not}")
        if answer.mode != self.mode or why:
            answer = await self._ask("POST", {"mode": self.mode} | ({"why": why} if why else {}))
        if answer.mode != self.mode:
            raise ServerError(f"{self.base_url} was asked for {self.mode} and says that it serves {answer.mode}")
        is_fresh, self._was_ready = not self._was_ready, True
        return Reached(self.base_url, is_fresh)

    def _why_not(self, answer: _ModeAnswer) -> str | None:
        return None if self.mode in answer.modes else answer.why_not.get(self.mode, "it names no reason")

    async def _ask(self, method: str, body: dict[str, str] | None = None) -> _ModeAnswer:
        client = httpx.AsyncClient(
            headers=self.headers, timeout=SWITCH_WITHIN_S, transport=self.transport, trust_env=False
        )
        try:
            async with client:
                response = await client.request(method, self.base_url + MODE_PATH, json=body)
            return msgspec.json.decode(response.raise_for_status().content, type=_ModeAnswer)
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"{self.base_url} cannot be switched to {self.mode}: {error!r}") from error
