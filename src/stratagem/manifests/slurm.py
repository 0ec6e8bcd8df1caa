"""Batch scripts of a training job on Slurm."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stratagem.manifests.rendering import Template, packaged_template
from stratagem.manifests.settings import SLURM, check_settings
from stratagem.messages import explain

__all__ = ["SLURM_TEMPLATE", "render_slurm", "slurm_template"]

SLURM_TEMPLATE = "slurm.sh.jinja"
"""What the packaged template is called."""


def slurm_template() -> str:
    """Returns the packaged template, as a text to edit.

    Returns:
        The text; its head has a `{% set %}` line for each variable.
    """
    return packaged_template(SLURM_TEMPLATE)


def render_slurm(
    overrides: Mapping[str, object] | None = None,
    template: str | None = None,
    name: str = SLURM_TEMPLATE,
    *,
    nodes: int | None = None,
) -> str:
    """Renders the batch script of a training job.

    Args:
        overrides: values of the template's variables, as text or as they are.
        template: text of a template of one's own; the packaged one without it.
        name: what errors call the template.
        nodes: how many nodes; it decides `worker_replicas`, or else `tasks_per_node`, where
            `overrides` does not. Without it as many as the workers need.

    Returns:
        A script for `sbatch`.

    Raises:
        ImportError: Jinja is not installed.
        ValueError: a variable that the template does not have, a value that it cannot take, or a
            template that cannot be filled in; workers that do not need so many nodes, or more.

    Example:
        >>> from stratagem.manifests import render_slurm
        >>> script = render_slurm({"tasks_per_node": 4}, nodes=2)
        >>> "#SBATCH --ntasks=8" in script
        True
    """
    own = Template(slurm_template() if template is None else template, name)
    values = own.values(overrides or {})
    check_settings(values, SLURM)
    given = dict(overrides or {})
    if nodes is not None:
        given = _on_nodes(nodes, given, values)
    return own.render(given)


def _on_nodes(nodes: int, given: dict[str, object], values: Mapping[str, int]) -> dict[str, object]:
    """The overrides, with as many workers as the nodes take, or as many to a node as needed."""
    if nodes < 1:
        raise ValueError(
            explain(f"nodes={nodes}.", expected="at least one node.", fix="ask for 1 or more.")
        )
    workers, on_a_node = values["worker_replicas"], values["tasks_per_node"]
    if "worker_replicas" not in given:
        return {**given, "worker_replicas": nodes * on_a_node}
    if "tasks_per_node" not in given:
        on_a_node = math.ceil(workers / nodes)
    if math.ceil(workers / on_a_node) != nodes:
        raise ValueError(
            explain(
                f"{workers} workers, {on_a_node} on a node, need {math.ceil(workers / on_a_node)} "
                f"nodes; {nodes} were asked for.",
                expected="as many nodes as the workers need.",
                fix="leave out the nodes, the workers, or the workers of a node.",
            )
        )
    return {**given, "tasks_per_node": on_a_node}
