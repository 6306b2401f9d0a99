"""deploy/cluster-onprem.yaml for these hosts: other addresses, user and key, engines on CPU, a pool for each host."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.hosts.namespaces import Host, Hosts

REPOSITORY = Path(__file__).parents[2]
CLUSTER, SERVED = "deploy/cluster-onprem.yaml", "deploy/cluster-serve.yaml"
"""The names in the commands of docs/how-to/deploy.md; the files here take their places."""
POOLS = {"prefill": '{"ridgeline_prefill": 1}', "decode": '{"ridgeline_decode": 1}'}
BOTH = """*) pools='{"ridgeline_prefill": 8, "ridgeline_decode": 8}' ;;"""
"""The line of the file that says it for hosts which may carry either."""


def write_cluster_file(hosts: Hosts, head: Host, pools: dict[str, Host], served: Path) -> Path:
    """Write the file for `ray up`, which also copies `served` to where SERVED's replacement is looked for."""
    text = (REPOSITORY / "deploy/cluster-onprem.yaml").read_text()
    assert BOTH in text, "the file says otherwise which machine carries which pool: adapt the tests"
    lines = [f"{host.name}) pools='{POOLS[pool]}' ;;" for pool, host in pools.items()]
    text = text.replace(BOTH, "\n    ".join(lines)).replace("EXTRA=gpu", "EXTRA=cpu")
    launcher = yaml.safe_load(text)
    launcher["provider"] = {
        "type": "local",
        "head_ip": head.address,
        "worker_ips": [host.address for host in pools.values()],
    }
    launcher["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    launcher["file_mounts"][f"~/ridgeline/{remote_name(served)}"] = str(served)
    path = hosts.folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(launcher, sort_keys=False, width=1000))
    return path


def remote_name(served: Path) -> str:
    """Return where a host has the file, beneath its copy of the repository."""
    return f"served/{served.name}"


def write_served_file(hosts: Hosts, drain_timeout_s: float) -> Path:
    """Write what `ridgeline serve` runs there: the default model, and one engine in each pool of cluster-serve.yaml."""
    engine = {"workers": 1, "cores_per_worker": 1, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": "512 MiB"}
    served = {
        "model": {"path": "smollm2-135m"},
        "server": {"host": "0.0.0.0", "port": 8000, "drain_timeout_s": drain_timeout_s},
        "pools": {
            "prefill": {**engine, "max_num_seqs": 16, "resources": {"ridgeline_prefill": 1}},
            "decode": {**engine, "max_num_seqs": 16, "resources": {"ridgeline_decode": 1}},
        },
        "router": {"resources": {"ridgeline_router": 1}},
    }
    path = hosts.folder / "cluster-serve.yaml"
    path.write_text(yaml.safe_dump(served))
    return path
