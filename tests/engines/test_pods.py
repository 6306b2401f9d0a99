"""What the chart renders, as pods of podman with engines on CPUs: clients with a key are served over two pods.

With RIDGELINE_IMAGE, pods run that image of deploy/Dockerfile; else an image without files that sees this machine's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.engines.serve_process import REPOSITORY, body
from tests.support import pods

pytest.importorskip("helm_python", reason="helm-python-sdk is not there: it is in the extra `dev`")
from tools import chart

pytestmark = [pytest.mark.engines, pytest.mark.long]
READY_WITHIN_S, DELETED_WITHIN_S = 400.0, 150.0
RELEASE = "ridgeline-test"
KEY, ADMIN_KEY = "a-key-of-a-client-0123456789abcdef", "a-key-of-an-operator-0123456789"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
ENGINE = {
    "workers": 1,
    "cores_per_worker": 1,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": "512 MiB",
}
GROUP = {"maxPods": 1, "gpus": 0, "cpu": 1, "memory": "4Gi", "shm": "1Gi"}
ADDRESSES = {name: f"{pods.SUBNET}{last}" for name, last in (("head", 10), ("prefill", 11), ("decode", 12))}


def objects(image: str) -> dict[str, dict[str, Any]]:
    pools = {name: ENGINE | {"resources": {f"ridgeline_{name}": 1}} for name in ("prefill", "decode")}
    text = chart.rendered(
        "values-two-pools.yaml",
        release=RELEASE,
        keysSecret=f"{RELEASE}-keys",
        image={"head": image, "workers": image},
        groups={"prefill": GROUP, "decode": GROUP},
        config={"model": {"path": "smollm2-135m"}, "server": {"drain_timeout_s": 60}, "pools": pools},
    )
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@dataclass(frozen=True)
class Played:
    """The pods, and the URL in that of the head."""

    node: pods.Node
    pods: list[dict[str, Any]]
    url: str = f"http://{ADDRESSES['head']}:8000"

    def logs(self) -> str:
        return "\n".join(f"--- {name}:\n{self.node.log(f'{RELEASE}-head', name)}" for name in ("ray-head", "serve"))


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Iterator[Played]:
    if reason := pods.why_not():
        pytest.skip(reason)
    own = os.environ.get("RIDGELINE_IMAGE")
    folders = [] if own else pods.shared_folders(REPOSITORY, Path(sys.prefix))
    made = objects(own or pods.HOST_IMAGE)
    spec = made["RayCluster"]["spec"]
    groups = {"head": spec["headGroupSpec"]} | {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    keys, folder = {"api.keys": KEY, "admin.keys": ADMIN_KEY}, tmp_path_factory.mktemp("volumes")
    all_pods = [
        pods.pod_of(groups[name], f"{RELEASE}-{name}", address, ADDRESSES["head"], folder, keys, folders)
        for name, address in ADDRESSES.items()
    ]
    with pods.node() as node:
        if not own:
            pods.import_host_image(node)
        for pod, address in zip(all_pods, ADDRESSES.values(), strict=True):
            node.play([made["ConfigMap"], pod] if address == ADDRESSES["head"] else [pod], address)
        played, deadline_s = Played(node, all_pods), time.monotonic() + READY_WITHIN_S
        while not is_ready(played.url):
            assert time.monotonic() < deadline_s, played.logs()
            time.sleep(1)
        yield played


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=30).is_success
    except httpx.TransportError:
        return False


@contextmanager
def streaming(played: Played) -> Iterator[Iterator[str]]:
    """The lines of an answer of 60 tokens."""
    request = body(60) | {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{played.url}/v1/completions", json=request, headers=WITH_KEY, timeout=60) as answer:
        yield answer.iter_lines()


def assert_whole(lines: list[str]) -> None:
    assert [line for line in lines if line][-1] == "data: [DONE]", lines[-3:]
    assert '"completion_tokens":60' in "".join(lines).replace(" ", "")


def test_a_client_with_a_key_is_served_over_two_pods_and_one_without_is_not(played: Played):
    assert httpx.post(f"{played.url}/v1/completions", json=body(5), timeout=60).status_code == 401
    reply = httpx.post(f"{played.url}/v1/completions", json=body(5), headers=WITH_KEY, timeout=60)
    assert reply.json()["usage"]["completion_tokens"] == 5
    metrics = httpx.get(f"{played.url}/metrics", timeout=60).text
    assert 'ridgeline_requests_total{outcome="finished",path="disaggregated"} 1.0' in metrics


def test_an_evicted_worker_drains_and_ends_without_being_killed(played: Played):
    evicted = [pod for pod in played.pods if pod["metadata"]["name"].endswith("-decode")]
    with streaming(played) as lines:
        first = next(lines)
        with ThreadPoolExecutor(1) as thread:
            deleting = thread.submit(played.node.delete, evicted)
            said = [first, *lines]
            ended = deleting.result(DELETED_WITHIN_S)
    assert_whole(said)
    assert not [name for name, status in ended.items() if status == 128 + signal.SIGKILL]
    played.pods.remove(*evicted)


def test_deleted_pods_finish_their_streams_and_end_without_being_killed(played: Played):
    with streaming(played) as lines:
        first = next(lines)
        with ThreadPoolExecutor(1) as thread:
            deleting = thread.submit(played.node.delete, played.pods)
            said = [first, *lines]
            ended = deleting.result(DELETED_WITHIN_S)
    assert_whole(said)
    assert ended[f"{RELEASE}-head-serve"] == 0, played.logs()
    assert not [name for name, status in ended.items() if status == 128 + signal.SIGKILL]
