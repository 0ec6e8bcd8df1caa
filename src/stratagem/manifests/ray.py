"""The Ray form of a training cluster on Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.manifests.rendering import Template, packaged_template
from stratagem.manifests.settings import RAY, check_settings

__all__ = ["RAY_TEMPLATE", "ray_template", "render_ray"]

RAY_TEMPLATE = "ray.yaml.jinja"
"""What the packaged template is called."""


def ray_template() -> str:
    """Returns the packaged template, as a text to edit.

    Returns:
        The text; its head has a `{% set %}` line for each variable.
    """
    return packaged_template(RAY_TEMPLATE)


def render_ray(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = RAY_TEMPLATE,
) -> str:
    """Renders the manifests of a Ray cluster that takes programs of clients.

    Args:
        overrides: values of the template's variables, as text or as they are.
        template: text of a template of one's own; the packaged one without it.
        name: what errors call the template.

    Returns:
        YAML for `kubectl create -f -`, where the KubeRay operator is installed.

    Raises:
        ImportError: Jinja is not installed.
        ValueError: a variable that the template does not have, a value that it cannot take, or a
            template that cannot be filled in.

    Example:
        >>> from stratagem.manifests import render_ray
        >>> "kind: RayCluster" in render_ray({"name": "train", "worker_replicas": 3})
        True
    """
    own = Template(ray_template() if template is None else template, name)
    check_settings(own.values(overrides or {}), RAY)
    return own.render(overrides)
