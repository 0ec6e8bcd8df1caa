"""Pods that a manifest creates, with their names, labels and environments."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stratagem.cli.manifests.documents import document_name, metadata_name

# Label and annotation of the pod's index. The annotation dates from 1.21, the label from 1.28.
_INDEX_KEY = {
    "Job": "batch.kubernetes.io/job-completion-index",
    "StatefulSet": "apps.kubernetes.io/pod-index",
}
_JOB_SET_KEY = "jobset.sigs.k8s.io/jobset-name"
_TRAINER_KEY = "trainer.kubeflow.org/trainjob-ancestor-step"
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
_METADATA = re.compile(r"metadata\.(?P<part>labels|annotations)\['(?P<key>[^']+)'\]")
_REFERENCE = re.compile(r"\$(\$|\((?P<name>[^)]*)\))")


@dataclasses.dataclass(frozen=True)
class Container:
    """One container of a pod; a variable is None if only the running cluster has its value."""

    environment: Mapping[str, str | None]
    ports: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Pod:
    """One pod.

    `owner` is the name of its document, for errors; `name` the host name, or "" if not known in
    advance; `domain` the Service that gives the name an address, or "".
    """

    owner: str
    name: str
    domain: str
    labels: Mapping[str, str]
    containers: tuple[Container, ...]


def pods_of(documents: Sequence[dict[str, Any]]) -> Iterator[Pod]:
    """Yields the pods that valid documents create; one pod stands for all of a Deployment."""
    for document in documents:
        kind, spec = document["kind"], document.get("spec") or {}
        if kind == "Pod":
            yield _pod(document, document, name=metadata_name(document))
        elif kind == "Job" and spec.get("completionMode") == "Indexed":
            yield from _indexed_pods(document, spec, spec.get("completions") or 0)
        elif kind == "StatefulSet":
            replicas = spec.get("replicas")
            yield from _indexed_pods(document, spec, 1 if replicas is None else replicas)
        elif "template" in spec and "containers" in (spec["template"].get("spec") or {}):
            yield _pod(document, spec["template"])
    for one in _job_sets(documents):
        yield from _job_set_pods(one)


def services_of(documents: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the Services by name, with those that JobSets create."""
    created = {
        one.domain: {"spec": {"selector": {_JOB_SET_KEY: one.name}}} for one in _job_sets(documents)
    }
    return created | {metadata_name(d): d for d in documents if d["kind"] == "Service"}


@dataclasses.dataclass(frozen=True)
class _JobSet:
    """A JobSet, or one that a TrainJob makes of its runtime; `num_nodes` is None without."""

    document: dict[str, Any]
    name: str
    spec: dict[str, Any]
    num_nodes: int | None = None

    @property
    def domain(self) -> str:
        return (self.spec.get("network") or {}).get("subdomain") or self.name


def _job_sets(documents: Sequence[dict[str, Any]]) -> Iterator[_JobSet]:
    runtimes = {(d["kind"], metadata_name(d)): d for d in documents if d["kind"] in _RUNTIMES}
    for document in documents:
        name = metadata_name(document)
        if document["kind"] == "JobSet":
            yield _JobSet(document, name, document["spec"])
        elif document["kind"] == "TrainJob":
            reference = document["spec"]["runtimeRef"]
            key = reference.get("kind") or _RUNTIMES[1], reference["name"]
            if key in runtimes:
                runtime = runtimes[key]["spec"]
                nodes = (runtime.get("mlPolicy") or {}).get("numNodes")
                nodes = (document["spec"].get("trainer") or {}).get("numNodes") or nodes
                yield _JobSet(document, name, runtime["template"]["spec"], nodes)


def _job_set_pods(one: _JobSet) -> Iterator[Pod]:
    for group in one.spec.get("replicatedJobs") or []:
        template = group["template"]
        labels = (template.get("metadata") or {}).get("labels") or {}
        is_trainer = labels.get(_TRAINER_KEY) == "trainer"
        count = one.num_nodes if is_trainer and one.num_nodes else template["spec"]["completions"]
        for number in range(group.get("replicas", 1)):
            name = f"{one.name}-{group['name']}-{number}"
            for pod in _indexed_pods(one.document, template["spec"], count, name):
                labels = {**pod.labels, _JOB_SET_KEY: one.name}
                yield dataclasses.replace(pod, domain=one.domain, labels=labels)


def expand(text: str, variables: Mapping[str, str | None]) -> str | None:
    """Expands `$(NAME)` as Kubernetes does; `$$` is a literal dollar sign.

    Unknown names stay unchanged. Returns None if the text needs a variable that is None.

    Source: Kubernetes' third_party/forked/golang/expansion/expand.go.
    """
    names = [match["name"] for match in _REFERENCE.finditer(text)]
    if any(name in variables and variables[name] is None for name in names if name is not None):
        return None

    def fill_in(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return "$"
        return str(variables[name]) if name in variables else match[0]

    return _REFERENCE.sub(fill_in, text)


def _indexed_pods(
    document: dict[str, Any], spec: dict[str, Any], count: int, name: str = ""
) -> Iterator[Pod]:
    name = name or metadata_name(document)
    for index in range(count):
        pod = _pod(document, spec["template"], name=f"{name}-{index}", index=index)
        yield dataclasses.replace(pod, domain=spec.get("serviceName") or pod.domain)


def _pod(
    document: dict[str, Any], template: dict[str, Any], name: str = "", index: int | None = None
) -> Pod:
    metadata, spec = template.get("metadata") or {}, template["spec"]
    parts = {part: dict(metadata.get(part) or {}) for part in ("labels", "annotations")}
    if index is not None:
        key = _INDEX_KEY["StatefulSet" if document["kind"] == "StatefulSet" else "Job"]
        parts["labels"][key] = str(index)
        if document["kind"] != "StatefulSet":
            parts["annotations"][key] = str(index)
    return Pod(
        owner=document_name(document),
        name=spec.get("hostname") or name,
        domain=spec.get("subdomain") or "",
        labels=parts["labels"],
        containers=tuple(_container(container, parts) for container in spec["containers"]),
    )


def _container(container: dict[str, Any], parts: Mapping[str, dict[str, str]]) -> Container:
    variables: dict[str, str | None] = {}
    for variable in container.get("env") or []:
        source = variable.get("valueFrom")
        if source is None:
            variables[variable["name"]] = expand(variable.get("value") or "", variables)
        else:
            path = (source.get("fieldRef") or {}).get("fieldPath") or ""
            field = _METADATA.fullmatch(path)
            # A missing label is the empty string.
            value = None if field is None else parts[field["part"]].get(field["key"], "")
            variables[variable["name"]] = value
    ports = frozenset(port["containerPort"] for port in container.get("ports") or [])
    return Container(variables, ports)
