"""Slurm batch scripts of a training job."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stratagem.cli.manifests.rendering import Template, packaged_template
from stratagem.cli.manifests.variable_rules import SLURM, check_values
from stratagem.messages import explain

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
    many nodes as the tasks need. The nodes of servers count unless they are `heterogeneous`.
    Otherwise as `render_kubernetes`, and ValueError if the tasks do not need exactly `nodes` nodes,
    or for an array of heterogeneous jobs, which Slurm does not have.

    Example:
        >>> from stratagem.cli.manifests import render_slurm
        >>> script = render_slurm({"tasks_per_node": 4}, nodes=2)
        >>> "#SBATCH --ntasks=8" in script
        True
    """
    own = Template(slurm_template() if template is None else template, name)
    values = own.values(overrides or {})
    check_values(values, SLURM)
    if values.get("heterogeneous") and values.get("array"):
        raise ValueError(
            explain(
                f"array={values['array']!r} was given with heterogeneous=True.",
                expected="one of them: Slurm has no arrays of heterogeneous jobs.",
                fix="omit heterogeneous, or submit several jobs.",
            )
        )
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
    num_servers = 0 if values.get("heterogeneous") else values.get("ps_replicas", 0)
    others = num_servers + 1 if num_servers else 0  # and the coordinator
    if "worker_replicas" not in updated:
        workers = nodes * on_a_node - others
    elif "tasks_per_node" not in updated:
        on_a_node = math.ceil((workers + others) / nodes)
    check_values({"worker_replicas": workers}, SLURM)
    needed = math.ceil((workers + others) / on_a_node)
    if needed != nodes:
        servers = f" and {others} tasks of servers" if others else ""
        raise ValueError(
            explain(
                f"{workers} workers{servers} at {on_a_node} per node need {needed} nodes, but "
                f"{nodes} were requested.",
                expected="exactly as many nodes as the tasks need.",
                fix="omit the number of nodes, of workers, or of tasks per node.",
            )
        )
    return {**updated, "worker_replicas": workers, "tasks_per_node": on_a_node}
