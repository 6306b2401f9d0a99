"""What will run where: turns the configuration into engine and router settings, before Ray is asked for anything."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ridgeline.cluster.config.api_keys import KeyHashes
from ridgeline.cluster.config.models import PoolConfig, RidgelineConfig
from ridgeline.cluster.doctor.checks import resolve_dtype
from ridgeline.cluster.doctor.facts import read_model_facts
from ridgeline.cluster.doctor.model_support import local_path, model_conflicts
from ridgeline.cluster.errors import ServingError
from ridgeline.cluster.model_store import ModelError, prepare_model
from ridgeline.cluster.runtime.actors import NodePlace
from ridgeline.cluster.runtime.roles import ModeRoles, limits_for_all, mode_roles, places_of
from ridgeline.contracts.vocabulary import Pool
from ridgeline.engine import passed_args, speculation
from ridgeline.engine.config import EngineConfig
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.roofline.process_cores import usable_cores
from ridgeline.roofline.quantisation import multiplies_in_fp8
from ridgeline.router.settings import MOST_ROUTERS, RouterSettings

TEXT_ONLY: Final[dict[str, Any]] = {"language_model_only": True}
"""Images are refused, so that engines of models that could see need not load what sees. Others ignore it."""


class PlacementError(ServingError):
    """The workers cannot be placed as configured; the message names the fix."""


ROUTERS_OF_A_GPU: Final = 2
"""One H100 was measured to make 15.7 thousand tokens/s of an 8B at 256 sequences, one router to carry 11.7 thousand
(docs/results/h100-2026-11-26.json)."""


@dataclass(frozen=True)
class PlannedWorker:
    """A worker that is to be started."""

    worker_id: str
    """`worker-N`, counted over all pools: the same for the same configuration, and whatever its role becomes."""
    pool: Pool
    settings: PoolConfig
    section: str
    """Where its pool's settings are written."""

    @property
    def title(self) -> str:
        """Its id and its pool, for sentences that people read."""
        return f"{self.worker_id} ({self.pool})"


