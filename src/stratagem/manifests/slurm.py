"""Slurm batch scripts of a training job."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stratagem.manifests.rendering import Template, packaged_template
from stratagem.manifests.variable_rules import SLURM, check_values
from stratagem.messages import explain

__all__ = ["SLURM_TEMPLATE", "render_slurm", "slurm_template"]

SLURM_TEMPLATE = "slurm.sh.jinja"
"""File name of the packaged template."""


def slurm_template() -> str:
    """Returns the text of the packaged template; a `{% set %}` line defines each variable."""
    return packaged_template(SLURM_TEMPLATE)


def render_slurm(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = SLURM_TEMPLATE,
    *,
    nodes: int | None = None,
) -> str:
    """Returns the batch script of a training job, for `sbatch`.

    `nodes` sets `worker_replicas`, or else `tasks_per_node`, unless `overrides` does; None uses as
    many nodes as the workers need. Otherwise as `render_kubernetes`, and ValueError if the workers
    do not need exactly `nodes` nodes.

    Example:
        >>> from stratagem.manifests import render_slurm
        >>> script = render_slurm({"tasks_per_node": 4}, nodes=2)
        >>> "#SBATCH --ntasks=8" in script
        True
    """
    own = Template(slurm_template() if template is None else template, name)
    values = own.values(overrides or {})
    check_values(values, SLURM)
    updated = dict(overrides or {})
    if nodes is not None:
        updated = _fit_to_nodes(nodes, updated, values)
    return own.render(updated)


def _fit_to_nodes(
    nodes: int, updated: dict[str, object], values: Mapping[str, int]
) -> dict[str, object]:
    """Returns the overrides, with workers or tasks per node derived from the number of nodes."""
    if nodes < 1:
        raise ValueError(
            explain(
                f"nodes={nodes} is not a number of nodes.",
                expected="at least one node.",
                fix="request 1 or more.",
            )
        )
    workers, on_a_node = values["worker_replicas"], values["tasks_per_node"]
    if "worker_replicas" not in updated:
        return {**updated, "worker_replicas": nodes * on_a_node}
    if "tasks_per_node" not in updated:
        on_a_node = math.ceil(workers / nodes)
    if math.ceil(workers / on_a_node) != nodes:
        raise ValueError(
            explain(
                f"{workers} workers at {on_a_node} per node need {math.ceil(workers / on_a_node)} "
                f"nodes, but {nodes} were requested.",
                expected="exactly as many nodes as the workers need.",
                fix="omit the number of nodes, of workers, or of tasks per node.",
            )
        )
    return {**updated, "tasks_per_node": on_a_node}
