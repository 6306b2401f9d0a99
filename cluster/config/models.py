"""The shape of a Ridgeline configuration: every setting, its unit, its default and what it means.

Why: one typed, frozen object travels from the command line to every actor, so no part reads files or environment
variables of its own. `ridgeline.cluster.config.loader` fills it from YAML and flags.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ridgeline.cluster.config.api_keys import KeyHashes, key_hashes
from ridgeline.cluster.config.autoscale import AutoscaleConfig, PoolBounds
from ridgeline.cluster.node_address import network_of
from ridgeline.contracts.log_lines import LoggingConfig, ProcessLogging
from ridgeline.contracts.rpc.tls import TlsFiles
from ridgeline.contracts.section import GIB, MIB, Bytes, Resources, Section
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.engine import passed_args, speculation
from ridgeline.kv_transfer.names import AUTO, LONGEST_FETCH_DEADLINE_S, MAX_GROUPS, TransportName
from ridgeline.router.settings import RouterConfig, ServerConfig, without_port

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

CPU_BLOCK_MULTIPLE_TOKENS = 32
OBJECT_STORE_BYTES = 100 * MIB
"""Of a Ray that is started here; small, since no token and no KV byte goes through it."""
PLACEMENT_TIMEOUT_S = 120.0
JOINED_PLACEMENT_TIMEOUT_S = 1800.0
"""Half an hour, since a node that the autoscaler launches takes ten minutes or more to boot and install."""
GPU_SHARERS = 2
"""Workers on one GPU with `ray.share_gpus`."""
WINDOW_STEPS = 2
"""Engine steps' worth of prompts that a worker has at a time: one runs, and the next must not wait for the router."""


def _host_or_network(text: str) -> str:
    try:
        network_of(text)
    except ValueError as error:
        raise ValueError(f"is not a network: {error}") from error
    return without_port(text)


def _fault_plan(text: str) -> str:
    # Imports torch, which a command line has no other use for.
    from ridgeline.kv_transfer.faults import FaultPlan

    FaultPlan.parse(text)
    return text


def _as_list(names: Any) -> Any:
    return (names,) if isinstance(names, str) else names or ()


class ModelConfig(Section):
    """Which model every worker loads, and the limits they share."""

    path: str = Field(
        default="smollm2-135m", min_length=1, description="directory, hub name or the default model's name"
    )
    served_model_name: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(
        default=(),
        description="model name in requests, or a list of names, the first of which is in answers; empty: path",
    )
    dtype: Dtype = Field(
        default="auto",
        description="number format of weights and KV cache; auto: bfloat16 on CPUs with bfloat16 instructions, "
        "float32 on others, the checkpoint's own on GPUs",
    )
    max_model_len: int = Field(default=4096, ge=2, description="longest prompt plus output of one request")
    block_size: int = Field(default=32, ge=1, description="tokens in one KV block, the unit of transfer")
    enforce_eager: bool | None = Field(default=None, description="skip compilation; null: yes on CPU, no on GPU")

    @property
    def served_names(self) -> tuple[str, ...]:
        """Every name that requests may have, that of answers first."""
        return self.served_model_name or (self.path,)

    def is_eager(self, *, on_cpu: bool) -> bool:
        """Return whether engines there skip compilation."""
        return on_cpu if self.enforce_eager is None else self.enforce_eager


class RayConfig(Section):
    """Which Ray cluster places the workers."""

    address: str | None = Field(
        default=None, description="an existing cluster (auto, host:port); null: start Ray on this machine"
    )
    placement_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="how long Ray may take to place each worker; null: 120, and 1800 on a joined cluster, whose "
        "nodes may still be starting",
    )
    rack_label: str = Field(
        default="rack",
        min_length=1,
        description="node label (`ray start --labels rack=r7`) that names the rack; decode workers in the prefill "
        "worker's rack are preferred",
    )
    share_cores: bool = Field(
        default=False,
        description="workers may share cores; only for fault tests on a small machine: timings mean nothing",
    )
    share_gpus: bool = Field(
        default=False,
        description="two workers share a GPU, each with at most half of its memory; they take turns, or run at the "
        "same time with mps_active_thread_percent",
    )

    @property
    def patience_s(self) -> float:
        """Seconds after which the wait for Ray to place a worker is given up."""
        default_s = PLACEMENT_TIMEOUT_S if self.address is None else JOINED_PLACEMENT_TIMEOUT_S
        return default_s if self.placement_timeout_s is None else self.placement_timeout_s


