"""The chart in deploy/helm/: Kubernetes, KubeRay and Ray accept what it renders, and its parts fit each other."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config, node_provider
from ray.autoscaler._private.util import validate_config

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.facts import ModelFacts
from ridgeline.cluster.runtime.roles import mode_roles
from ridgeline.cluster.runtime.services import SLOW_LOOP_S
from ridgeline.router.front.http.routes import ROUTES

helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk is not there: it is in the extra `dev`")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="it is in the extra `dev`")

from tests.support import kuberay  # noqa: E402
from tools import chart  # noqa: E402

REPOSITORY = Path(__file__).parents[2]
VALUES = sorted(path.name for path in chart.CHART.glob("values-*.yaml"))

GROUP = {"maxPods": 2, "gpus": 1, "cpu": 1, "memory": "1Gi", "shm": "1Gi"}
SECRET = {"secretKeyRef": {"name": "more", "key": "a"}}
WRONG_SERVERS = (None, [], {"drain_timeout_s": "30"}, {"drain_timeout_s": -1})
WRONG_POOLS = ({"prefil": {}}, {"decode": []}, {"decode": {"resources": {"ridgeline_gpu": "1"}}})

Objects = dict[tuple[str, str], dict[str, Any]]
"""By kind and name."""


def one_group(pools: dict[str, Any] | None = None, **group: Any) -> dict[str, Any]:
    """Values at the top: a group `gpu` and these pools."""
    return {"groups": {"gpu": GROUP | group}, "config": {"pools": pools or {}}}


def objects_of(text: str) -> Objects:
    documents = [document for document in yaml.safe_load_all(text) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


@pytest.fixture(params=VALUES)
def objects(request) -> Objects:
    return objects_of(chart.rendered(request.param))


@pytest.fixture
def cluster(objects) -> dict[str, Any]:
    return objects["RayCluster", "ridgeline"]


@pytest.fixture
def pods(cluster) -> list[dict[str, Any]]:
    return kuberay.templates(cluster)


@pytest.fixture
def served(objects, tmp_path) -> RidgelineConfig:
    path = tmp_path / "serve.yaml"
    path.write_text(objects["ConfigMap", "ridgeline"]["data"]["serve.yaml"])
    return load_config(path).config


@pytest.fixture
def node_types(cluster) -> dict[str, Any]:
    """What Ray's autoscaler makes of the cluster when it runs in it."""
    derived = autoscaling_config._derive_autoscaling_config_from_ray_cr(
        cluster | {"metadata": {"name": "ridgeline", "namespace": "default"}}
    )
    validate_config(derived)
    return derived["available_node_types"]


def test_the_manifest_for_those_without_helm_is_the_chart():
    assert chart.MANIFEST.read_text() == chart.written(), "run `python -m tools.chart` to write it anew"


@pytest.mark.parametrize("values", VALUES)
def test_helm_finds_no_fault_in_the_chart(values):
    given = yaml.safe_load((chart.CHART / values).read_text()) | {"image": {"head": "a:cpu", "workers": "a:gpu"}}
    assert [each["error"] for each in helm_python.lint(chart.CHART, given)["messages"]] == ["icon is recommended"]


# --- what is accepted


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"keysSecret": None},
        {"networkPolicy": False},
        {"weights": {"persistentVolumeClaim": {"claimName": "weights"}}},
        {"release": "true", "keysSecret": "123", "image": {"head": "1.5", "workers": "null"}},
        {"release": "a" * 53} | one_group(minAvailable=1, nodeSelector={"spot": "yes"}),
        {"imagePullSecrets": [{"name": "123"}]} | one_group(tolerations=[{"operator": "Exists"}]),
        {"env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}, {"name": "A", "valueFrom": SECRET}]},
    ],
    ids=str,
)
@pytest.mark.parametrize("values", VALUES)
def test_kubernetes_and_kuberay_accept_every_object(values, more):
    objects = objects_of(chart.rendered(values, **more))
    for document in objects.values():
        kuberay.validate(document)


