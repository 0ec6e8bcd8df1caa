"""DistributeConfig: strategies for training and evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cluster.roles import normalize_cluster_spec
from stratagem.cluster.spec import ClusterSpec
from stratagem.messages import explain
from stratagem.strategies.base.strategy import Strategy


@dataclasses.dataclass(frozen=True, eq=False)
class DistributeConfig:
    """Strategies for training and evaluation, and the cluster of a standalone client.

    Args:
        train_distribute: the training strategy, or a function without arguments that creates it,
            such as a strategy class; None for one device.
        eval_distribute: the evaluation strategy, in the same form.
        remote_cluster: a cluster to run on as a client, without being one of its tasks: a
            `ClusterSpec`, or a dict that it accepts.

    Raises:
        TypeError: if a strategy has the wrong type.
        ValueError: if `remote_cluster` is not a valid cluster.

    Example:
        >>> strategy = sg.MirroredStrategy()
        >>> both = sg.estimator.DistributeConfig(strategy, strategy)
        >>> sg.estimator.RunConfig(experimental_distribute=both).eval_distribute is strategy
        True

    Source: TF 2.21 distribute_config.py, DistributeConfig.
    """

    train_distribute: Strategy | Callable[[], Strategy] | None = None
    eval_distribute: Strategy | Callable[[], Strategy] | None = None
    remote_cluster: ClusterSpec | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_strategy("train_distribute", self.train_distribute)
        check_strategy("eval_distribute", self.eval_distribute)
        if self.remote_cluster is not None:
            spec = normalize_cluster_spec(self.remote_cluster)
            object.__setattr__(self, "remote_cluster", spec)


def check_strategy(name: str, strategy: object) -> None:
    """Raises TypeError unless the argument is a strategy, a callable or None."""
    if strategy is not None and not isinstance(strategy, Strategy) and not callable(strategy):
        raise TypeError(
            explain(
                f"{name}={strategy!r} is of type {type(strategy).__name__}.",
                expected="a strategy, a function that returns one, or None for one device.",
                fix=f"pass {name}=sg.MirroredStrategy(), for example.",
            )
        )