class PoolConfig(Section):
    """One pool of identical workers, each with one engine. With GPUs other defaults apply: see `loader`."""

    workers: int = Field(ge=1, description="engines in this pool")
    cores_per_worker: int = Field(default=1, ge=1, description="CPU cores each engine is pinned to")
    gpus_per_worker: int = Field(default=0, ge=0, description="GPUs of each engine, all on one node")
    tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        description="ranks of each engine; null: one per GPU, and one on CPU",
    )
    max_num_seqs: int = Field(
        ge=1,
        description="sequences one engine runs at a time; one client gets at most seven eighths of the decode slots",
    )
    max_num_batched_tokens: int = Field(ge=1, description="token budget of one engine step; longer prompts are chunked")
    itl_target_ms: float = Field(
        default=0.0,
        ge=0.0,
        description="target length of a step while sequences decode: prompt chunks shrink to fit it, so ITL stays "
        "steady and TTFT grows; 0: no target",
    )
    kv_cache_memory_bytes: Bytes | None = Field(
        default=GIB,
        ge=MIB,
        description="KV cache of each engine, over all its ranks; null (the default with GPUs, not allowed on "
        "CPU): all GPU memory that is left",
    )
    mps_active_thread_percent: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="with ray.share_gpus: the part of the GPU's multiprocessors that each engine may use, under "
        "NVIDIA's MPS (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE); null: engines take turns",
    )
    resources: Resources = Field(
        default_factory=dict, description="custom Ray resources each worker takes, to bind a pool to a node type"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="vLLM engine arguments of this pool; they override the top-level engine_args"
    )

    @property
    def ranks(self) -> int:
        """Tensor parallel ranks of each engine: one per GPU, or as configured on CPU."""
        return self.tensor_parallel_size or max(1, self.gpus_per_worker)


class PoolsConfig(Section):
    """The pools: `prefill` and `decode` in mode disaggregated, the others in the mode of their name."""

    prefill: PoolConfig = PoolConfig(workers=1, max_num_seqs=32, max_num_batched_tokens=512)
    decode: PoolConfig = PoolConfig(workers=1, max_num_seqs=80, max_num_batched_tokens=512)
    colocated: PoolConfig = PoolConfig(workers=2, max_num_seqs=72, max_num_batched_tokens=2048)
    adaptive: PoolConfig | None = Field(
        default=None,
        description="null: prefill's settings, with the workers of prefill and decode together and the larger "
        "max_num_seqs of the two; resources only if both have the same",
    )

    def for_adaptive(self) -> PoolConfig:
        """Return the settings of the workers in mode adaptive, where each does what is asked of it."""
        if self.adaptive is not None:
            return self.adaptive
        max_num_seqs = max(self.prefill.max_num_seqs, self.decode.max_num_seqs)
        alike = self.prefill.resources == self.decode.resources
        return self.prefill.model_copy(
            update={
                "workers": self.prefill.workers + self.decode.workers,
                "resources": self.prefill.resources if alike else {},  # else half of the machines would stay empty
                "itl_target_ms": 0.0,
                "max_num_seqs": max_num_seqs,
                # Decodes count in a step's budget: without room for them, a prompt as long as it takes two steps.
                "max_num_batched_tokens": self.prefill.max_num_batched_tokens + max_num_seqs,
            }
        )


