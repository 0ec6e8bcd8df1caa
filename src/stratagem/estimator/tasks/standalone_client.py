"""An Estimator whose program is the client of a cluster: it is sent there, and runs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stratagem.cluster import ClusterSpec
from stratagem.cluster.roles import task_count
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.remote import RemoteCluster

__all__ = ["remote_cluster_of", "run_remotely"]

_EVALUATOR = ("evaluator", 0)


def remote_cluster_of(config: RunConfig) -> ClusterSpec | None:
    """Returns the cluster that a program is the client of; None where it is none.

    Args:
        config: names it.
    """
    both = config.experimental_distribute
    cluster: Any = None if both is None else both.remote_cluster
    return cluster


def run_remotely(estimator: Any, work: Callable[..., Any], arguments: Sequence[Any] = ()) -> Any:
    """Has the tasks of a cluster call a function with an Estimator like this one.

    A cluster with parameter servers calls it once, as their coordinator; one without in each chief,
    worker and evaluator.

    Args:
        estimator: its model function, parameters and settings are sent.
        work: the function, of an Estimator and the arguments.
        arguments: what else it is called with.

    Returns:
        What it returns in the evaluator, where one calls it, and else in the first task.

    Raises:
        TypeError: something that cannot be sent; the message names it.
        DeadlineExceededError: servers are missing. Otherwise what it raises.
    """
    cluster = remote_cluster_of(estimator.config)
    assert cluster is not None
    is_lockstep = not task_count(cluster, "ps")
    has_evaluator = is_lockstep and task_count(cluster, _EVALUATOR[0]) > 0
    return RemoteCluster(cluster).run(
        work, (estimator, *arguments), answer_of=_EVALUATOR if has_evaluator else None
    )
