"""Pods of the chart on this machine, by `podman kube play`: podman is the node, this is KubeRay's operator.

What the operator adds to a pod (`ray start`, its variables, the token) is from `BuildPod` of KubeRay 1.7. The
autoscaler is left out: it needs Kubernetes. Podman 4.3 knows no `status.podIP`, no Secrets as text, no `fsGroup`, no
emptyDir for everybody or in memory, and no preStop: these are filled in, as a kubelet would.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TOKEN = "a-token-of-the-operator-0123456789abcdef"
NETWORK = "ridgeline-test"
SUBNET = "10.89.177."
HOST_IMAGE = "localhost/ridgeline-test-host"
"""An image without files: its pods see the folders of this machine, with the environment that runs the test."""
NOT_SHARED = {"dev", "etc", "home", "lost+found", "proc", "run", "sys", "tmp", "var"}
"""Of the folders at the top."""
COMMAND_S = 120.0
UNIFIED = Path("/sys/fs/cgroup/unified")


@dataclass
class Node:
    """Podman in a mount namespace of its own, without the second hierarchy of cgroups, which crun refuses."""

    holder: subprocess.Popen[bytes]
    environment: dict[str, str]
    made: list[list[str]] = field(default_factory=list)
    """Commands that remove what was made."""

    def podman(self, *words: str, stdin: str | None = None, check: bool = True, within_s: float = COMMAND_S) -> str:
        """Return what a command said; its failure fails the test with that."""
        command = ["nsenter", "--target", str(self.holder.pid), "--mount", "podman", *words]
        ended = subprocess.run(
            command,
            input=stdin,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=within_s,
            check=False,
        )
        assert ended.returncode == 0 or not check, f"{' '.join(words)}: {ended.stdout}"
        return ended.stdout

    def play(self, documents: list[dict[str, Any]], address: str) -> None:
        """Start a pod at this address, with the objects that it uses."""
        for kind, name in ((each["kind"].lower(), each["metadata"]["name"]) for each in documents):
            if kind == "pod":
                self.made.append(["pod", "rm", "--force", "--time", "5", name])
            else:
                self.made.append(["volume", "rm", "--force", name])
        text = yaml.safe_dump_all(documents)
        self.podman("kube", "play", "--network", NETWORK, "--ip", address, "-", stdin=text)

    def log(self, pod: str, container: str) -> str:
        return self.podman("logs", f"{pod}-{container}", check=False)

    def delete(self, pods: list[dict[str, Any]]) -> dict[str, int]:
        """End pods together as a kubelet does, and return the status of each container, by its name."""
        containers = {
            f"{pod['metadata']['name']}-{container['name']}": (container, pod["spec"]["terminationGracePeriodSeconds"])
            for pod in pods
            for container in pod["spec"]["containers"]
        }

        def end(name: str) -> int:
            container, patience_s = containers[name]
            began_s = time.monotonic()
            if hook := container.get("lifecycle", {}).get("preStop"):
                self.podman("exec", name, *hook["exec"]["command"], check=False, within_s=patience_s)
            left_s = max(2, patience_s - int(time.monotonic() - began_s))
            self.podman("stop", "--time", str(left_s), name, within_s=left_s + COMMAND_S)
            return int(self.podman("inspect", "--format", "{{.State.ExitCode}}", name))

        with ThreadPoolExecutor() as threads:
            return dict(zip(containers, threads.map(end, containers), strict=True))

    def running(self, pod: str) -> bool:
        state = self.podman("pod", "inspect", "--format", "{{.State}}", pod, check=False)
        return "Running" in state or "Degraded" in state


def why_not() -> str | None:
    """Return why there can be no pods here, or None."""
    if os.geteuid() != 0:
        return "pods need root"
    missing = [tool for tool in ("podman", "catatonit", "crun") if not shutil.which(tool)]
    return f"install {' '.join(missing)}" if missing else None


@contextmanager
def node() -> Iterator[Node]:
    """Podman, and at the end nothing of what was made with it."""
    folder = Path(tempfile.mkdtemp(prefix="ridgeline-pods-"))
    limits = folder / "containers.conf"
    # Podman's defaults are above the limits of a machine that may not raise its own.
    files, processes = (resource.getrlimit(which)[1] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    processes = min(processes, 16_384) if processes > 0 else 16_384
    limits.write_text(f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]\n')
    unmount = f"! mountpoint -q {UNIFIED} || umount {UNIFIED}; echo; exec sleep 1200"
    holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", unmount], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    made = Node(holder, os.environ | {"CONTAINERS_CONF": str(limits)})
    try:
        made.made.append(["network", "rm", "--force", NETWORK])
        made.podman("network", "create", "--subnet", f"{SUBNET}0/24", NETWORK)
        yield made
    finally:
        for command in reversed(made.made):
            made.podman(*command, check=False)
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        holder.stdout.close()
        shutil.rmtree(folder)


def import_host_image(node: Node) -> None:
    """Make HOST_IMAGE: the links and files that a process wants at fixed places, and empty folders."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        with tarfile.open(file.name, "w") as tar:
            for path in sorted(Path("/").iterdir()):
                if path.is_symlink():
                    tar.add(path, path.name)
                elif path.is_dir():
                    entry = tarfile.TarInfo(path.name)
                    entry.type, entry.mode = tarfile.DIRTYPE, path.stat().st_mode & 0o7777
                    tar.addfile(entry)
            for name in ("passwd", "group", "ld.so.cache", "nsswitch.conf"):
                tar.add(Path("/etc") / name, f"etc/{name}")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        node.podman("import", "--quiet", "--change", f"ENV PATH={path}", file.name, HOST_IMAGE)
    node.made.append(["rmi", "--force", HOST_IMAGE])


