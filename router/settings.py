"""The router's configuration: the sections `server` and `router` of the file, and what the plan adds to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from pydantic import AfterValidator, Field, IPvAnyNetwork, PlainValidator, model_validator

from ridgeline.contracts.rpc.tls import TlsFiles
from ridgeline.contracts.section import MIB, Bytes, Resources, Section
from ridgeline.contracts.vocabulary import Mode, Pool, RebalanceMode
from ridgeline.contracts.workers import Role
from ridgeline.router.scheduler.policies import ADAPTIVE, make_policy

SHORTEST_LIMIT_MS = 0.1
LONGEST_LIMIT_MS = 3_600_000.0
"""The bounds of a client's limits of TTFT and TPOT, and of `router.slo`: no model makes 10,000 tokens a second for one
reader, and what is beyond an hour limits nothing."""
MOST_ROUTERS = 64


def _auto_or_routers(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_ROUTERS:
        return value
    raise ValueError(f"it should be auto or a number from 1 to {MOST_ROUTERS}")


def without_port(text: str) -> str:
    """Check that a setting is a host alone. Raises ValueError."""
    if text.startswith("["):
        raise ValueError("is a host without a port: write an IPv6 address without brackets")
    return text


def _proxy_network(network: IPvAnyNetwork) -> IPvAnyNetwork:
    if network.prefixlen == 0:
        raise ValueError("names every address there is, so that any client could call itself as it likes")
    if isinstance(network.network_address, IPv6Address) and network.network_address.ipv4_mapped:
        raise ValueError("is IPv4 written as IPv6: write the IPv4 address or network")
    return network


def _origin(text: str) -> str:
    """Normalise an origin as a browser sends it: scheme, host and perhaps a port, in lower case."""
    parts = urlsplit(text)
    written = parts.scheme and parts.netloc and "@" not in parts.netloc
    if text != "*" and not (written and text == f"{parts.scheme}://{parts.netloc}".lower()):
        raise ValueError("is not an origin: write it as https://chat.example or http://127.0.0.1:3000")
    return text


def _collector(text: str) -> str:
    """Check the URL of a collector. Raises ValueError."""
    parts, is_url = urlsplit(text), True
    try:
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port
        is_url = False
    if not is_url or parts.query or parts.fragment:
        raise ValueError("is not the URL of a collector: write it as http://collector:4318")
    return text


class TracingConfig(Section):
    """OpenTelemetry traces, one per request; its client's `traceparent` header is their parent."""

    endpoint: Annotated[str, AfterValidator(_collector)] | None = Field(
        default=None,
        description="collector that speaks OTLP over HTTP, for example http://collector:4318; spans go to "
        "/v1/traces there; null: no traces",
    )
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="part of the requests without a `traceparent` that are traced; others as their client's flag says",
    )

    @property
    def traces_url(self) -> str:
        """Where spans go."""
        return f"{(self.endpoint or '').rstrip('/').removesuffix('/v1/traces')}/v1/traces"


