"""Kubernetes manifests of a training cluster: rendering and offline validation."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from stratagem.cli.manifests.custom_resources import (
    CustomResources,
    Problem,
    UncheckedRule,
    document_name,
    metadata_name,
    parse_documents,
)
from stratagem.cli.manifests.rendering import MAX_VARIABLE_BYTES, Template, packaged_template
from stratagem.cli.manifests.variable_rules import KUBERNETES, check_pod_names, check_values
from stratagem.environment import load
from stratagem.errors import explain

# Pods that a manifest creates, with their names, labels and environments.

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


# Consistency checks of `TF_CONFIG` against the pods and Services of a manifest.

_Cluster = dict[str, dict[int, str]]


def cluster_problems(documents: list[dict[str, Any]]) -> list[Problem]:
    """Compares `TF_CONFIG` of every pod with the pods and Services of valid documents."""
    pods = list(pods_of(documents))
    services = services_of(documents)
    problems: dict[Problem, None] = {}
    clusters: dict[str, tuple[Pod, _Cluster]] = {}
    tasks: Counter[tuple[str, int]] = Counter()
    for pod in pods:
        for container in pod.containers:
            text = container.environment.get("TF_CONFIG")
            if text is None:
                continue
            try:
                cluster, task = _parse_tf_config(text)
            except ValueError as error:
                problems[Problem(pod.owner, _location(pod), str(error))] = None
                continue
            tasks[task] += 1
            clusters.setdefault(json.dumps(cluster, sort_keys=True), (pod, cluster))
            for message in _address_problems(pod, container, cluster, task, services):
                problems[Problem(pod.owner, _location(pod), message)] = None
    problems |= dict.fromkeys(
        _cluster_wide_problems(list(clusters.values()), tasks, pods, services)
    )
    return list(problems)


def _location(pod: Pod) -> str:
    return f"pod {pod.name}: TF_CONFIG" if pod.name else "TF_CONFIG"


def _parse_tf_config(text: str) -> tuple[_Cluster, tuple[str, int]]:
    """Parses a `TF_CONFIG` into its cluster and its task."""
    num_bytes = len(f"TF_CONFIG={text}\0".encode())
    if num_bytes > MAX_VARIABLE_BYTES:
        raise ValueError(f"{num_bytes} bytes, but Linux allows at most {MAX_VARIABLE_BYTES}")
    try:
        config = json.loads(text)
        cluster = {job: _addresses(tasks) for job, tasks in config["cluster"].items()}
        task = str(config["task"]["type"]), int(config["task"]["index"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"not JSON with a cluster and a task ({type(error).__name__}: {error}): {text[:200]}"
        ) from error
    if task[1] not in cluster.get(task[0], {}):
        raise ValueError(f"task {task[0]} {task[1]} is not in the cluster")
    return cluster, task


def _addresses(tasks: dict[Any, Any] | list[Any]) -> dict[int, str]:
    pairs = tasks.items() if isinstance(tasks, dict) else enumerate(tasks)
    return {int(index): str(address) for index, address in pairs}


def _address_problems(
    pod: Pod,
    container: Container,
    cluster: _Cluster,
    task: tuple[str, int],
    services: dict[Any, dict[str, Any]],
) -> Iterator[str]:
    """Yields problems with the address of the pod's task."""
    address = cluster[task[0]][task[1]]
    host, _, port = address.rpartition(":")
    if container.ports and port not in map(str, container.ports):
        ports = ", ".join(map(str, sorted(container.ports)))
        yield f"the port of its address {address!r} is not a container port ({ports})"
    service, name = _service_and_pod(host, services)
    if name is not None:
        if pod.name and (name, service) != (pod.name, pod.domain):
            yield f"its address {address!r} does not match the pod {pod.name}.{pod.domain}"
    elif service in services and not _selects(services[service], pod):
        yield f"its address {address!r} is a Service that does not select the pod"


