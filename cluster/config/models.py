"""The shape of a Ridgeline configuration: every setting, its unit, its default and what it means.

Why: one typed, frozen object travels from the command line to every actor, so no part reads files or environment
variables of its own. `cluster.config.loader` fills it from YAML and flags.
"""

from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, IPvAnyNetwork, PlainValidator, TypeAdapter

from cluster.config.autoscale import AutoscaleConfig
from cluster.config.section import Section
from cluster.node_address import network_of
from contracts.rpc.tls import TlsFiles
from contracts.vocabulary import Mode, Pool, RebalanceMode
from engine import passed_args
from kv_transfer.names import AUTO, LONGEST_FETCH_DEADLINE_S, MAX_GROUPS, SettableTransport, WireDtype
from router.settings import LONGEST_LIMIT_MS, SHORTEST_LIMIT_MS

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

GIB = 1024**3
MIB = 1024**2
CPU_BLOCK_MULTIPLE_TOKENS = 32
RAY_SMALLEST_OBJECT_STORE_BYTES = 75 * MIB
PLACEMENT_TIMEOUT_S = 120.0
JOINED_PLACEMENT_TIMEOUT_S = 1800.0
"""Half an hour, since a node that the autoscaler launches takes ten minutes or more to boot and install."""
MOST_ROUTERS = 64
GPU_SHARERS = 2
"""Workers on one GPU with `ray.share_gpus`."""
WINDOW_STEPS = 2
"""Engine steps' worth of prompts that a worker has at a time: one runs, and the next must not wait for the router."""

_byte_size: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


def _parse_bytes(value: Any) -> Any:
    return int(_byte_size.validate_python(value)) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
"""A number of bytes; text such as `1 GiB` or `500 MB` is accepted too."""


