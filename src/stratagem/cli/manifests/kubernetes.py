"""Kubernetes manifests of a training cluster: rendering and offline validation."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.cli.manifests.cluster_checks import cluster_problems
from stratagem.cli.manifests.custom_resources import CustomResources, UncheckedRule
from stratagem.cli.manifests.documents import Problem, parse_documents
from stratagem.cli.manifests.rendering import Template, packaged_template
from stratagem.cli.manifests.schemas import kubernetes_versions, schema_problems
from stratagem.cli.manifests.variable_rules import KUBERNETES, check_pod_names, check_values

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
        >>> from stratagem.cli.manifests import render_kubernetes
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
        >>> from stratagem.cli.manifests import validate_kubernetes
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