class TransferConfig(Section):
    """How KV blocks get from a prefill worker to a decode worker."""

    lease_s: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="how long unfetched KV blocks stay pinned without a heartbeat; six heartbeats fit in it",
    )
    kv_fetch_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=LONGEST_FETCH_DEADLINE_S,
        description="deadline of one KV fetch; after it the decode worker recomputes the prompt",
    )
    transport: TransportName = Field(
        default="auto",
        description="what carries KV: shm (one host), cuda-ipc (GPUs of one host), grpc, collective (NCCL or "
        "gloo), nixl (UCX, an extra package); auto: cuda-ipc on one GPU, shm between CPUs of one "
        "host, else grpc",
    )
    faults: Annotated[str, AfterValidator(_fault_plan)] | None = Field(
        default=None, description="for tests: injects transfer faults, as in seed=7,drop=0.02,corrupt=0.05"
    )
    overlap: bool = Field(
        default=True,
        description="admit a request to decode while its prompt is prefilled, and fetch the KV of a long prompt "
        "chunk by chunk",
    )
    reuse_decode_kv: bool = Field(
        default=True,
        description="mode disaggregated: for a later turn of a conversation, fetch to prefill what a decode worker "
        "has cached, where that is estimated to take less time than computing it",
    )
    host: Annotated[str, AfterValidator(_host_or_network)] | None = Field(
        default=None,
        description="address for worker traffic: a network (10.0.0.0/16) or an interface (eth1) on which each "
        "node has its own, or one node's address; null: the Ray node's address",
    )


class SupervisionConfig(Section):
    """When a worker counts as lost, and how often it is started again."""

    max_restarts: int = Field(
        default=5,
        ge=0,
        description="restarts of one worker within five minutes of service; then back-off doubles from 30 s to 300 s",
    )
    start_timeout_s: float = Field(
        default=900.0, ge=10, description="how long a worker may take to load its engine, including a model download"
    )
    stall_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="an engine with work but without a step for this long is replaced, and gets no new work after "
        "a third of it; stopped or idle CPU engines are replaced after 3 of their longest steps (5 s "
        "at least), computing ones after 3 of the longest step seen or predicted (a third of this at "
        "least)",
    )
    unreachable_timeout_s: float = Field(
        default=30.0,
        ge=10,
        description="a worker that most routers cannot reach for this long is replaced, one worker at a time; at "
        "least 10 s, since reconnecting takes seconds",
    )


class TlsConfig(Section):
    """Mutual TLS between router and workers: PEM files, at the same paths on every node. All three, or none."""

    ca_file: str | None = Field(
        default=None, min_length=1, description="certificate authority that router and workers trust"
    )
    cert_file: str | None = Field(
        default=None, min_length=1, description="certificate of this deployment, signed by ca_file, for DNS:ridgeline"
    )
    key_file: str | None = Field(default=None, min_length=1, description="private key of cert_file")

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
        description="file of API keys, one per line, # begins a comment; read where `ridgeline serve` runs; "
        "RIDGELINE_API_KEYS (comma separated) adds to it; null and no variable: open to all",
    )
    admin_keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="file of keys for operators' paths such as `ridgeline drain`, which no client key opens; "
        "null: open to this machine only, and closed if clients have keys or come through proxies",
    )
    metrics_keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="file of keys for /metrics; keys of admin_keys_file open it too; null: open to all",
    )
    tls: TlsConfig = TlsConfig()

    def keys(self) -> KeyHashes:
        """Read all keys. Raises ApiKeyError."""
        return key_hashes(self.api_keys_file, self.admin_keys_file, metrics_keys_file=self.metrics_keys_file)


