"""JSON schema of KubeRay's RayCluster, which kubernetes-validate does not include."""

from __future__ import annotations

from typing import Any

__all__ = ["RAY_CLUSTER"]

_DEFINITIONS = "https://kubernetes.io/api/_definitions.json#/$defs/io.k8s"
_META = f"{_DEFINITIONS}.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_POD = f"{_DEFINITIONS}.api.core.v1.PodTemplateSpec"
_SERVICE = f"{_DEFINITIONS}.api.core.v1.Service"
_RESOURCES = f"{_DEFINITIONS}.api.core.v1.ResourceRequirements"

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TRUTH = {"type": "boolean"}


def _strict_object(required: list[str], **properties: object) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_COMMON = {
    "rayStartParams": _TEXTS,
    "template": {"$ref": _POD},
    "labels": _TEXTS,
    "resources": {"type": "object"},
}
_HEAD = _strict_object(
    ["template"],
    **_COMMON,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    headService={"$ref": _SERVICE},
    enableIngress=_TRUTH,
)
_GROUP = _strict_object(
    ["groupName", "template"],
    **_COMMON,
    groupName={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"},
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    numOfHosts=_COUNT,
    idleTimeoutSeconds=_COUNT,
    suspend=_TRUTH,
    scaleStrategy=_strict_object(
        [], workersToDelete={"type": "array", "items": {"type": "string"}}
    ),
)
_AUTOSCALER = {"type": "object", "properties": {"resources": {"$ref": _RESOURCES}}}

RAY_CLUSTER: dict[str, Any] = _strict_object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"enum": ["ray.io/v1"]},
    kind={"enum": ["RayCluster"]},
    metadata={"$ref": _META},
    spec=_strict_object(
        ["headGroupSpec"],
        rayVersion={"type": "string"},
        headGroupSpec=_HEAD,
        workerGroupSpecs={"type": "array", "items": _GROUP},
        authOptions=_strict_object([], mode={"enum": ["disabled", "token"]}),
        autoscalerOptions=_AUTOSCALER,
        enableInTreeAutoscaling=_TRUTH,
        gcsFaultToleranceOptions={"type": "object"},
        headServiceAnnotations=_TEXTS,
        managedBy={"type": "string"},
        suspend=_TRUTH,
    ),
    status={"type": "object"},
)
"""Follows ray-operator/apis/ray/v1/raycluster_types.go; pods use Kubernetes' schema."""