def _auto_or_routers(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_ROUTERS:
        return value
    raise ValueError(f"it should be auto or a number from 1 to {MOST_ROUTERS}")


def _host(text: str) -> str:
    if text.startswith("["):
        raise ValueError("is a host without a port: write an IPv6 address without brackets")
    return text


def _host_or_network(text: str) -> str:
    try:
        network_of(text)
    except ValueError as error:
        raise ValueError(f"is not a network: {error}") from error
    return _host(text)


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


class ModelConfig(Section):
    """Which model every worker loads, and the limits they share."""

    path: str = Field(
        default="smollm2-135m", min_length=1, description="directory, hub name, or the default model's name"
    )
    served_name: str | None = Field(default=None, description="name clients use in requests; null: the same as path")
    dtype: Dtype = Field(
        default="auto",
        description="number format of weights and KV cache; auto: what a CPU does fast, on GPUs the checkpoint's own",
    )
    max_model_len_tokens: int = Field(default=4096, ge=2, description="longest prompt plus output of one request")
    block_size_tokens: int = Field(default=32, ge=1, description="tokens in one KV block, the unit of transfer")
    enforce_eager: bool | None = Field(default=None, description="skip compilation; null: yes on CPU, no on GPU")


class ServerConfig(Section):
    """Where clients connect."""

    host: Annotated[str, AfterValidator(_host)] = Field(
        default="127.0.0.1", min_length=1, description="address the HTTP server listens on"
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port the HTTP server listens on; 0 picks a free one")
    drain_timeout_s: float = Field(
        default=30.0, ge=0, description="after Ctrl-C, how long running requests may still take"
    )
    max_request_bytes: Bytes = Field(
        default=8 * MIB, ge=1024, description="longest request body; a longer one gets HTTP 413"
    )
    max_grammar_bytes: Bytes = Field(
        default=64 * 1024,
        ge=1024,
        description="largest structured output (schema, choices, regex, grammar) of a request, and 8 times that for "
        "tools; a larger one gets HTTP 400",
    )
    trusted_proxies: tuple[Annotated[IPvAnyNetwork, AfterValidator(_proxy_network)], ...] = Field(
        default=(),
        description="addresses or networks (10.0.0.0/24) of proxies whose X-Forwarded-For says who the client is; of "
        "any other peer the header is ignored",
    )
    write_deadline_s: float = Field(
        default=30.0, gt=0, description="a client that takes nothing of its answer for so long is disconnected"
    )
    max_unread_stream_bytes: Bytes = Field(
        default=4 * MIB, ge=64 * 1024, description="a stream whose client is so far behind ends with an error"
    )
    max_unread_bytes: Bytes = Field(
        default=256 * MIB,
        ge=MIB,
        description="kept in memory of answers that clients have not read; above it the largest end",
    )
    cors_allowed_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = Field(
        default=(),
        description="origins (https://chat.example:8443, or *) of web pages that may use the server from a browser; "
        "never the paths of operators",
    )


class RayConfig(Section):
    """Which Ray cluster places the workers."""

    address: str | None = Field(default=None, description="an existing cluster (auto, host:port); null: start one here")
    object_store_bytes: Bytes = Field(
        default=100 * MIB,
        ge=RAY_SMALLEST_OBJECT_STORE_BYTES,
        description="Ray's shared memory when started here; small, since no tokens or KV bytes go through it",
    )
    placement_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="how long Ray may look for a place for each worker; null: 120, and 1800 on a cluster that is "
        "joined, whose nodes may only be starting",
    )
    rack_label: str = Field(
        default="rack",
        min_length=1,
        description="the label of a node (`ray start --labels rack=r7`) that tells its rack: decode workers in the "
        "prefill worker's rack are preferred to farther ones",
    )
    share_cores: bool = Field(
        default=False,
        description="workers may share cores; for tests of faults on a small machine, timings then mean nothing",
    )
    share_gpus: bool = Field(
        default=False,
        description="two workers share a GPU, each with half of its memory at most; for a first try where there is one "
        "GPU, timings then mean nothing",
    )

    @property
    def patience_s(self) -> float:
        """Seconds after which the wait for Ray to place a worker is given up."""
        default_s = PLACEMENT_TIMEOUT_S if self.address is None else JOINED_PLACEMENT_TIMEOUT_S
        return default_s if self.placement_timeout_s is None else self.placement_timeout_s


class PoolConfig(Section):
    """One pool of identical workers, each with one engine. With GPUs other defaults apply: see `gpu_defaults`."""

    workers: int = Field(ge=1, description="engines in this pool")
    cores_per_worker: int = Field(default=1, ge=1, description="CPU cores each engine is pinned to")
    gpus_per_worker: int = Field(default=0, ge=0, description="GPUs of each engine, all in one node")
    tensor_parallel: int | None = Field(
        default=None,
        ge=1,
        description="ranks each engine is split over; null: one for each of its GPUs, and on CPU not split",
    )
    max_num_seqs: int = Field(
        ge=1,
        description="sequences one engine runs at a time; one client alone has seven eighths of those that decode",
    )
    max_num_batched_tokens: int = Field(ge=1, description="tokens one engine step computes; longer prompts are chunked")
    step_target_ms: float = Field(
        default=0.0,
        ge=0.0,
        description="while sequences decode, a step computes only as many prompt tokens as fit this time, by what "
        "the engine has learned from its own steps: streams keep their pace and prompts take longer; 0: no target",
    )
    kv_cache_bytes: Bytes | None = Field(
        default=GIB,
        ge=MIB,
        description="KV cache of each engine, over all its ranks; null: what is left on the GPU (not on CPU), "
        "the default where a pool has GPUs",
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="custom Ray resources each worker takes, to bind a pool to a node type"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="arguments of vLLM's engine for this pool alone, over those of engine_args"
    )

    @property
    def ranks(self) -> int:
        """Tensor parallel ranks of each engine: one per GPU, or as configured on CPU."""
        return self.tensor_parallel or max(1, self.gpus_per_worker)


class PoolsConfig(Section):
    """The pools: `prefill` and `decode` in mode disaggregated, the others in the mode of their name."""

    prefill: PoolConfig = PoolConfig(workers=1, max_num_seqs=32, max_num_batched_tokens=512)
    decode: PoolConfig = PoolConfig(workers=1, max_num_seqs=80, max_num_batched_tokens=512)
    colocated: PoolConfig = PoolConfig(workers=2, max_num_seqs=72, max_num_batched_tokens=2048)
    adaptive: PoolConfig | None = Field(
        default=None,
        description="null: prefill's settings, with the workers of prefill and decode together, and decode's "
        "max_num_seqs if that is more",
    )

    def for_adaptive(self) -> PoolConfig:
        """Return the settings of the workers in mode adaptive, where each does what is asked of it."""
        if self.adaptive is not None:
            return self.adaptive
        return self.prefill.model_copy(
            update={
                "workers": self.prefill.workers + self.decode.workers,
                "step_target_ms": 0.0,
                "max_num_seqs": max(self.prefill.max_num_seqs, self.decode.max_num_seqs),
                "max_num_batched_tokens": max(self.prefill.max_num_batched_tokens, self.decode.max_num_seqs),
            }
        )


class TransferConfig(Section):
    """How KV blocks get from a prefill worker to a decode worker."""

    lease_s: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="how long unfetched KV blocks stay pinned without a heartbeat; there are six heartbeats in it",
    )
    fetch_deadline_s: float = Field(
        default=30.0,
        gt=0,
        le=LONGEST_FETCH_DEADLINE_S,
        description="how long one fetch may take before the prompt is recomputed; a source refuses longer ones",
    )
    transport: SettableTransport = Field(
        default="auto",
        description="what carries the bytes: shm (one host), cuda-ipc (GPUs of one host), grpc, collective (nccl or "
        "gloo), nixl (UCX; a package of its own); auto: cuda-ipc on one GPU, shm on CPUs of one host, else grpc",
    )
    wire_dtype: WireDtype = Field(
        default="none",
        description="rounds KV to one byte an element on the wire, with a scale for each head of a block; pairs that "
        "use shm or cuda-ipc (with auto: those on one host's CPUs, or on one GPU) copy it as it is",
    )
    faults: str | None = Field(
        default=None, description="for tests: makes fetches fail on purpose, as in seed=7,drop=0.02,corrupt=0.05"
    )
    overlap: bool = Field(
        default=True,
        description="admit a prompt to decode when its prefill begins, and fetch a long one's KV chunk by chunk",
    )
    host: Annotated[str, AfterValidator(_host_or_network)] | None = Field(
        default=None,
        description="where workers reach each other: a network (10.0.0.0/16) or an interface (eth1), in which each "
        "node has an address of its own, or for one node an address; null: the Ray node's address",
    )