class ServerConfig(Section):
    """Where clients connect."""

    host: Annotated[str, AfterValidator(without_port)] = Field(
        default="127.0.0.1", min_length=1, description="address the HTTP server listens on"
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port the HTTP server listens on; 0 picks a free one")
    drain_timeout_s: float = Field(
        default=30.0, ge=0, description="how long running requests may go on after Ctrl-C or `ridgeline stop`"
    )
    max_request_bytes: Bytes = Field(
        default=8 * MIB, ge=1024, description="longest request body; longer ones get HTTP 413"
    )
    max_grammar_bytes: Bytes = Field(
        default=64 * 1024,
        ge=1024,
        description="largest structured output (schema, choices, regex, grammar) of a request, and 8 times that "
        "for tools; larger ones get HTTP 400",
    )
    trusted_proxies: tuple[Annotated[IPvAnyNetwork, AfterValidator(_proxy_network)], ...] = Field(
        default=(),
        description="addresses or networks (10.0.0.0/24) of proxies whose X-Forwarded-For names the client; the "
        "header of other peers is ignored",
    )
    send_timeout_s: float = Field(
        default=30.0, gt=0, description="a client that reads nothing of its response for this long is disconnected"
    )
    max_send_buffer_bytes: Bytes = Field(
        default=256 * MIB,
        ge=MIB,
        description="send buffers of all streams together; above it clients furthest behind are disconnected",
    )
    cors_allowed_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = Field(
        default=(),
        description="origins (https://chat.example:8443, or *) of web pages that may call the server from a "
        "browser; operators' paths stay closed to them",
    )


class SloConfig(Section):
    """How soon tokens are wanted by requests that do not say it. Mode adaptive reads this; other modes accept it."""

    ttft_ms: float | None = Field(
        default=None,
        ge=SHORTEST_LIMIT_MS,
        le=LONGEST_LIMIT_MS,
        description="TTFT SLO of requests without the header x-ridgeline-ttft-ms; null: none",
    )
    tpot_ms: float | None = Field(
        default=None,
        ge=SHORTEST_LIMIT_MS,
        le=LONGEST_LIMIT_MS,
        description="TPOT SLO of requests without the header x-ridgeline-tpot-ms; null: none",
    )

    @property
    def ttft_limit_s(self) -> float | None:
        """Seconds to the first token; None: no limit."""
        return None if self.ttft_ms is None else self.ttft_ms / 1e3

    @property
    def tpot_limit_s(self) -> float | None:
        """Mean seconds from one token to the next; None: no limit."""
        return None if self.tpot_ms is None else self.tpot_ms / 1e3


class PolicyConfig(Section):
    """How mode adaptive chooses the workers of a request."""

    name: str = Field(
        default=ADAPTIVE,
        description="mode adaptive: adaptive serves as the policy that simulation finds best; colocated, "
        "disaggregated, threshold, slack or an installed one (entry point ridgeline.policies) serves always",
    )
    options: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="keyword arguments of the policy, for example split_above_tokens and prefill_part of threshold",
    )

    @model_validator(mode="after")
    def _can_be_made(self) -> PolicyConfig:
        if self.name != ADAPTIVE:
            make_policy(self.name, self.options)
        elif self.options:
            raise ValueError(f"policy {ADAPTIVE} has no options: remove {', '.join(self.options)}")
        return self


class RouterConfig(Section):
    """What the router accepts and how it splits requests."""

    processes: Annotated[int | Literal["auto"], PlainValidator(_auto_or_routers)] = Field(
        default="auto",
        description="router processes; several share one port on a node and one scheduler, which keeps limits and "
        "fairness over all of them; auto: one on CPUs, two per decoding GPU engine as far as free "
        "cores allow",
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="longest life of one request")
    resources: Resources = Field(
        default_factory=dict,
        description="custom Ray resources, to bind the routers to a node type; they take these once, all together",
    )
    max_concurrent_requests: int = Field(
        default=512, ge=1, description="accepted requests at a time; more get HTTP 429"
    )
    max_logprobs_per_request: int = Field(
        default=250_000,
        ge=0,
        description="most log-probabilities in one response, prompt log-probabilities included (in a stream only "
        "those); more get HTTP 400, since encoding this many stops all streams for 0.2 s",
    )
    max_client_share: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="what one client (API key, else address) may hold of the requests and KV blocks that others leave",
    )
    max_queue_time_s: float = Field(
        default=30.0, gt=0, description="longest predicted wait until prefill starts; requests above it get HTTP 429"
    )
    prefill_window_tokens: int | None = Field(
        default=None,
        ge=1,
        description="most prompt tokens queued at one worker, the others wait in the router; null: two steps (2 x "
        "max_num_batched_tokens), which is also the minimum",
    )
    recovery_timeout_s: float = Field(
        default=60.0, ge=0, description="how long accepted requests wait for a pool that has lost all of its workers"
    )
    ready_deadline_s: float = Field(
        default=10.0, gt=0, description="how long the two tokens of the health probe of GET /ready may take"
    )
    min_remote_prefill_tokens: int = Field(
        default=0, ge=0, description="shorter prompts are prefilled on the decode worker; metrics count them"
    )
    slo: SloConfig = SloConfig()
    prefix_routing: bool = Field(
        default=True,
        description="count the prompt tokens that each worker is expected to have in its prefix cache; false: assume "
        "empty caches",
    )
    policy: PolicyConfig = PolicyConfig()
    tracing: TracingConfig = TracingConfig()
    rebalance: RebalanceMode = Field(
        default="act",
        description="mode adaptive: act serves by any policy, also those that keep workers for one phase; none: every "
        "worker does both phases; advise: the same, and logs when another policy would serve better",
    )