def _cluster_wide_problems(
    clusters: list[tuple[Pod, _Cluster]],
    tasks: Counter[tuple[str, int]],
    pods: list[Pod],
    services: dict[Any, dict[str, Any]],
) -> Iterator[Problem]:
    """Yields problems with the addresses, each checked once, and with the set of tasks."""
    for pod, cluster in clusters:
        for job, addresses in cluster.items():
            for index, address in addresses.items():
                message = _unreachable_reason(address, pods, services)
                if message:
                    yield Problem(pod.owner, "TF_CONFIG", f"{job} {index}: {message}")
                if not tasks[job, index]:
                    yield Problem(pod.owner, "TF_CONFIG", f"{job} {index}: no pod runs this task")
    for (job, index), count in tasks.items():
        if count > 1:
            yield Problem("TF_CONFIG", "", f"{count} pods run the same task, {job} {index}")
    for pod, _ in clusters[1:]:
        first = clusters[0][0].owner
        yield Problem(pod.owner, "TF_CONFIG", f"its cluster differs from that of {first}")


def _unreachable_reason(address: str, pods: list[Pod], services: dict[Any, dict[str, Any]]) -> str:
    """Returns why an address is unreachable, or "" if it may be reachable."""
    service, name = _service_and_pod(address.rpartition(":")[0], services)
    if service is None:
        return ""
    if service not in services:
        return f"{address!r}: no Service is named {service!r}"
    if name is None:
        return ""
    named = [pod for pod in pods if (pod.name, pod.domain) == (name, service)]
    if not named:
        return f"{address!r}: no pod of Service {service!r} is named {name!r}"
    if not any(_selects(services[service], pod) for pod in named):
        return f"{address!r}: Service {service!r} does not select the pod"
    return ""


def _service_and_pod(
    host: str, services: dict[Any, dict[str, Any]]
) -> tuple[str | None, str | None]:
    """Returns the Service of a host name, and the pod in it if any; (None, None) for an IP."""
    if ":" in host or not any(map(str.isalpha, host)):
        return None, None
    first, *rest = host.split(".")
    return (first, None) if first in services or not rest else (rest[0], first)


def _selects(service: dict[str, Any], pod: Pod) -> bool:
    selector = (service.get("spec") or {}).get("selector") or {}
    return bool(selector) and selector.items() <= dict(pod.labels).items()


# JSON schemas of Kubernetes kinds, from kubernetes-validate, and of custom resources.
#
# The published schemas have no enumerations; `enums.json` has them, from Kubernetes' own types.
# They
# have no form of quantities either.

_REQUIREMENT = {"needed_by": "Validating manifests", "install": "'stratagem[clusters]'"}
_DEFINITIONS = "https://kubernetes.io/api/_definitions.json"
# Such as 10Gi, 0.5, 100m and 1e3.
_QUANTITY = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
# The strict schemas reject unknown keys.
_FOLDER = re.compile(r"v(\d+\.\d+)\.\d+-local-strict")


def kubernetes_versions() -> list[str]:
    """Returns the Kubernetes versions whose schemas are installed, such as "1.33", oldest first."""
    return sorted(_schema_folders(), key=lambda version: [int(part) for part in version.split(".")])


def schema_problems(
    document: dict[str, Any], version: str, custom: CustomResources | None = None
) -> list[Problem]:
    """Validates a document against the schema of its kind in a version of `kubernetes_versions`.

    `custom` has the schemas of custom resources; templates of pods and Jobs in these are also
    validated as Kubernetes does when their controller creates them.
    """
    name = document_name(document)
    kind, api_version = document.get("kind"), document.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(api_version, str):
        return [Problem(name, "", "kind or apiVersion is missing")]
    validator = _validator(version, kind, api_version)
    if validator is not None:
        return list(_schema_errors(validator, document, name))
    schema = None if custom is None else custom.schema(kind, api_version)
    if schema is None:
        return [Problem(name, "", _unknown_kind(version, kind, api_version))]
    problems = list(_schema_errors(_new_validator(version, schema), document, name))
    for path, definition, template in _templates(document, ""):
        inner = _new_validator(version, {"$ref": f"{_DEFINITIONS}#/$defs/{definition}"})
        problems += _schema_errors(inner, template, name, path)
    return list({(one.path, one.message): one for one in problems}.values())