@pytest.mark.parametrize(
    ("place", "key", "value", "error"),
    [
        (["spec"], "rayversion", "2.60.0", jsonschema.ValidationError),
        (["spec", "autoscalerOptions"], "version", "v3", jsonschema.ValidationError),
        (["spec", "workerGroupSpecs", 0], "maxReplicas", "4", jsonschema.ValidationError),
        (["spec", "headGroupSpec", "template", "spec"], "container", [], kubernetes_validate.ValidationError),
        (["spec", "headGroupSpec", "headService", "spec"], "publish", True, kubernetes_validate.ValidationError),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_so_the_check_above_means_something(cluster, place, key, value, error):
    changed = copy.deepcopy(cluster)
    where = changed
    for step in place:
        where = where[step]
    where[key] = value
    with pytest.raises(error):
        kuberay.validate(changed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": {}},
        {"image": {"head": "ridgeline:cpu", "workers": None}},
        {"image": {}},
        {"image": {"head": "", "workers": "ridgeline:gpu"}},
        {"keysSecret": ""},  # of a variable that is not set: it would open the server to everybody
        {"replicas": 3},
        {"weights": {"emptyDir": {}, "hostPath": {"path": "/mnt"}}},
        *(one_group(**wrong) for wrong in ({"memory": "1 GB"}, {"nodeSelector": {"spot": True}}, {"tolerations": {}})),
        # `router` would offer the routers' place, to which no Service leads; the head's names are taken as well.
        *({"groups": {name: GROUP}} for name in ("a-b", "router", "head", "headgroup", "true", "no", "null")),
        *({"config": {"pools": {}, "server": server}} for server in WRONG_SERVERS),
        *({"config": {"pools": pools}} for pools in WRONG_POOLS),
        *({"env": [wrong]} for wrong in ({"name": "A"}, {"name": "A", "value": 1}, {"name": "POD_IP", "value": "::1"})),
        {"imagePullSecrets": ["registry"]},
        *({"serviceMonitor": wrong} for wrong in (True, None)),
        {"serviceMonitor": {"enabled": True, "labels": {"release": 1}}},
    ],
    ids=str,
)
def test_values_that_cannot_be_are_refused_before_anything_is_sent(wrong):
    with pytest.raises(helm_python.HelmValuesError):
        chart.rendered(VALUES[0], **wrong)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        *(({"release": name}, "release name .*lower-case") for name in ("my.app", "1abc", "123", "a-", "A", "a" * 54)),
        (one_group(minAvailable=3), "groups.gpu.minAvailable is above maxPods, 2: lower it"),
        # No engine fits in the head, which has the routers' place.
        *(
            (one_group({"decode": {"resources": {f"ridgeline_{name}": number}}}), f"no pod has {number} of .*: correct")
            for name, number in (("cpu", 1), ("gpu", 2), ("router", 1))
        ),
    ],
    ids=str,
)
def test_what_no_schema_can_say_is_refused_in_a_sentence_that_says_what_to_do(more, sentence):
    with pytest.raises(helm_python.HelmError, match=sentence):
        chart.rendered(VALUES[0], **more)


# --- pools and pods


