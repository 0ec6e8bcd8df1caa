"""Manifests of a training cluster on Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.manifests.cluster_checks import cluster_problems
from stratagem.manifests.documents import Problem, parse_documents
from stratagem.manifests.rendering import Template, packaged_template
from stratagem.manifests.schemas import kubernetes_versions, schema_problems
from stratagem.manifests.settings import KUBERNETES, check_pod_names, check_settings

__all__ = ["KUBERNETES_TEMPLATE", "kubernetes_template", "render_kubernetes", "validate_kubernetes"]

KUBERNETES_TEMPLATE = "template.yaml.jinja"
"""What the packaged template is called."""


def kubernetes_template() -> str:
    """Returns the packaged template, as a text to edit.

    Returns:
        The text; its head has a `{% set %}` line for each variable.

    Source: tensorflow/ecosystem, distribution_strategy/template.yaml.jinja: the variables' names.
    """
    return packaged_template(KUBERNETES_TEMPLATE)


def render_kubernetes(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = KUBERNETES_TEMPLATE,
) -> str:
    """Renders the manifests of a training cluster.

    Args:
        overrides: values of the template's variables, as text or as they are.
        template: text of a template of one's own; the packaged one without it.
        name: what errors call the template.

    Returns:
        YAML for `kubectl create -f -`.

    Raises:
        ImportError: Jinja is not installed.
        ValueError: a variable that the template does not have, a value that it cannot take, or a
            template that cannot be filled in.

    Example:
        >>> from stratagem.manifests import render_kubernetes
        >>> manifests = render_kubernetes({"name": "train", "worker_replicas": 3})
        >>> "train-worker-2.train-worker:5000" in manifests
        True
    """
    own = Template(kubernetes_template() if template is None else template, name)
    values = own.values(overrides or {})
    check_settings(values, KUBERNETES)
    check_pod_names(values)
    return own.render(overrides)


def validate_kubernetes(manifests: str, kubernetes_version: str | None = None) -> list[Problem]:
    """Says what is wrong in manifests, without asking a cluster.

    Each document is held against the schema of its kind, in which no unknown key is allowed. If
    all fit, the `TF_CONFIG` of every pod is compared with the pods and the Services.

    Args:
        manifests: YAML.
        kubernetes_version: a version such as "1.33"; the newest that is installed without it.

    Returns:
        The problems; none where all is right.

    Raises:
        ImportError: kubernetes-validate is not installed.
        ValueError: the version's schemas are not there.

    Example:
        >>> from stratagem.manifests import validate_kubernetes
        >>> (problem,) = validate_kubernetes("{apiVersion: v1, kind: Service, spec: {prots: []}}")
        >>> print(problem)
        Service/(no name): spec: Additional properties are not allowed ('prots' was unexpected)
    """
    version = kubernetes_version or kubernetes_versions()[-1]
    # "v1.33.2", as kubectl writes it: schemas are those of a minor version.
    version = ".".join(version.removeprefix("v").split(".")[:2])
    documents, problems = parse_documents(manifests)
    for document in documents:
        problems += schema_problems(document, version)
    return problems or cluster_problems(documents)