class SloConfig(Section):
    """How soon tokens are wanted by requests that do not say it. Mode adaptive reads this; other modes accept it."""

    ttft_ms: float | None = Field(
        default=None,
        ge=SHORTEST_LIMIT_MS,
        le=LONGEST_LIMIT_MS,
        description="time to the first token that a request without x-ridgeline-ttft-ms wants at most; null: no limit",
    )
    tpot_ms: float | None = Field(
        default=None,
        ge=SHORTEST_LIMIT_MS,
        le=LONGEST_LIMIT_MS,
        description="mean time from one token to the next that a request without x-ridgeline-tpot-ms wants at most; "
        "null: no limit",
    )

    @property
    def ttft_limit_s(self) -> float | None:
        """Seconds to the first token; None: no limit."""
        return None if self.ttft_ms is None else self.ttft_ms / 1e3

    @property
    def tpot_limit_s(self) -> float | None:
        """Mean seconds from one token to the next; None: no limit."""
        return None if self.tpot_ms is None else self.tpot_ms / 1e3


class RouterConfig(Section):
    """What the router accepts and how it splits requests."""

    processes: Annotated[int | Literal["auto"], PlainValidator(_auto_or_routers)] = Field(
        default="auto",
        description="routers, each in a process of its own; several share the port on a node, and one dispatcher, "
        "which keeps limits and fairness right for all of them together; auto: one on CPUs; two for each "
        "engine that decodes on GPUs, as far as this machine has cores that no engine takes",
    )
    request_deadline_s: float = Field(default=600.0, gt=0, description="longest life of one request")
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="custom Ray resources the router takes, to bind it to a node type"
    )
    max_outstanding_requests: int = Field(
        default=512, ge=1, description="requests accepted at a time; more get HTTP 429"
    )
    max_logprobs_per_request: int = Field(
        default=250_000,
        ge=0,
        description="log-probabilities one answer may have, those of the prompt included, in a stream those only; more "
        "gets HTTP 400: while a whole answer is written as JSON all streams wait (0.2 s for so many)",
    )
    max_client_share: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="what one client (API key, else address) may hold of the requests and KV blocks that others leave",
    )
    max_prompt_wait_s: float = Field(
        default=30.0, gt=0, description="a prompt that would wait longer than this to be started gets HTTP 429"
    )
    prefill_window_tokens: int | None = Field(
        default=None,
        ge=1,
        description="prompt tokens a worker has at a time, others wait in the router; null: two steps of its pool "
        "(max_num_batched_tokens); less is refused, since engines would wait for the router",
    )
    recovery_timeout_s: float = Field(
        default=60.0, ge=0, description="how long accepted requests wait for a pool that has lost all of its workers"
    )
    ready_deadline_s: float = Field(
        default=10.0, gt=0, description="how long the two canary tokens of GET /ready may take"
    )
    min_remote_prefill_tokens: int = Field(
        default=0, ge=0, description="prompts shorter than this are prefilled on the decode worker, and counted"
    )
    slo: SloConfig = SloConfig()
    prefix_routing: bool = Field(
        default=True,
        description="mode adaptive counts what each worker is expected to have of a prompt in its prefix cache; false: "
        "it chooses as if caches were empty, which they are not",
    )
    rebalance: RebalanceMode = Field(
        default="act",
        description="act: in mode adaptive, some workers are kept for prompts and the others for answers when that "
        "holds more requests within limits, or shortens them where there are none; advise: only say so; none: every "
        "worker always does both",
    )