class RidgelineConfig(Section):
    """The whole configuration. `load_config` builds it and also checks it across sections."""

    name: str = Field(
        default="ridgeline",
        pattern=r"^[a-z0-9][a-z0-9-]{0,39}$",
        description="name of the deployment for `ridgeline status`, `stop` and `logs`: lower-case letters, digits "
        "and hyphens; unique on one machine",
    )
    mode: Mode = Field(
        default="disaggregated",
        description="disaggregated: a prefill and a decode pool; colocated: whole replicas; adaptive: workers "
        "that do either phase, chosen by predicted latency for each request",
    )
    fixed_mode: bool = Field(
        default=False,
        description="never change the mode: engines start with the limits of their own pool only, instead of "
        "those of all modes",
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
    logging: LoggingConfig = LoggingConfig()
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM engine arguments of all pools, and of the router where they describe the model: "
        "gpu_memory_utilization, max_logprobs, revision ...; arguments that would break the hand-off are refused",
    )
    server_args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM arguments of the HTTP server: tool_call_parser, chat_template ...",
    )

    def logging_of(self, process: str) -> ProcessLogging:
        """Return how this process logs."""
        return ProcessLogging(**self.logging.model_dump(), process=process)

    def active_pools(self) -> dict[Pool, PoolConfig]:
        """Return the pools that run in this mode, in the order in which they are placed."""
        if self.mode == "colocated":
            return {"colocated": self.pools.colocated}
        if self.mode == "adaptive":
            return {"adaptive": self.pools.for_adaptive()}
        return {"prefill": self.pools.prefill, "decode": self.pools.decode}

    def section_of(self, pool: Pool) -> str:
        """Return where a pool's settings are written: adaptive may have none of its own."""
        return self.sections_of(pool)[0]

    def sections_of(self, pool: Pool) -> tuple[str, ...]:
        """Return where a pool's number of workers is written: that of adaptive may be a sum."""
        if pool == "adaptive" and self.pools.adaptive is None:
            return "pools.prefill", "pools.decode"
        return (f"pools.{pool}",)

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

    def takes(self, pool: PoolConfig) -> dict[str, float]:
        """Return what each worker of a pool takes of a machine, by Ray's names."""
        numbers = {"CPU": float(pool.cores_per_worker), "GPU": self.gpus_of(pool), **pool.resources}
        return {name: number for name, number in numbers.items() if number}

    def uses_mps(self) -> bool:
        """Return whether engines of this mode have shares of a GPU's multiprocessors."""
        return any(pool.mps_active_thread_percent is not None for pool in self.active_pools().values())

    def window_tokens(self, pool: Pool) -> int:
        """Return how many prompt tokens a worker of this pool has at a time."""
        return self.router.prefill_window_tokens or WINDOW_STEPS * self.all_pools()[pool].max_num_batched_tokens

    def uses_gpus(self) -> bool:
        """Return whether the workers of this mode run on GPUs."""
        return any(pool.gpus_per_worker > 0 for pool in self.active_pools().values())


def conflicts(config: RidgelineConfig) -> Iterator[str]:
    """Find settings that are valid one by one and impossible together; one sentence each, naming the fix.

    Only settings that this mode uses are checked: `compare`, which runs both, asks for both.
    """
    for name, pool in config.active_pools().items():
        yield from _pool_conflicts(config.section_of(name), pool)
    yield from _model_conflicts(config)
    yield from _shared_gpu_conflicts(config) if config.ray.share_gpus else _mps_conflicts(config)
    yield from _router_conflicts(config)
    yield from _transfer_conflicts(config) if config.mode != "colocated" else ()
    yield from _security_conflicts(config)
    yield from _passed_conflicts(config)


def _pool_conflicts(section: str, pool: PoolConfig) -> Iterator[str]:
    if pool.max_num_batched_tokens < pool.max_num_seqs:
        yield (
            f"{section}.max_num_batched_tokens ({pool.max_num_batched_tokens}) cannot give every one of "
            f"max_num_seqs ({pool.max_num_seqs}) a token per step: raise it to at least {pool.max_num_seqs}."
        )
    if pool.gpus_per_worker == 0 and pool.kv_cache_memory_bytes is None:
        yield (
            f"{section}.kv_cache_memory_bytes must be set on CPU, where null makes each engine claim nearly all "
            "memory: set it, for instance to 1 GiB."
        )
    yield from _rank_conflicts(section, pool)


def _rank_conflicts(section: str, pool: PoolConfig) -> Iterator[str]:
    if pool.gpus_per_worker and pool.ranks != pool.gpus_per_worker:
        yield (
            f"{section}.tensor_parallel_size ({pool.ranks}) must be gpus_per_worker ({pool.gpus_per_worker}), one rank "
            "for each GPU: leave tensor_parallel_size out, or set both alike."
        )
    if not pool.gpus_per_worker and pool.cores_per_worker % pool.ranks:
        yield (
            f"{section}.cores_per_worker ({pool.cores_per_worker}) cannot be shared evenly by the ranks of "
            f"{section}.tensor_parallel_size ({pool.ranks}): set cores_per_worker to "
            f"{_round_up(pool.cores_per_worker, pool.ranks)}."
        )