@dataclass(frozen=True)
class PoolHardware:
    """The peak figures of one worker of a pool, measured or published."""

    name: str
    peak_flops: float
    peak_bytes_per_s: float
    source: str
    """The data sheet, or the day and the operations with which they were measured."""


class RouterStart(msgspec.Struct, frozen=True, array_like=True):
    """Which of several routers this is, and which of its processes, which follow each other."""

    name: str = "router"
    number: int = 1
    deployment: str = ""
    """The same for all routers of a deployment, and for no other one."""

    def __str__(self) -> str:
        """Return it for logs."""
        return f"{self.name} (start {self.number})"


@dataclass(frozen=True)
class SharedWith:
    """What one of several routers must know of the others when it begins to serve."""

    dispatcher: str
    """host:port of the dispatcher."""
    port: int
    """The HTTP port of all routers."""
    joins_port: bool
    """Whether another router has the port already, which those of one node share."""


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Limits, addresses, and how the model is presented to clients."""

    router: RouterConfig
    server: ServerConfig
    name: str = "ridgeline"
    """The deployment's."""
    model_path: str
    served_names: tuple[str, ...]
    dtype: str
    max_model_len: int
    mode: Mode
    overlap: bool
    """Whether decode may admit a prompt, and fetch its KV, while it is computed."""
    reuse_decode_kv: bool
    """Whether prefill may fetch what decode workers have cached of a prompt."""
    prefill_window_tokens: Mapping[Pool, int]
    """Prompt tokens that a worker of each pool gets at a time; further prompts wait in the router, in fair order."""
    roles: Mapping[Mode, Mapping[str, Role]] = field(default_factory=dict)
    """Each worker's role by mode and worker id, for every mode that the deployment may change to; see `RoleTable`."""
    roles_of_new: Mapping[Mode, Mapping[Pool, Role]] = field(default_factory=dict)
    """By mode, the role of a worker that comes later, by the pool for which it is started."""
    why_not: Mapping[Mode, str] = field(default_factory=dict)
    """For every other mode, why not."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Those of the engines' arguments that say what the model is."""
    lora_modules: Sequence[Mapping[str, str]] = ()
    """Name and path of each LoRA adapter that is served from the start."""
    speculates: bool = False
    """Whether some engines draft tokens, and so refuse what cannot be had with drafts."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's own arguments for its HTTP front."""
    api_key_hashes: Set[bytes] = frozenset()
    """`client_identity.hash_key` of each client's key; if empty, everybody may call."""
    admin_key_hashes: Set[bytes] = frozenset()
    """Hashes of the keys that open the operator's paths; if empty, see `admin_access`."""
    metrics_key_hashes: Set[bytes] = frozenset()
    """Hashes of the keys that open /metrics, as operators' keys do; if empty, it is open to all."""
    stall_timeout_s: float
    """An engine with work and without a step for this long is replaced; it gets no new work after a third of it."""
    routers: int = 1
    """Routers of the deployment; several share a dispatcher."""
    start: RouterStart = field(default_factory=RouterStart)
    """Which of them this is."""
    tls: TlsFiles | None = None
    """The certificates for connections between router and workers; None: plain text."""