class SupervisionConfig(Section):
    """When a worker counts as lost, and how often it is started again."""

    max_restarts: int = Field(
        default=5,
        ge=0,
        description="restarts of one worker within window_s; beyond that, back-off doubles from 30 s to at most 5 "
        "minutes",
    )
    window_s: float = Field(
        default=300.0, gt=0, description="the time of service, starts not included, in which max_restarts are counted"
    )
    start_timeout_s: float = Field(
        default=900.0, ge=10, description="how long a worker may load its engine, a model's download included"
    )
    stall_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="an engine with work but no step for this long is replaced; after a third of it, it gets no new "
        "work. One that is stopped, or does nothing on CPU, is replaced after 3 of its longest steps (at least 5 s). "
        "One that computes, or is on a GPU, is replaced after 3 of the longest step so far or foretold (at least a "
        "third of this); a step of a kind or size that it hardly knows may take all of this",
    )
    unreachable_timeout_s: float = Field(
        default=30.0,
        ge=10,
        description="a worker that most routers have not reached for this long is replaced, one worker at a time; at "
        "least 10 s, since a broken connection takes seconds to come back",
    )


class TlsConfig(Section):
    """Mutual TLS between router and workers: PEM files, at the same paths on every node. All three, or none."""

    ca_file: str | None = Field(default=None, min_length=1, description="the authority whose certificates are trusted")
    cert_file: str | None = Field(
        default=None, min_length=1, description="certificate of this deployment, signed by it, for DNS:ridgeline"
    )
    key_file: str | None = Field(default=None, min_length=1, description="the certificate's private key")

    def files(self) -> TlsFiles | None:
        """Return the three paths, or None if TLS is off. `conflicts` reports if only some of them are set."""
        if self.ca_file and self.cert_file and self.key_file:
            return TlsFiles(self.ca_file, self.cert_file, self.key_file)
        return None