def _unknown_kind(version: str, kind: str, api_version: str) -> str:
    message = f"Kubernetes {version} has no {kind} in {api_version}"
    group = api_version.partition("/")[0]
    if "." not in group:
        return message
    return f"{message}; pass its definition with --crds, from: kubectl get crd -o yaml"


def _templates(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yields the path, the definition and the value of each template of a pod or a Job."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        place = _join(path, key)
        definition = _template_definition(part)
        if definition:
            yield place, definition, part
        elif isinstance(part, dict | list):
            yield from _templates(part, place)


def _template_definition(value: Any) -> str:
    """Returns the name of the definition of a template, or "" for another value."""
    spec = value.get("spec") if isinstance(value, dict) else None
    if not isinstance(spec, dict):
        return ""
    if "containers" in spec:
        return "io.k8s.api.core.v1.PodTemplateSpec"
    inner = _template_definition(spec.get("template"))
    return "io.k8s.api.batch.v1.JobTemplateSpec" if inner else ""


def _join(path: str, key: str | int) -> str:
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".removeprefix(".")


class _Validator(Protocol):
    """A validator of `jsonschema`."""

    def iter_errors(self, instance: object, /) -> Iterator[Any]: ...


def _schema_errors(
    validator: _Validator, document: Any, name: str, prefix: str = ""
) -> Iterator[Problem]:
    for error in validator.iter_errors(document):
        yield Problem(name, functools.reduce(_join, error.absolute_path, prefix), error.message)


@functools.cache
def _schema_folders() -> dict[str, Any]:
    load("kubernetes_validate", **_REQUIREMENT)
    root = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    found = ((_FOLDER.fullmatch(folder.name), folder) for folder in root.iterdir())
    return {match[1]: folder for match, folder in found if match}


@functools.cache
def _definitions(version: str) -> Any:
    folders = _schema_folders()
    if version not in folders:
        raise ValueError(
            explain(
                f"The schemas of Kubernetes {version!r} are not installed.",
                expected=f"one of {', '.join(kubernetes_versions())}.",
                fix="choose an installed version, or upgrade the package kubernetes-validate.",
            )
        )
    text = (folders[version] / "_definitions.json").read_text(encoding="utf-8")
    definitions = json.loads(text)
    _add_enumerations(definitions["$defs"])
    definitions["$defs"]["io.k8s.apimachinery.pkg.api.resource.Quantity"]["pattern"] = _QUANTITY
    resource = load("referencing", **_REQUIREMENT).Resource.from_contents(definitions)
    return resource @ load("referencing", **_REQUIREMENT).Registry()


def _add_enumerations(definitions: dict[str, Any]) -> None:
    file = importlib.resources.files("stratagem.cli.manifests") / "enums.json"
    for name, fields in json.loads(file.read_text(encoding="utf-8"))["fields"].items():
        properties = definitions.get(name, {}).get("properties", {})
        for field, values in fields.items():
            schema = properties.get(field.removesuffix("[]"), {})
            (schema.get("items", {}) if field.endswith("[]") else schema)["enum"] = [*values, None]


@functools.cache
def _validator(version: str, kind: str, api_version: str) -> Any:
    """Returns None if the version has no such kind."""
    # The file of "rbac.authorization.k8s.io/v1" ends in "-rbac-v1.json".
    group, slash, number = api_version.partition("/")
    suffix = f"{group.partition('.')[0]}-{number}" if slash else group
    file_name = f"{kind.lower()}-{suffix}.json"
    _definitions(version)
    file = _schema_folders()[version] / file_name
    if not re.fullmatch(r"[-.a-z0-9]+", file_name) or not file.is_file():
        return None
    return _new_validator(version, json.loads(file.read_text(encoding="utf-8")))


def _new_validator(version: str, schema: dict[str, Any]) -> Any:
    jsonschema = load("jsonschema", **_REQUIREMENT)
    validator_class = jsonschema.validators.extend(
        jsonschema.Draft202012Validator, {"uniqueKeys": _unique_keys}
    )
    return validator_class(schema, registry=_definitions(version))


def _unique_keys(
    validator: Any, keys: dict[str, Any], values: Any, schema: dict[str, Any]
) -> Iterator[Any]:
    """Yields an error for each item with the keys of an earlier one; `keys` has the defaults."""
    del validator, schema
    seen: list[list[Any]] = []
    for item in values if isinstance(values, list) else ():
        if not isinstance(item, dict):
            continue
        found = [item.get(key, default) for key, default in keys.items()]
        if found in seen:
            error = load("jsonschema", **_REQUIREMENT).ValidationError
            yield error(f"{dict(zip(keys, found, strict=True))} is listed twice")
        seen.append(found)


KUBERNETES_TEMPLATE = "template.yaml.jinja"
"""File name of the packaged template."""


def kubernetes_template() -> str:
    """Returns the text of the packaged template; a `{% set %}` line defines each variable.

    Source: tensorflow/ecosystem, distribution_strategy/template.yaml.jinja: the variables' names.
    """
    return packaged_template(KUBERNETES_TEMPLATE)


def render_kubernetes(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = KUBERNETES_TEMPLATE,
) -> str:
    """Returns the manifests of a training cluster, as YAML for `kubectl create -f -`.

    `overrides` sets template variables, as strings or as Python values. `template` is the text of a
    custom template; `name` names it in errors. Raises ImportError without Jinja, ValueError for an
    unknown variable, an invalid value or template.

    Example:
        >>> from stratagem.cli.manifests.kubernetes import render_kubernetes
        >>> manifests = render_kubernetes({"name": "train", "worker_replicas": 3})
        >>> "train-worker-2.train-worker:5000" in manifests
        True
    """
    own = Template(kubernetes_template() if template is None else template, name)
    values = own.values(overrides or {})
    check_values(values, KUBERNETES)
    check_pod_names(values)
    return own.render(overrides)


def validate_kubernetes(
    manifests: str,
    kubernetes_version: str | None = None,
    custom_resources: CustomResources | None = None,
) -> list[Problem]:
    """Returns the problems found in YAML manifests, without contacting a cluster.

    Checks each document against the schema of its kind, which rejects unknown keys. If all pass,
    compares the `TF_CONFIG` of every pod with the pods and Services. None for `kubernetes_version`
    means the newest installed. `custom_resources` are the definitions of kinds that Kubernetes does
    not have, such as JobSet, from `read_definitions`. Raises ImportError without
    kubernetes-validate, ValueError if the schemas of the version, such as "1.33", are not
    installed.

    Example:
        >>> from stratagem.cli.manifests.kubernetes import validate_kubernetes
        >>> (problem,) = validate_kubernetes("{apiVersion: v1, kind: Service, spec: {prots: []}}")
        >>> print(problem)
        Service/(no name): spec: Additional properties are not allowed ('prots' was unexpected)
    """
    version = kubernetes_version or kubernetes_versions()[-1]
    # kubectl prints "v1.33.2"; schemas are per minor version.
    version = ".".join(version.removeprefix("v").split(".")[:2])
    documents, problems = parse_documents(manifests)
    for document in documents:
        problems += schema_problems(document, version, custom_resources)
    return problems or cluster_problems(documents)


def unchecked_rules(manifests: str, custom_resources: CustomResources) -> list[UncheckedRule]:
    """Returns the rules in CEL that apply to valid manifests, which only an API server checks."""
    documents, _ = parse_documents(manifests)
    return [rule for one in documents for rule in custom_resources.unchecked_rules(one)]
