"""Standalone clients: runs an Estimator's work on a remote cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stratagem.cluster.roles import task_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.launch.remote.remote_cluster import RemoteCluster

if TYPE_CHECKING:
    from stratagem.estimator.estimator import Estimator
    from stratagem.estimator.estimator_protocol import EstimatorProtocol


_EVALUATOR = ("evaluator", 0)


def remote_cluster_of(config: RunConfig) -> ClusterSpec | None:
    """Returns the cluster that this program is a client of, or None."""
    both = config.experimental_distribute
    cluster: Any = None if both is None else both.remote_cluster
    return cluster


def run_remotely(
    estimator: Estimator | EstimatorProtocol,
    work: Callable[..., Any],
    arguments: Sequence[Any] = (),
) -> Any:
    """Calls a function with a copy of the Estimator: on the coordinator, or else on every task."""
    cluster = remote_cluster_of(estimator.config)
    assert cluster is not None
    is_lockstep = not task_count(cluster, "ps")
    has_evaluator = is_lockstep and task_count(cluster, _EVALUATOR[0]) > 0
    return RemoteCluster(cluster).run(
        work, (estimator, *arguments), answer_of=_EVALUATOR if has_evaluator else None
    )
