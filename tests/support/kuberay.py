"""The schemas of what the chart renders: Kubernetes' own, and that of KubeRay's RayCluster.

KubeRay's is written from the reference of its version 1.6.2 (docs/reference/api.md of ray-project/kuberay); 1.7.1 takes
all of it. Its CRD repeats Kubernetes' schema of a pod for each group, in 1.5 MB, instead of naming it: here the pods
are checked with Kubernetes' schema.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

KUBERNETES_VERSIONS = ("1.28", kubernetes_validate.latest_version())
"""The oldest that the chart takes, and the newest that is known."""
WHOLE, TEXT, TRUTH, PODS = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}, {"type": "object"}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def _one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def _fields(required: str = "", **fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "additionalProperties": False, "required": required.split()}


_GROUP = {"rayStartParams": TEXTS, "resources": TEXTS, "labels": TEXTS, "template": PODS}
RAY_CLUSTER = _fields(
    "headGroupSpec",
    upgradeStrategy=_fields(type=_one_of("Recreate", "None")),
    authOptions=_fields(mode=_one_of("disabled", "token"), secretName=TEXT, enableK8sTokenAuth=TRUTH),
    suspend=TRUTH,
    managedBy=TEXT,
    autoscalerOptions=_fields(
        resources={"type": "object"},
        image=TEXT,
        imagePullPolicy=TEXT,
        securityContext={"type": "object"},
        idleTimeoutSeconds=WHOLE,
        upscalingMode=_one_of("Default", "Aggressive", "Conservative"),
        version=_one_of("v1", "v2"),
        env={"type": "array"},
        envFrom={"type": "array"},
        volumeMounts={"type": "array"},
    ),
    headServiceAnnotations=TEXTS,
    enableInTreeAutoscaling=TRUTH,
    gcsFaultToleranceOptions={"type": "object"},
    headGroupSpec=_fields(
        "rayStartParams template", **_GROUP, headService={"type": "object"}, enableIngress=TRUTH, serviceType=TEXT
    ),
    rayVersion=TEXT,
    workerGroupSpecs={
        "type": "array",
        "items": _fields(
            "groupName minReplicas maxReplicas rayStartParams template",
            **_GROUP,
            suspend=TRUTH,
            groupName=TEXT,
            replicas=WHOLE,
            minReplicas=WHOLE,
            maxReplicas=WHOLE,
            idleTimeoutSeconds=WHOLE,
            scaleStrategy={"type": "object"},
            numOfHosts=WHOLE,
        ),
    },
)


def templates(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pods of a cluster's groups, the head's first, as the operator completes them for the API server."""
    head, *workers = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pods = [group["template"] for group in (head, *workers)]
    options = cluster["spec"]["autoscalerOptions"]
    autoscaler = {"name": "autoscaler", "volumeMounts": options["volumeMounts"], "resources": options["resources"]}
    containers = [*pods[0]["spec"]["containers"], autoscaler]
    return [pods[0] | {"spec": pods[0]["spec"] | {"containers": containers}}, *pods[1:]]


def validate(document: dict[str, Any]) -> None:
    """Raise if Kubernetes or KubeRay would not take this: a wrong type, or a field that they do not have."""
    parts = [document]
    if document["kind"] == "RayCluster":
        jsonschema.validate(document["spec"], RAY_CLUSTER)
        service = document["spec"]["headGroupSpec"]["headService"]
        parts = [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "head"}} | service]
        parts += [
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
            for template in templates(document)
        ]
    for part in parts:
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(part, version, strict=True)