class SecurityConfig(Section):
    """Who may use the server, and how router and workers authenticate each other."""

    api_keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="file of API keys, one a line, # begins a comment; read where `ridgeline serve` runs; the "
        "environment variable RIDGELINE_API_KEYS (comma separated) adds to it; null and no variable: open to all",
    )
    admin_keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="file of keys for `ridgeline drain` and the other paths of operators, which no client's key opens; "
        "null: from this machine only, and closed if clients have keys or come through proxies",
    )
    metrics_keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="file of keys for /metrics, for Prometheus alone; keys of admin_keys_file open it too; null: open "
        "to all, as most scrapers expect",
    )
    tls: TlsConfig = TlsConfig()


class RidgelineConfig(Section):
    """The whole configuration. `load_config` builds it and also checks it across sections."""

    name: str = Field(
        default="ridgeline",
        pattern=r"^[a-z0-9][a-z0-9-]{0,39}$",
        description="what `ridgeline status`, `stop` and `logs` call this deployment: small letters, digits and "
        "hyphens; two that run on one machine need two names",
    )
    mode: Mode = Field(
        default="disaggregated",
        description="two pools, or whole replicas behind the same router, or adaptive: workers that do either, by "
        "what a prediction says for each request",
    )
    fixed_mode: bool = Field(
        default=False,
        description="the mode stays as it is: engines start with the limits of their own pool alone, instead of with "
        "those of all modes, between which `ridgeline mode` changes while they serve",
    )
    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    ray: RayConfig = RayConfig()
    pools: PoolsConfig = PoolsConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    security: SecurityConfig = SecurityConfig()
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's own arguments for all engines, and for the router as far as they say what the model is: "
        "gpu_memory_utilization, max_logprobs, revision ...; what would break the split is refused by name",
    )
    server_args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's own arguments for its HTTP front: tool_call_parser, chat_template ...",
    )

    def active_pools(self) -> dict[Pool, PoolConfig]:
        """Return the pools that run in this mode, in the order in which they are placed."""
        if self.mode == "colocated":
            return {"colocated": self.pools.colocated}
        if self.mode == "adaptive":
            return {"adaptive": self.pools.for_adaptive()}
        return {"prefill": self.pools.prefill, "decode": self.pools.decode}

    def section_of(self, pool: Pool) -> str:
        """Return where a pool's settings are written: adaptive may have none of its own."""
        return "pools.prefill" if pool == "adaptive" and self.pools.adaptive is None else f"pools.{pool}"

    def all_pools(self) -> dict[Pool, PoolConfig]:
        """Return every pool, whatever the mode: `compare` runs all modes from one configuration."""
        return {
            "prefill": self.pools.prefill,
            "decode": self.pools.decode,
            "colocated": self.pools.colocated,
            "adaptive": self.pools.for_adaptive(),
        }

    def args_of(self, pool: Pool) -> dict[str, Any]:
        """Return the arguments for vLLM's engine in this pool."""
        return {**self.engine_args, **self.all_pools()[pool].engine_args}

    def gpus_of(self, pool: PoolConfig) -> float:
        """Return the GPUs that each worker of a pool takes."""
        return pool.gpus_per_worker / (GPU_SHARERS if self.ray.share_gpus else 1)

    def window_tokens(self, pool: Pool) -> int:
        """Return how many prompt tokens a worker of this pool has at a time."""
        return self.router.prefill_window_tokens or WINDOW_STEPS * self.all_pools()[pool].max_num_batched_tokens

    def uses_gpus(self) -> bool:
        """Return whether the workers of this mode run on GPUs."""
        return any(pool.gpus_per_worker > 0 for pool in self.active_pools().values())