def shared_folders(*more: Path) -> list[str]:
    """Return the folders of this machine that pods of HOST_IMAGE see."""
    top = [path for path in Path("/").iterdir() if path.is_dir() and not path.is_symlink()]
    return [*(str(path) for path in top if path.name not in NOT_SHARED), *map(str, more)]


def pod_of(
    group: dict[str, Any], name: str, address: str, head: str, folder: Path, keys: dict[str, str], seen: list[str]
) -> dict[str, Any]:
    """Return the pod of a group as the operator makes it, with the head's address or another.

    Its volumes lie in `folder`, that of the Secret has `keys`, and folders of this machine are `seen`.
    """
    is_head = address == head
    spec = json.loads(json.dumps(group["template"]["spec"]))
    ray = spec["containers"][0]
    amounts = dict(group["resources"])
    cpus = amounts.pop("CPU", ray["resources"].get("limits", {}).get("cpu"))
    custom = json.dumps({each: float(amount) for each, amount in amounts.items()})
    where = "--head --dashboard-host=0.0.0.0" if is_head else f"--address={head}:6379"
    ray["command"], ray["args"] = (
        ["/bin/bash", "-c", "--"],
        [f"ray start {where} --block --dashboard-agent-listen-port=52365 --num-cpus={cpus} --resources='{custom}'"],
    )
    operators = {
        "RAY_ADDRESS": f"{'127.0.0.1' if is_head else head}:6379",
        "RAY_CLOUD_INSTANCE_ID": name,
        "RAY_NODE_TYPE_NAME": group.get("groupName", "headgroup"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
    }
    ray["env"] += [{"name": each, "value": value} for each, value in operators.items()]
    known = {"status.podIP": address, "auth_token": TOKEN}
    for container in spec["containers"]:
        for variable in container["env"]:
            for source in variable.pop("valueFrom", {}).values():
                variable["value"] = known.get(source.get("fieldPath", source.get("key")))
        container["env"] = [variable for variable in container["env"] if variable["value"]]
        del container["resources"]  # of this machine they have what there is
        container.pop("readinessProbe", None)  # podman would end a pod that is not ready
        container["volumeMounts"] += [{"name": f"host{n}", "mountPath": path} for n, path in enumerate(seen)]
    volumes = [volume for volume in spec["volumes"] if "projected" not in volume]
    for volume in volumes:
        if "emptyDir" in volume:
            own = Path("/dev/shm") if volume.pop("emptyDir") else Path(tempfile.mkdtemp(dir=folder))
            own.chmod(0o1777)  # podman's would be root's
            volume["hostPath"] = {"path": str(own)}
        if volume.pop("secret", None):
            own = Path(tempfile.mkdtemp(dir=folder))
            own.chmod(0o755)
            for file, text in keys.items():
                (own / file).write_text(text)
            volume["hostPath"] = {"path": str(own)}
    volumes += [{"name": f"host{n}", "hostPath": {"path": path}} for n, path in enumerate(seen)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": spec | {"volumes": volumes},
    }