@dataclass(frozen=True)
class Plan:
    """Everything that can be decided before it is known where Ray puts it."""

    config: RidgelineConfig
    model_path: Path
    dtype: str
    served_names: tuple[str, ...]
    engine_args: Mapping[str, Any]
    """Arguments for every engine and the router, with absolute paths of files."""
    server_args: Mapping[str, Any]
    lora_modules: tuple[Mapping[str, str], ...]
    """Name and path of each LoRA adapter that is served from the start."""
    workers: tuple[PlannedWorker, ...]
    roles: ModeRoles
    keys: KeyHashes = field(default_factory=KeyHashes)
    multiplies_in_fp8: bool = False
    """Whether the peak of GPUs is that of FP8; of a model that is still on the hub this is not known, and False."""

    def another_worker(self, worker_id: str, pool: Pool) -> PlannedWorker:
        """Return a worker that is started while the others serve."""
        settings = _start_settings(self.config, self.roles, self.config.all_pools()[pool])
        return PlannedWorker(worker_id, pool, settings, self.config.section_of(pool))

    @property
    def served_model_name(self) -> str:
        """The model's name in answers."""
        return self.served_names[0]

    @property
    def routers(self) -> int:
        """How many router processes there are."""
        asked = self.config.router.processes
        return routers_for(self.config, len(usable_cores())) if asked == "auto" else asked

    def router_settings(self) -> RouterSettings:
        """Return the settings of the router process."""
        config = self.config
        return RouterSettings(
            router=config.router,
            server=config.server,
            name=config.name,
            model_path=str(self.model_path),
            served_names=self.served_names,
            dtype=self.dtype,
            max_model_len=config.model.max_model_len,
            mode=config.mode,
            routers=self.routers,
            overlap=config.transfer.overlap,
            reuse_decode_kv=config.transfer.reuse_decode_kv,
            roles=self.roles.by_mode,
            roles_of_new=self.roles.of_new,
            why_not=self.roles.why_not,
            prefill_window_tokens={name: config.window_tokens(name) for name in config.all_pools()},
            engine_args=passed_args.for_the_router(self.engine_args),
            server_args=self.server_args,
            lora_modules=self.lora_modules,
            speculates=any(speculation.speculates(config.args_of(name)) for name in config.active_pools()),
            stall_timeout_s=config.supervision.stall_timeout_s,
            api_key_hashes=self.keys.clients,
            admin_key_hashes=self.keys.admins,
            metrics_key_hashes=self.keys.metrics,
            tls=config.security.tls.files(),
        )

    def engine_config(self, worker: PlannedWorker, host: str) -> EngineConfig:
        """Return the settings of one engine, on the interface of the node it landed on."""
        model, pool = self.config.model, worker.settings
        on_cpu = pool.gpus_per_worker == 0
        return EngineConfig(
            worker_id=worker.worker_id,
            incarnation=secrets.token_hex(4),
            pool=worker.pool,
            hands_over=any(mode != "colocated" for mode in (self.config.mode, *self.roles.by_mode)),
            model_path=str(self.model_path),
            dtype=self.dtype,
            max_model_len=model.max_model_len,
            block_size=model.block_size,
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            step_target_s=pool.itl_target_ms / 1e3,
            kv_cache_bytes_per_rank=None
            if pool.kv_cache_memory_bytes is None
            else pool.kv_cache_memory_bytes // pool.ranks,
            tensor_parallel_size=pool.ranks,
            enforce_eager=model.is_eager(on_cpu=on_cpu),
            transfer=self._transfer_options(host),
            on_cpu=on_cpu,
            stall_timeout_s=self.config.supervision.stall_timeout_s,
            drain_timeout_s=self.config.server.drain_timeout_s,
            passed={**self.engine_args, **pool.engine_args},
        )

    def _transfer_options(self, host: str) -> TransferOptions:
        transfer = self.config.transfer
        return TransferOptions(
            host=transfer.host or host,
            transport=transfer.transport,
            lease_s=transfer.lease_s,
            kv_fetch_timeout_s=transfer.kv_fetch_timeout_s,
            faults=transfer.faults,
            tls=self.config.security.tls.files(),
        )


def make_plan(config: RidgelineConfig) -> Plan:
    """Resolve model, dtype and hardware.

    May convert the default model and measure this machine (a few seconds each). Raises ModelError, ApiKeyError.
    """
    facts = read_model_facts(config.model.path)
    impossible = model_conflicts(config, facts)
    if impossible:
        raise ModelError("\n".join(impossible))
    dtype = resolve_dtype(config)
    roles = mode_roles(config, facts)
    workers = tuple(
        PlannedWorker(worker_id, name, _start_settings(config, roles, pool), config.section_of(name))
        for worker_id, (name, pool) in places_of(config).items()
    )
    return Plan(
        config=config,
        model_path=prepare_model(config.model.path),
        dtype=dtype,
        served_names=config.model.served_names,
        engine_args=TEXT_ONLY | _with_whole_paths(config.engine_args),
        server_args=_server_args(config),
        lora_modules=tuple(
            {"name": module["name"], "path": local_path(module["path"])}
            for module in passed_args.adapter_modules(config.server_args.get("lora_modules") or [])
        ),
        workers=workers,
        roles=roles,
        keys=config.security.keys(),
        multiplies_in_fp8=multiplies_in_fp8(facts.config, config.engine_args.get("quantization")),
    )


def _start_settings(config: RidgelineConfig, roles: ModeRoles, pool: PoolConfig) -> PoolConfig:
    in_modes = [config.model_copy(update={"mode": mode}).active_pools() for mode in roles.by_mode]
    return limits_for_all([one for pools in in_modes for one in pools.values()], pool) if in_modes else pool


def _server_args(config: RidgelineConfig) -> dict[str, Any]:
    """Return the HTTP front's arguments with the chat template itself: the router's node need not have its file."""
    args = passed_args.front(_with_whole_paths(config.server_args))
    args.pop("lora_modules", None)  # all workers load them, not the router
    template = args.get("chat_template")
    if template and not passed_args.is_template(template):
        args["chat_template"] = Path(template).read_text(encoding="utf-8")
    return args