def _model_conflicts(config: RidgelineConfig) -> Iterator[str]:
    model = config.model
    on_cpu = any(pool.gpus_per_worker == 0 for pool in config.active_pools().values())
    if on_cpu and model.block_size % CPU_BLOCK_MULTIPLE_TOKENS:
        yield (
            f"model.block_size ({model.block_size}) must be a multiple of {CPU_BLOCK_MULTIPLE_TOKENS} on "
            f"CPU: set it to {_round_up(model.block_size, CPU_BLOCK_MULTIPLE_TOKENS)}."
        )
    if 2 * model.block_size > model.max_model_len:  # the probe of /ready fills one and begins another
        yield (
            f"model.block_size ({model.block_size}) is more than half of model.max_model_len "
            f"({model.max_model_len}), so hardly a prompt would have a block to hand over: lower the block size "
            "or raise the length."
        )


def _shared_gpu_conflicts(config: RidgelineConfig) -> Iterator[str]:
    """Engines on one GPU must be told how much of it is theirs: each would measure what the other leaves meanwhile."""
    if config.transfer.transport == "collective":
        yield (
            "transfer.transport collective cannot move KV between workers that share a GPU (ray.share_gpus), since "
            "NCCL refuses them: set it to grpc or cuda-ipc."
        )
    for name, pool in config.active_pools().items():
        section = config.section_of(name)
        if pool.gpus_per_worker != 1:
            yield (
                f"ray.share_gpus puts {GPU_SHARERS} workers on a GPU, and {section}.gpus_per_worker is "
                f"{pool.gpus_per_worker}: set it to 1, or leave ray.share_gpus out."
            )
            continue
        part = config.args_of(name).get("gpu_memory_utilization")
        if not isinstance(part, int | float) or part >= 1 / GPU_SHARERS:
            yield (
                f"ray.share_gpus gives each worker half of a GPU, and {name} takes "
                f"{'nine tenths' if part is None else part} of its memory: set engine_args.gpu_memory_utilization to "
                "0.45."
            )
        if pool.kv_cache_memory_bytes is None:
            yield (
                f"ray.share_gpus needs {section}.kv_cache_memory_bytes, since engines that start together cannot "
                "measure what their weights leave of a GPU: set it, for instance to 8 GiB."
            )


def _mps_conflicts(config: RidgelineConfig) -> list[str]:
    return [
        f"{config.section_of(name)}.mps_active_thread_percent has an effect only on engines that share a GPU: set "
        "ray.share_gpus, or leave it out."
        for name, pool in config.active_pools().items()
        if pool.mps_active_thread_percent is not None
    ]


