"""Reference expansion of Jobs, JobSets and StatefulSets into pods, written from their docs.

Nothing here is shared with `stratagem.cli.manifests`, whose templates the tests compare with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import yaml


# The one in C is ten times as fast.
class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Refuses a key that is there twice, as Kubernetes does."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: a key is there twice: {keys}"
        return super().construct_mapping(node, deep=deep)


@dataclasses.dataclass(frozen=True)
class StartedPod:
    """A pod as its process sees it."""

    host: str
    labels: dict[str, str]
    environment: dict[str, str]
    arguments: list[str]
    container: dict[str, Any]
    spec: dict[str, Any]


def documents(manifests: str) -> list[dict[str, Any]]:
    return [
        document for document in yaml.load_all(manifests, _StrictLoader) if document is not None
    ]


def by_kind(manifests: str, kind: str) -> dict[str, dict[str, Any]]:
    found = [document for document in documents(manifests) if document["kind"] == kind]
    return {document["metadata"]["name"]: document for document in found}


def pod_specs(manifests: str) -> list[dict[str, Any]]:
    """Specs of all pods, wherever they are in the documents."""
    found: list[dict[str, Any]] = []

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            if "containers" in value:
                found.append(value)
            for part in value.values():
                visit(part)
        elif isinstance(value, list):
            for part in value:
                visit(part)

    visit(documents(manifests))
    return found


def _jobs(manifests: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Names, domains and specs of the Jobs that are there or that a JobSet makes."""
    for name, job in by_kind(manifests, "Job").items():
        yield name, job["spec"]["template"]["spec"]["subdomain"], job["spec"]
    sets = {name: one["spec"] for name, one in by_kind(manifests, "JobSet").items()}
    for name, train_job in by_kind(manifests, "TrainJob").items():
        reference = train_job["spec"]["runtimeRef"]
        runtime = by_kind(manifests, reference["kind"])[reference["name"]]["spec"]
        sets[name] = runtime["template"]["spec"]
        (node,) = (one for one in sets[name]["replicatedJobs"] if one["name"] == "node")
        assert node["template"]["spec"]["completions"] == runtime["mlPolicy"]["numNodes"]
        assert node["template"]["metadata"]["labels"] == {
            "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
        }
    for name, spec in sets.items():
        assert spec["network"]["enableDNSHostnames"] is True
        assert spec["network"]["publishNotReadyAddresses"] is True
        for one in spec["replicatedJobs"]:
            assert one.get("replicas", 1) == 1
            yield f"{name}-{one['name']}-0", spec["network"]["subdomain"], one["template"]["spec"]


def started_pods(manifests: str) -> Iterator[StartedPod]:
    secrets = {name: one["stringData"] for name, one in by_kind(manifests, "Secret").items()}
    for name, domain, job in _jobs(manifests):
        assert job["completionMode"] == "Indexed"
        assert job["parallelism"] == job["completions"]
        for index in range(job["completions"]):
            key = "batch.kubernetes.io/job-completion-index"
            fields = {
                f"metadata.annotations['{key}']": str(index),
                f"metadata.labels['{key}']": str(index),
            }
            host = f"{name}-{index}.{domain}"
            yield _start(job["template"], host, fields, {key: str(index)}, secrets)
    for name, stateful in by_kind(manifests, "StatefulSet").items():
        for index in range(stateful["spec"]["replicas"]):
            key = "apps.kubernetes.io/pod-index"
            host = f"{name}-{index}.{stateful['spec']['serviceName']}"
            fields = {f"metadata.labels['{key}']": str(index)}
            yield _start(stateful["spec"]["template"], host, fields, {key: str(index)}, secrets)


def _start(
    template: dict[str, Any],
    host: str,
    fields: dict[str, str],
    labels: dict[str, str],
    secrets: dict[str, dict[str, str]],
) -> StartedPod:
    (container,) = template["spec"]["containers"]
    environment: dict[str, str] = {}
    for variable in container["env"]:
        if "value" in variable:
            environment[variable["name"]] = expanded(variable["value"], environment)
        elif "secretKeyRef" in variable["valueFrom"]:
            one = variable["valueFrom"]["secretKeyRef"]
            environment[variable["name"]] = secrets.get(one["name"], {}).get(one["key"], "")
        else:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            environment[variable["name"]] = fields[path]
    return StartedPod(
        host=host,
        labels={**template["metadata"]["labels"], **labels},
        environment=environment,
        arguments=[expanded(text, environment) for text in container["args"]],
        container=container,
        spec=template["spec"],
    )


def expanded(text: str, variables: dict[str, str]) -> str:
    """Reads letter by letter: `$$` is a dollar sign, `$(NAME)` a variable if there is one."""
    result, place = "", 0
    while place < len(text):
        if text.startswith("$$", place):
            result, place = result + "$", place + 2
        elif text.startswith("$(", place) and ")" in text[place:]:
            end = text.index(")", place)
            name = text[place + 2 : end]
            result += variables.get(name, f"$({name})")
            place = end + 1
        else:
            result, place = result + text[place], place + 1
    return result
