"""What the router needs to know. Built by `cluster.runtime.plan` from the one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts.rpc.tls import TlsFiles
from contracts.vocabulary import Pool
from router.client_identity import IpNetwork


@dataclass(frozen=True)
class PoolHardware:
    """The measured or published peaks of one worker of a pool."""

    name: str
    peak_flops: float
    peak_bytes_per_s: float


@dataclass(frozen=True)
class RouterSettings:
    """Limits, addresses, and how the model is presented."""

    model_path: str
    served_name: str
    dtype: str
    max_model_len_tokens: int
    host: str
    port: int
    mode: str
    request_deadline_s: float
    max_outstanding_requests: int
    overlap: bool
    """Whether decode may fetch the KV of a long prompt while its later chunks are prefilled."""
    min_remote_prefill_tokens: int
    prefill_window_tokens: Mapping[Pool, int]
    """Prompt tokens a worker of each pool is given at a time; further prompts wait in the router, in fair order."""
    max_prompt_wait_s: float
    """A prompt that would wait longer than this to be started is refused."""
    recovery_timeout_s: float
    """How long accepted requests wait for a pool that has lost all of its workers."""
    ready_deadline_s: float
    """How long the canary of /ready may take."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Of the arguments that the engines get, those that say what the model is."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's own for its HTTP front."""
    max_logprobs_per_request: int = 250_000
    """Log-probabilities that one answer may have."""
    max_client_share: float = 1.0
    """Of the requests and KV blocks that other clients leave, what one client may hold."""
    write_deadline_s: float = 30.0
    """A client that takes nothing of its answer for so long is not waited for."""
    max_unread_stream_bytes: int = 4 << 20
    """What may be kept of one stream that its client has not read."""
    max_unread_bytes: int = 256 << 20
    """And of all answers."""
    max_request_bytes: int = 8 << 20
    """Longest body of an HTTP request."""
    api_key_hashes: frozenset[bytes] = frozenset()
    """`client_identity.hash_key` of each key that is let in; none: everybody is."""
    admin_key_hashes: frozenset[bytes] = frozenset()
    """Of each key that opens the operator's paths; none: see `admin_access`."""
    trusted_proxies: tuple[IpNetwork, ...] = ()
    """Whose X-Forwarded-For is believed."""
    cors_allowed_origins: tuple[str, ...] = ()
    """Of web pages that may use the server from a browser."""
    stall_timeout_s: float = 60.0
    """An engine with work and without a step for so long is replaced; it gets no more for a part of that."""
    tls: TlsFiles | None = None
    """Between router and workers; None: plain text."""