def _transfer_conflicts(config: RidgelineConfig) -> Iterator[str]:
    pools = [(config.section_of(name), pool) for name, pool in config.active_pools().items()]
    (one, prefill), (other, decode) = pools[0], pools[-1]  # in mode adaptive the same: its workers do both
    if (prefill.gpus_per_worker == 0) != (decode.gpus_per_worker == 0):
        yield (
            f"{one}.gpus_per_worker ({prefill.gpus_per_worker}) and {other}.gpus_per_worker "
            f"({decode.gpus_per_worker}) put one pool on GPUs and the other on CPUs, whose KV blocks differ inside: "
            "set both alike."
        )
    if config.transfer.transport == "cuda-ipc" and prefill.gpus_per_worker == decode.gpus_per_worker == 0:
        settings = " and ".join(dict.fromkeys(f"{section}.gpus_per_worker" for section, _ in pools))
        yield (
            f"transfer.transport cuda-ipc copies from GPU to GPU, and with 0 in {settings} all workers are on CPUs: "
            f"set transfer.transport to shm, which does the same in the host's memory, or set {settings}."
        )
    if max(prefill.ranks, decode.ranks) % min(prefill.ranks, decode.ranks):
        yield (
            f"{one}.tensor_parallel_size ({prefill.ranks}) and {other}.tensor_parallel_size ({decode.ranks}) do not "
            "divide each other, so the KV heads of a rank cannot be split or joined whole: set one to a multiple of "
            "the other (on GPUs through gpus_per_worker)."
        )
    if config.router.min_remote_prefill_tokens >= config.model.max_model_len:
        yield (
            f"router.min_remote_prefill_tokens ({config.router.min_remote_prefill_tokens}) leaves no prompt whose KV "
            f"is handed over: set it below model.max_model_len ({config.model.max_model_len})."
        )
    if config.transfer.kv_fetch_timeout_s > config.router.request_timeout_s:
        yield (
            f"transfer.kv_fetch_timeout_s ({config.transfer.kv_fetch_timeout_s:g}) lets one fetch take longer than the "
            f"request it is for may live: set it to at most router.request_timeout_s "
            f"({config.router.request_timeout_s:g})."
        )
    yield from _collective_conflicts(config)