def conflicts(config: RidgelineConfig) -> list[str]:
    """Find settings that are valid one by one and impossible together; one sentence each, naming the fix.

    Only settings that this mode uses are checked: `compare`, which runs both, asks for both.
    """
    return [
        *(
            sentence
            for name, pool in config.active_pools().items()
            for sentence in _pool_conflicts(config.section_of(name), pool)
        ),
        *_model_conflicts(config),
        *(_shared_gpu_conflicts(config) if config.ray.share_gpus else ()),
        *_router_conflicts(config),
        *(_transfer_conflicts(config) if config.mode != "colocated" else ()),
        *_security_conflicts(config),
        *_passed_conflicts(config),
    ]


def _pool_conflicts(section: str, pool: PoolConfig) -> list[str]:
    found = []
    if pool.max_num_batched_tokens < pool.max_num_seqs:
        found.append(
            f"{section}.max_num_batched_tokens ({pool.max_num_batched_tokens}) cannot give every one of "
            f"max_num_seqs ({pool.max_num_seqs}) a token per step: raise it to at least {pool.max_num_seqs}."
        )
    if pool.gpus_per_worker == 0 and pool.kv_cache_bytes is None:
        found.append(
            f"{section}.kv_cache_bytes must be set on CPU, where null makes each engine claim nearly all memory: "
            "set it, for instance to 1 GiB."
        )
    return [*found, *_rank_conflicts(section, pool)]


def _rank_conflicts(section: str, pool: PoolConfig) -> list[str]:
    if pool.gpus_per_worker:
        if pool.ranks == pool.gpus_per_worker:
            return []
        return [
            f"{section}.tensor_parallel ({pool.ranks}) must be gpus_per_worker ({pool.gpus_per_worker}), one rank "
            "for each GPU: leave tensor_parallel out, or set both alike."
        ]
    if pool.cores_per_worker % pool.ranks == 0:
        return []
    return [
        f"{section}.cores_per_worker ({pool.cores_per_worker}) cannot be shared evenly by the ranks of "
        f"{section}.tensor_parallel ({pool.ranks}): set cores_per_worker to "
        f"{_round_up(pool.cores_per_worker, pool.ranks)}."
    ]


def _model_conflicts(config: RidgelineConfig) -> list[str]:
    found = []
    model = config.model
    on_cpu = any(pool.gpus_per_worker == 0 for pool in config.active_pools().values())
    if on_cpu and model.block_size_tokens % CPU_BLOCK_MULTIPLE_TOKENS:
        found.append(
            f"model.block_size_tokens ({model.block_size_tokens}) must be a multiple of {CPU_BLOCK_MULTIPLE_TOKENS} on "
            f"CPU: set it to {_round_up(model.block_size_tokens, CPU_BLOCK_MULTIPLE_TOKENS)}."
        )
    if 2 * model.block_size_tokens > model.max_model_len_tokens:  # the canary of /ready fills one and begins another
        found.append(
            f"model.block_size_tokens ({model.block_size_tokens}) is more than half of model.max_model_len_tokens "
            f"({model.max_model_len_tokens}), so hardly a prompt would have a block to hand over: lower the block size "
            "or raise the length."
        )
    return found


def _shared_gpu_conflicts(config: RidgelineConfig) -> list[str]:
    """Engines on one GPU must be told how much of it is theirs: each would measure what the other leaves meanwhile."""
    found = []
    if config.transfer.transport == "collective":
        found.append(
            "transfer.transport collective cannot move KV between workers that share a GPU (ray.share_gpus), since "
            "NCCL refuses them: set it to grpc or cuda-ipc."
        )
    for name, pool in config.active_pools().items():
        section = config.section_of(name)
        if pool.gpus_per_worker != 1:
            found.append(
                f"ray.share_gpus puts {GPU_SHARERS} workers on a GPU, and {section}.gpus_per_worker is "
                f"{pool.gpus_per_worker}: set it to 1, or leave ray.share_gpus out."
            )
            continue
        part = config.args_of(name).get("gpu_memory_utilization")
        if not isinstance(part, int | float) or part >= 1 / GPU_SHARERS:
            found.append(
                f"ray.share_gpus gives each worker half of a GPU, and {name} takes "
                f"{'nine tenths' if part is None else part} of its memory: set engine_args.gpu_memory_utilization to "
                "0.45."
            )
        if pool.kv_cache_bytes is None:
            found.append(
                f"ray.share_gpus needs {section}.kv_cache_bytes, since engines that start together cannot measure "
                "what their weights leave of a GPU: set it, for instance to 8 GiB."
            )
    return found


