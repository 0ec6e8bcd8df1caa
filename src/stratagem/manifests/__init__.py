"""Templates and offline validation of Kubernetes, KubeRay and Slurm job descriptions.

Importing it loads neither JAX nor Keras; Jinja, PyYAML and the schemas are loaded on first use.
"""

from stratagem.manifests.custom_resources import CustomResources, UncheckedRule, read_definitions
from stratagem.manifests.documents import Problem
from stratagem.manifests.kubernetes import (
    KUBERNETES_TEMPLATE,
    kubernetes_template,
    render_kubernetes,
    unchecked_rules,
    validate_kubernetes,
)
from stratagem.manifests.ray import RAY_TEMPLATE, ray_template, render_ray
from stratagem.manifests.rendering import Template
from stratagem.manifests.schemas import kubernetes_versions
from stratagem.manifests.slurm import SLURM_TEMPLATE, render_slurm, slurm_template

__all__ = [
    "CustomResources",
    "KUBERNETES_TEMPLATE",
    "Problem",
    "RAY_TEMPLATE",
    "SLURM_TEMPLATE",
    "Template",
    "UncheckedRule",
    "kubernetes_template",
    "kubernetes_versions",
    "ray_template",
    "read_definitions",
    "render_kubernetes",
    "render_ray",
    "render_slurm",
    "slurm_template",
    "unchecked_rules",
    "validate_kubernetes",
]