def _collective_conflicts(config: RidgelineConfig) -> Iterator[str]:
    """A source has a pair group with each rank that fetches from it; pools may grow to `autoscale.*.max_workers`."""
    if config.transfer.transport != "collective":
        return
    pools = list(config.active_pools().items())
    name, fetching = pools[-1]
    most = max(fetching.workers, config.autoscale.by_pool()[name].max_workers or 0)
    groups = most * max(1, fetching.ranks // pools[0][1].ranks)
    if groups > MAX_GROUPS:
        yield (
            f"transfer.transport collective lets at most {MAX_GROUPS} ranks fetch from a source, and with {most} "
            f"{name} workers of {fetching.ranks} ranks it is {groups}: set transfer.transport to grpc, or lower "
            f"{config.section_of(name)}.workers and autoscale.{name}.max_workers."
        )


def _covered_by_tls(transport: str) -> bool:
    if transport in ("auto", *AUTO):
        return True
    # Imports torch, which a command line has no other use for.
    from ridgeline.kv_transfer.transports import puller_class

    return puller_class(transport).covered_by_tls


def _router_conflicts(config: RidgelineConfig) -> Iterator[str]:
    router = config.router
    if router.max_queue_time_s > router.request_timeout_s:
        yield (
            f"router.max_queue_time_s ({router.max_queue_time_s:g}) accepts prompts that would still wait when their "
            f"time is up: set it to at most router.request_timeout_s ({router.request_timeout_s:g})."
        )
    for name, pool in config.active_pools().items():
        least_tokens = WINDOW_STEPS * pool.max_num_batched_tokens
        if config.window_tokens(name) < least_tokens:
            yield (
                f"router.prefill_window_tokens ({router.prefill_window_tokens}) is less than two steps of "
                f"{config.section_of(name)}.max_num_batched_tokens ({pool.max_num_batched_tokens}), so its engines "
                f"would wait for the router: set it to null, which gives each pool its own, or to {least_tokens} or "
                "more."
            )


def _security_conflicts(config: RidgelineConfig) -> Iterator[str]:
    tls = config.security.tls
    files = tls.model_dump()
    missing = [f"security.tls.{name}" for name, path in files.items() if path is None]
    if 0 < len(missing) < len(files):
        yield f"{' and '.join(missing)} must be set as well, or none of security.tls: TLS needs all three files."
    if not missing and not _covered_by_tls(config.transfer.transport):
        library = "UCX" if config.transfer.transport == "nixl" else "torch.distributed"
        yield (
            f"transfer.transport {config.transfer.transport} moves KV in plain text ({library} has no TLS) and "
            "cannot be had with security.tls: set transfer.transport to auto or grpc."
        )


def _passed_conflicts(config: RidgelineConfig) -> Iterator[str]:
    """Find what is wrong with the arguments for vLLM, alone or together with our own settings."""
    yield from passed_args.engine_problems("engine_args", config.engine_args, one_pool=False)
    yield from passed_args.reasoning_problems("engine_args", config.engine_args)
    yield from passed_args.server_problems("server_args", config.server_args)
    yield from passed_args.adapter_problems(config.engine_args, config.server_args, config.model.served_names)
    for name, pool in config.active_pools().items():
        section = config.section_of(name)
        yield from passed_args.engine_problems(f"{section}.engine_args", pool.engine_args, one_pool=True)
        if not pool.gpus_per_worker and pool.ranks > 1 and config.args_of(name).get("enable_expert_parallel"):
            yield (
                f"{section}: vLLM's kernels for CPUs do not know which experts a rank has, and the engine dies in its "
                "first step: leave out engine_args.enable_expert_parallel, and tensor parallelism divides each expert."
            )
        yield from speculation.pool_problems(
            f"{section}.engine_args",
            config.engine_args.get(speculation.ARGUMENT),
            pool.engine_args,
            hands_over_on_gpus=pool.gpus_per_worker > 0 and config.mode != "colocated",
        )
        if config.engine_args.get("enable_lora") and speculation.speculates(config.args_of(name)):
            yield (
                f"{section}: adapters together with speculation have not run: leave out engine_args.enable_lora or "
                f"{speculation.ARGUMENT}."
            )
        # On GPUs vLLM's check at start heeds it.
        sized = pool.kv_cache_memory_bytes is not None and not pool.gpus_per_worker
        if sized and "gpu_memory_utilization" in config.args_of(name):
            yield (
                f"gpu_memory_utilization has no effect on {section}, whose KV cache is sized by "
                f"kv_cache_memory_bytes ({pool.kv_cache_memory_bytes}): leave one of them out, the "
                "latter by setting it to null."
            )
    yield from _file_conflicts(config)


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


def autoscale_conflicts(config: RidgelineConfig) -> Iterator[str]:
    """Find settings of `autoscale` that are impossible in this mode and those that it may change to.

    One sentence each, naming the fix; none while nothing is to be scaled.
    """
    autoscale, turn_off = config.autoscale, "or set autoscale.mode to none"
    if autoscale.mode == "none":
        return
    said = {pool: each for pool, each in autoscale.by_pool().items() if each != PoolBounds()}
    workers = {pool: settings.workers for pool, settings in config.active_pools().items()}
    others = {} if config.fixed_mode else {pool: settings.workers for pool, settings in config.all_pools().items()}
    if not said.keys() & workers.keys():
        pool = next(iter(workers))
        yield (
            f"autoscale.mode is {autoscale.mode} and no pool of mode {config.mode} has bounds: set "
            f"autoscale.{pool}.min_workers and autoscale.{pool}.max_workers, {turn_off}."
        )
    for pool, each in said.items():
        there = workers.get(pool) or others.get(pool)
        if there is None:
            yield (
                f"autoscale.{pool} bounds a pool that mode {config.mode} does not have, in which fixed_mode keeps it: "
                f"set bounds for {' or '.join(workers)} instead, {turn_off}."
            )
        else:
            yield from _bounds_conflicts(pool, each, there, config.sections_of(pool))


def _bounds_conflicts(pool: Pool, said: PoolBounds, workers: int, sections: tuple[str, ...]) -> Iterator[str]:
    at = f"autoscale.{pool}"
    numbers = " and ".join(f"{section}.workers" for section in sections)
    if said.min_workers is None or said.max_workers is None:
        missing = "min_workers" if said.min_workers is None else "max_workers"
        yield f"{at}.{missing} must be set as well: a pool is changed within two bounds, or not at all."
    elif said.min_workers > said.max_workers:
        yield (
            f"{at}.min_workers ({said.min_workers}) is above {at}.max_workers ({said.max_workers}): swap them, or "
            "raise max_workers."
        )
    elif not said.min_workers <= workers <= said.max_workers:
        yield (
            f"{numbers} ({workers}{' together' * (len(sections) > 1)}) is not within {at}.min_workers "
            f"({said.min_workers}) and max_workers ({said.max_workers}): start with a number between them, or change "
            "the bounds."
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