def _transfer_conflicts(config: RidgelineConfig) -> list[str]:
    found = []
    pools = [(config.section_of(name), pool) for name, pool in config.active_pools().items()]
    (one, prefill), (other, decode) = pools[0], pools[-1]  # in mode adaptive the same: its workers do both
    if (prefill.gpus_per_worker == 0) != (decode.gpus_per_worker == 0):
        found.append(
            f"{one}.gpus_per_worker ({prefill.gpus_per_worker}) and {other}.gpus_per_worker "
            f"({decode.gpus_per_worker}) put one pool on GPUs and the other on CPUs, whose KV blocks differ inside: "
            "set both alike."
        )
    if config.transfer.transport == "cuda-ipc" and prefill.gpus_per_worker == decode.gpus_per_worker == 0:
        settings = " and ".join(dict.fromkeys(f"{section}.gpus_per_worker" for section, _ in pools))
        found.append(
            f"transfer.transport cuda-ipc copies from GPU to GPU, and with 0 in {settings} all workers are on CPUs: "
            f"set transfer.transport to shm, which does the same in the host's memory, or set {settings}."
        )
    if max(prefill.ranks, decode.ranks) % min(prefill.ranks, decode.ranks):
        found.append(
            f"{one}.tensor_parallel ({prefill.ranks}) and {other}.tensor_parallel ({decode.ranks}) do not "
            "divide each other, so the KV heads of a rank cannot be split or joined whole: set one to a multiple of "
            "the other (on GPUs through gpus_per_worker)."
        )
    if config.transfer.wire_dtype != "none" and _copies_raw(config.transfer.transport):
        found.append(
            f"transfer.wire_dtype ({config.transfer.wire_dtype}) has nothing to encode with transfer.transport "
            f"{config.transfer.transport}, which copies blocks as they are: set transfer.wire_dtype to none, or "
            "transfer.transport to grpc."
        )
    if config.router.min_remote_prefill_tokens >= config.model.max_model_len_tokens:
        found.append(
            f"router.min_remote_prefill_tokens ({config.router.min_remote_prefill_tokens}) leaves no prompt whose KV "
            f"is handed over: set it below model.max_model_len_tokens ({config.model.max_model_len_tokens})."
        )
    if config.transfer.fetch_deadline_s > config.router.request_deadline_s:
        found.append(
            f"transfer.fetch_deadline_s ({config.transfer.fetch_deadline_s:g}) lets one fetch take longer than the "
            f"request it is for may live: set it to at most router.request_deadline_s "
            f"({config.router.request_deadline_s:g})."
        )
    return [*found, *_collective_conflicts(config)]


