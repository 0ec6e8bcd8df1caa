"""KubeRay manifests of a training cluster."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.cli.manifests.rendering import Template, packaged_template
from stratagem.cli.manifests.variable_rules import RAY, check_name_length, check_values

RAY_TEMPLATE = "ray.yaml.jinja"
"""File name of the packaged template."""

# KubeRay's limits: it appends to these names.
_MAX_NAME_LETTERS = {"RayCluster": 53, "RayJob": 47}


def ray_template() -> str:
    """Returns the text of the packaged template; a `{% set %}` line defines each variable."""
    return packaged_template(RAY_TEMPLATE)


def render_ray(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = RAY_TEMPLATE,
) -> str:
    """Returns the manifests of a Ray cluster that runs programs of remote clients.

    They are YAML for `kubectl create -f -`, and need the KubeRay operator. With a `script`, the
    cluster runs it and ends (a RayJob). Arguments and errors as in `render_kubernetes`.

    Example:
        >>> from stratagem.cli.manifests import render_ray
        >>> "kind: RayCluster" in render_ray({"name": "train", "worker_replicas": 3})
        True
    """
    own = Template(ray_template() if template is None else template, name)
    values = own.values(overrides or {})
    check_values(values, RAY)
    kind = "RayJob" if values.get("script") else "RayCluster"
    check_name_length(str(values.get("name", "")), kind, _MAX_NAME_LETTERS[kind])
    return own.render(overrides)
