"""The router's configuration, built from the deployment's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ridgeline.contracts.rpc.tls import TlsFiles
from ridgeline.contracts.vocabulary import Mode, Pool, RebalanceMode
from ridgeline.contracts.workers import Role
from ridgeline.router.client_identity import IpNetwork

SHORTEST_LIMIT_MS = 0.1
LONGEST_LIMIT_MS = 3_600_000.0
"""The bounds of a client's limits of TTFT and TPOT, and of `router.slo`: no model makes 10,000 tokens a second for one
reader, and what is beyond an hour limits nothing."""


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
    """Limits, addresses, and how the model is presented to clients. Defaults are those of `cluster.config.models`."""

    model_path: str
    served_name: str
    dtype: str
    max_model_len_tokens: int
    host: str
    port: int
    mode: Mode
    request_deadline_s: float
    max_outstanding_requests: int
    overlap: bool
    """Whether decode may admit a prompt, and fetch its KV, while it is computed."""
    min_remote_prefill_tokens: int
    prefill_window_tokens: Mapping[Pool, int]
    """Prompt tokens that a worker of each pool gets at a time; further prompts wait in the router, in fair order."""
    max_prompt_wait_s: float
    """A prompt that would wait longer than this to start is refused."""
    recovery_timeout_s: float
    """Time that accepted requests wait for a pool that has lost all its workers."""
    ready_deadline_s: float
    """Time that the probe of /ready may take."""
    roles: Mapping[Mode, Mapping[str, Role]] = field(default_factory=dict)
    """Each worker's role by mode and worker id, for every mode that the deployment may change to; see `RoleTable`."""
    roles_of_new: Mapping[Mode, Mapping[Pool, Role]] = field(default_factory=dict)
    """By mode, the role of a worker that comes later, by the pool for which it is started."""
    why_not: Mapping[Mode, str] = field(default_factory=dict)
    """For every other mode, why not."""
    block_size_tokens: int
    """Tokens in one KV block, by which prefixes are compared."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Those of the engines' arguments that say what the model is."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's own arguments for its HTTP front."""
    max_logprobs_per_request: int
    """Largest number of log-probabilities in one answer."""
    max_client_share: float
    """The fraction that one client may hold of the requests and KV blocks that other clients leave."""
    send_timeout_s: float
    """A connection whose client takes nothing of its answer for this long is closed."""
    max_stream_buffer_bytes: int
    """Bytes of one stream that may be kept until its client reads them."""
    max_send_buffer_bytes: int
    """Bytes of all answers together that may be kept until their clients read them."""
    max_grammar_bytes: int
    """Largest structured output that a request may ask for."""
    max_request_bytes: int
    """Largest body of an HTTP request."""
    api_key_hashes: frozenset[bytes] = frozenset()
    """`client_identity.hash_key` of each client's key; if empty, everybody may call."""
    admin_key_hashes: frozenset[bytes] = frozenset()
    """Hashes of the keys that open the operator's paths; if empty, see `admin_access`."""
    metrics_key_hashes: frozenset[bytes] = frozenset()
    """Hashes of the keys that open /metrics, as operators' keys do; if empty, it is open to all."""
    trusted_proxies: tuple[IpNetwork, ...] = ()
    """Proxies whose X-Forwarded-For is believed."""
    cors_allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server from a browser."""
    stall_timeout_s: float
    """An engine with work and without a step for this long is replaced; it gets no new work after a third of it."""
    ttft_limit_s: float | None = None
    """Limit of the time to the first token for requests that give none of their own."""
    tpot_limit_s: float | None = None
    """The same for the mean time from one token to the next."""
    rebalance: RebalanceMode
    """Whether workers of mode adaptive come to favour a phase, see `ridgeline.router.fleet.rebalance`."""
    prefix_routing: bool
    """Whether mode adaptive counts what each worker has of a prompt."""
    routers: int = 1
    """Routers of the deployment; several share a dispatcher."""
    start: RouterStart = field(default_factory=RouterStart)
    """Which of them this is."""
    tls: TlsFiles | None = None
    """The certificates for connections between router and workers; None: plain text."""