def _collective_conflicts(config: RidgelineConfig) -> list[str]:
    """A source has a pair group with each rank that fetches from it; pools may grow to `autoscale.*.max_workers`."""
    if config.transfer.transport != "collective":
        return []
    pools = list(config.active_pools().items())
    name, fetching = pools[-1]
    most = max(fetching.workers, config.autoscale.by_pool()[name].max_workers or 0)
    groups = most * max(1, fetching.ranks // pools[0][1].ranks)
    if groups <= MAX_GROUPS:
        return []
    return [
        f"transfer.transport collective lets at most {MAX_GROUPS} ranks fetch from a source, and with {most} {name} "
        f"workers of {fetching.ranks} ranks it is {groups}: set transfer.transport to grpc, or lower "
        f"{config.section_of(name)}.workers and autoscale.{name}.max_workers."
    ]


def _copies_raw(transport: str) -> bool:
    if transport == "auto":
        return False
    from kv_transfer.transports import puller_class  # imports torch, which a command line has no other use for

    return puller_class(transport).copies_raw


def _covered_by_tls(transport: str) -> bool:
    if transport in ("auto", *AUTO):
        return True
    from kv_transfer.transports import puller_class

    return puller_class(transport).covered_by_tls


def _router_conflicts(config: RidgelineConfig) -> list[str]:
    found = []
    router = config.router
    if router.max_prompt_wait_s > router.request_deadline_s:
        found.append(
            f"router.max_prompt_wait_s ({router.max_prompt_wait_s:g}) accepts prompts that would still wait when their "
            f"time is up: set it to at most router.request_deadline_s ({router.request_deadline_s:g})."
        )
    for name, pool in config.active_pools().items():
        least_tokens = WINDOW_STEPS * pool.max_num_batched_tokens
        if config.window_tokens(name) < least_tokens:
            found.append(
                f"router.prefill_window_tokens ({router.prefill_window_tokens}) is less than two steps of "
                f"{config.section_of(name)}.max_num_batched_tokens ({pool.max_num_batched_tokens}), so its engines "
                f"would wait for the router: set it to null, which gives each pool its own, or to {least_tokens} or "
                "more."
            )
    return found


def _security_conflicts(config: RidgelineConfig) -> list[str]:
    tls = config.security.tls
    files = tls.model_dump()
    missing = [f"security.tls.{name}" for name, path in files.items() if path is None]
    if len(missing) == len(files):
        return []
    if missing:
        return [f"{' and '.join(missing)} must be set as well, or none of security.tls: TLS needs all three files."]
    if not _covered_by_tls(config.transfer.transport):
        library = "UCX" if config.transfer.transport == "nixl" else "torch.distributed"
        return [
            f"transfer.transport {config.transfer.transport} moves KV in plain text ({library} has no TLS) and "
            "cannot be had with security.tls: set transfer.transport to auto or grpc."
        ]
    return []


def _passed_conflicts(config: RidgelineConfig) -> list[str]:
    """Find what is wrong with the arguments for vLLM, alone or together with our own settings."""
    found = [*passed_args.engine_problems("engine_args", config.engine_args, one_pool=False)]
    found += passed_args.reasoning_problems("engine_args", config.engine_args)
    found += passed_args.server_problems("server_args", config.server_args)
    for name, pool in config.active_pools().items():
        found += passed_args.engine_problems(f"{config.section_of(name)}.engine_args", pool.engine_args, one_pool=True)
        sized = pool.kv_cache_bytes is not None and not pool.gpus_per_worker  # on GPUs vLLM's check at start heeds it
        if sized and "gpu_memory_utilization" in config.args_of(name):
            found.append(
                f"gpu_memory_utilization has no effect on {config.section_of(name)}, whose KV cache is sized by "
                f"kv_cache_bytes ({pool.kv_cache_bytes}): leave one of them out, kv_cache_bytes by setting it to null."
            )
    kv_dtype = str(config.engine_args.get("kv_cache_dtype", "auto"))
    if kv_dtype.startswith(("fp8", "int8", "nvfp4", "turboquant")) and config.transfer.wire_dtype != "none":
        found.append(
            f"transfer.wire_dtype ({config.transfer.wire_dtype}) cannot round engine_args.kv_cache_dtype ({kv_dtype}) "
            "once more: set transfer.wire_dtype to none."
        )
    return [*found, *_file_conflicts(config)]


def _file_conflicts(config: RidgelineConfig) -> list[str]:
    """Check the files that arguments for vLLM name."""
    template = config.server_args.get("chat_template")
    named = {
        "server_args.chat_template": None if passed_args.is_template(template) else template,
        "server_args.tool_parser_plugin": config.server_args.get("tool_parser_plugin"),
        "engine_args.reasoning_parser_plugin": config.engine_args.get("reasoning_parser_plugin"),
    }
    return [
        f"{setting}: there is no file {path}: name one that exists."
        for setting, path in named.items()
        if isinstance(path, str) and path and not Path(path).is_file()
    ]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