def _with_whole_paths(args: Mapping[str, Any]) -> dict[str, Any]:
    """Make paths of plugins and of a draft model absolute, so that they mean the same wherever Ray runs a process.

    Raises ModelError.
    """
    whole: dict[str, Any] = {
        name: str(Path(value).absolute()) if name.endswith("_plugin") and value else value
        for name, value in args.items()
    }
    draft = whole.get(speculation.ARGUMENT) or {}
    if name := draft.get("model"):
        try:
            path = prepare_model(name)
        except ModelError as error:
            raise ModelError(f"{speculation.ARGUMENT}.model: {error}") from None
        whole[speculation.ARGUMENT] = {**draft, "model": str(path.absolute() if path.is_dir() else path)}
    return whole


def dtype_of_nodes(config: RidgelineConfig, places: Mapping[str, NodePlace]) -> str:
    """Return the number format that the machines of all workers suit; `places` is by the workers' titles.

    Raises PlacementError if `auto` would mean different formats, in which KV cannot be exchanged.
    """
    chosen = {title: resolve_dtype(config, place.cpu_flags) for title, place in places.items()}
    if len({*chosen.values()}) > 1:
        each = ", ".join(f"{dtype} for {title} on {places[title].host}" for title, dtype in chosen.items())
        raise PlacementError(f"model.dtype auto means {each}: set model.dtype, or use machines of one kind")
    return next(iter(chosen.values()))


class CoreTable:
    """Which cores of which machine each worker runs on; several of Ray's nodes may be one machine."""

    def __init__(self, *, share: bool = False) -> None:
        """If `share` is set, hand a core out again when none is free, the least used first."""
        self._share = share
        self._taken: dict[str, tuple[str, tuple[int, ...]]] = {}

    def take(self, worker: PlannedWorker, place: NodePlace) -> tuple[int, ...]:
        """Return cores for a worker: none on GPUs, the same ones if it is back on its machine.

        Raises PlacementError.
        """
        if worker.settings.gpus_per_worker:
            return ()
        machine, cores = self._taken.pop(worker.worker_id, ("", ()))
        if machine != place.machine or not {*cores} <= {*place.cores}:
            cores = self._pick(worker, place)
        self._taken[worker.worker_id] = (place.machine, cores)
        return cores

    def give_back(self, worker_id: str) -> None:
        """Free the cores of a worker that will not come back."""
        self._taken.pop(worker_id, None)

    def _pick(self, worker: PlannedWorker, place: NodePlace) -> tuple[int, ...]:
        wanted = worker.settings.cores_per_worker
        busy = [core for machine, cores in self._taken.values() if machine == place.machine for core in cores]
        if self._share:
            usable = sorted(place.cores, key=busy.count)
        else:
            usable = [core for core in place.cores if core not in busy and core not in place.taken]
        if len(usable) < wanted:
            others = len(place.taken.difference(busy))
            beside = f" beside {others} that workers of another deployment have" if others else ""
            raise PlacementError(
                f"{worker.title} needs {wanted} cores of its own on {place.host} and {len(usable)} are left{beside}: "
                f"lower {worker.section}.workers or cores_per_worker, or add a machine"
            )
        return tuple(usable[:wanted])


def routers_for(config: RidgelineConfig, cores: int) -> int:
    """Return how many routers `router.processes: auto` means on a machine with so many cores.

    One core is left to their dispatcher. Engines on other machines take no cores here, which is not known yet where a
    cluster is joined; there all cores count.
    """
    pools = [*config.active_pools().values()]
    answering = pools[-1].workers if pools[-1].gpus_per_worker else 0
    taken = 0 if config.ray.address else sum(pool.workers * pool.cores_per_worker for pool in pools)
    return max(1, min(ROUTERS_OF_A_GPU * answering, cores - taken - 1, MOST_ROUTERS))