def test_rays_autoscaler_finds_room_for_every_pool_in_the_pods_with_its_resources(node_types, served):
    for name, pool in served.active_pools().items():
        fitting = [node for node in node_types.values() if pool.resources.keys() <= node["resources"].keys()]
        room = 0
        for node in fitting:
            has = node["resources"]
            wanted = {"CPU": pool.cores_per_worker, "GPU": pool.gpus_per_worker} | pool.resources
            room += node["max_workers"] * min(has.get(each, 0) // number for each, number in wanted.items())
        assert room >= pool.workers, name


def test_one_node_has_room_for_both_pools_at_once_and_can_change_its_mode(tmp_path):
    objects = objects_of(chart.rendered("values-one-node.yaml"))
    path = tmp_path / "serve.yaml"
    path.write_text(objects["ConfigMap", "ridgeline"]["data"]["serve.yaml"])
    assert mode_roles(load_config(path).config, ModelFacts()).why_not == {}
    served = yaml.safe_load(objects["ConfigMap", "ridgeline"]["data"]["serve.yaml"])
    [group] = objects["RayCluster", "ridgeline"]["spec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    pools = [served["pools"][name] for name in ("prefill", "decode")]
    assert group["maxReplicas"] == 1
    assert sum(pool["workers"] * pool["gpus_per_worker"] for pool in pools) == int(limits["nvidia.com/gpu"])
    assert sum(pool["workers"] * pool["cores_per_worker"] for pool in pools) <= int(limits["cpu"])


def test_the_heads_pod_runs_the_router_and_no_engine(node_types, served):
    head = node_types["headgroup"]
    assert head["resources"]["CPU"] == 0
    assert "GPU" not in head["resources"]
    assert served.router.resources.keys() <= head["resources"].keys()


def test_pods_are_drained_for_as_long_as_the_server_needs(pods, served):
    assert min(pod["spec"]["terminationGracePeriodSeconds"] for pod in pods) > served.server.drain_timeout_s
    # SIGTERM comes to all containers at once: Ray's wait for what runs on it.
    waiting = [each["name"] for pod in pods for each in pod["spec"]["containers"] if "lifecycle" in each]
    assert waiting == ["ray-head"] + ["ray-worker"] * (len(pods) - 1)


def test_another_configuration_changes_the_pod_and_so_starts_the_cluster_anew():
    first, second = (
        objects_of(chart.rendered(VALUES[0], config={"pools": {}, "mode": mode}))["RayCluster", "ridgeline"]
        for mode in ("disaggregated", "adaptive")
    )
    assert first["spec"]["upgradeStrategy"] == {"type": "Recreate"}
    assert first["spec"]["headGroupSpec"]["template"] != second["spec"]["headGroupSpec"]["template"]


def test_a_budget_keeps_the_head_and_one_pod_of_each_pool_while_a_node_is_drained():
    objects = objects_of(chart.rendered("values-two-pools.yaml"))
    budgets = {name: each["spec"] for (kind, name), each in objects.items() if kind == "PodDisruptionBudget"}
    labels = {name: budget["selector"]["matchLabels"] for name, budget in budgets.items()}
    groups = [group["groupName"] for group in objects["RayCluster", "ridgeline"]["spec"]["workerGroupSpecs"]]
    # An operator's pods have no scale: a share of them, or `maxUnavailable`, would be refused or never met.
    assert {name: budget["minAvailable"] for name, budget in budgets.items()} == dict.fromkeys(budgets, 1)
    assert labels == {
        "ridgeline-head": {"ray.io/cluster": "ridgeline", "ray.io/node-type": "head"},
        **{f"ridgeline-{group}": {"ray.io/cluster": "ridgeline", "ray.io/group": group} for group in groups},
    }


def test_the_pods_run_the_ray_that_is_installed(cluster):
    pinned = re.search(r'"ray\[default\]==([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert cluster["spec"]["rayVersion"] == pinned[1]


def test_pods_get_the_variables_secrets_and_tolerations_that_are_asked_for():
    variable, secret, taint = {"name": "HF_ENDPOINT", "value": "http://mirror"}, {"name": "registry"}, {"key": "spot"}
    more = {"env": [variable], "imagePullSecrets": [secret]} | one_group(tolerations=[taint])
    pods = kuberay.templates(objects_of(chart.rendered(VALUES[0], **more))["RayCluster", "ridgeline"])
    containers = [container for pod in pods for container in pod["spec"]["containers"]]
    assert {each["name"] for each in containers if variable in each.get("env", ())} == {
        "ray-head",
        "serve",
        "ray-worker",
    }
    assert [pod["spec"]["imagePullSecrets"] for pod in pods] == [[secret]] * 2
    assert [each["key"] for each in pods[1]["spec"]["tolerations"]] == ["nvidia.com/gpu", "spot"]


def test_a_new_volume_can_be_written_by_the_images_user(pods):
    uid = re.search(r"--uid (\d+)", (REPOSITORY / "deploy/Dockerfile").read_text())[1]
    assert {str(pod["spec"]["securityContext"]["fsGroup"]) for pod in pods} == {uid}


def test_large_numbers_and_the_charts_own_router_resources_reach_the_server():
    pools = {"decode": {"kv_cache_memory_bytes": 10_000_000}}
    values = one_group(pools, **dict.fromkeys(("maxPods", "minAvailable", "gpus", "cpu"), 10_000_000))
    values["config"]["router"] = {"resources": {"other": 1}}
    text = chart.rendered(VALUES[0], **values)
    assert "e+" not in text
    served = yaml.safe_load(objects_of(text)["ConfigMap", "ridgeline"]["data"]["serve.yaml"])
    assert served["pools"] == pools
    assert served["router"]["resources"] == {"ridgeline_router": 1}


# --- who reaches what


def test_the_service_leads_to_the_servers_port_in_the_heads_pod(objects, served):
    spec = objects["Service", "ridgeline"]["spec"]
    assert spec["ports"][0]["targetPort"] == served.server.port
    assert spec["selector"]["ray.io/cluster"] == "ridgeline"
    assert served.server.host == "0.0.0.0"


def test_clients_are_sent_to_a_pod_that_serves_and_workers_to_one_that_does_not_yet(objects, cluster, served):
    head = cluster["spec"]["headGroupSpec"]
    assert head["headService"]["spec"]["publishNotReadyAddresses"], "else no worker joins, and it is never ready"
    (probe,) = [one["readinessProbe"] for one in head["template"]["spec"]["containers"] if "readinessProbe" in one]
    assert probe["httpGet"] == {"path": "/health", "port": served.server.port}, (
        "/ready is 503 while a pool is lost, though the other one serves, and there is no other pod"
    )
    assert ROUTES["/health"] == "everybody", "the probe has no key"
    assert probe["timeoutSeconds"] > SLOW_LOOP_S, "a busy router answers late"
    assert not objects["Service", "ridgeline"]["spec"].get("publishNotReadyAddresses")


def test_from_outside_of_the_cluster_only_the_servers_port_is_reached(objects, served):
    spec = objects["NetworkPolicy", "ridgeline"]["spec"]
    inside = {"podSelector": {"matchLabels": {"ray.io/cluster": "ridgeline"}}}
    assert spec["podSelector"] == inside["podSelector"]
    assert spec["ingress"] == [{"from": [inside]}, {"ports": [{"port": served.server.port}]}]


def test_only_the_autoscaler_may_change_the_cluster(pods):
    assert not [pod for pod in pods if pod["spec"]["automountServiceAccountToken"]]
    token, ca = Path(node_provider.IN_CLUSTER_TOKEN_PATH), Path(node_provider.IN_CLUSTER_CA_CERT_PATH)
    holders = [
        (container["name"], mount["name"])
        for pod in pods
        for container in pod["spec"]["containers"]
        for mount in container["volumeMounts"]
        if mount["mountPath"] == str(token.parent)
    ]
    assert [container for container, _ in holders] == ["autoscaler"]
    (volume,) = [each["projected"] for each in pods[0]["spec"]["volumes"] if each["name"] == holders[0][1]]
    account, authority, _ = volume["sources"]
    assert account["serviceAccountToken"]["path"] == token.name
    assert authority["configMap"]["items"] == [{"key": ca.name, "path": ca.name}]


def test_the_driver_alone_reads_the_keys_and_every_engine_may_download_with_the_token(pods, served):
    keys = {Path(path) for path in (served.security.api_keys_file, served.security.admin_keys_file)}
    (folder,) = {path.parent for path in keys}
    assert {path.name for path in keys} == {"api.keys", "admin.keys"}
    containers = [container for pod in pods for container in pod["spec"]["containers"]]
    mounts = {
        each["name"] for each in containers for mount in each["volumeMounts"] if mount["mountPath"] == str(folder)
    }
    assert mounts == {"serve"}
    tokens = [env for each in containers for env in each.get("env", ()) if env["name"] == "HF_TOKEN"]
    assert len(tokens) == len(containers) - 1  # not the autoscaler
    assert all(env["valueFrom"]["secretKeyRef"]["optional"] for env in tokens)


def test_without_a_secret_there_are_no_keys():
    objects = objects_of(chart.rendered(VALUES[0], keysSecret=None))
    assert "security" not in yaml.safe_load(objects["ConfigMap", "ridgeline"]["data"]["serve.yaml"])
    assert "HF_TOKEN" not in str(objects)


def test_prometheus_operator_finds_the_service_only_where_it_is_asked_to(objects):
    assert ("ServiceMonitor", "ridgeline") not in objects
    wanted = {"enabled": True, "labels": {"release": "prometheus"}}
    monitored = objects_of(chart.rendered(VALUES[0], serviceMonitor=wanted))
    service, monitor = monitored["Service", "ridgeline"], monitored["ServiceMonitor", "ridgeline"]
    assert monitor["metadata"]["labels"] == wanted["labels"]
    spec = monitor["spec"]
    assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["port"] for endpoint in spec["endpoints"]] == [port["name"] for port in service["spec"]["ports"]]
