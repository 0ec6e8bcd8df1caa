"""Which strategies an Estimator runs under."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.cluster import ClusterSpec, normalize_cluster_spec
from stratagem.messages import explain
from stratagem.strategies import Strategy

__all__ = ["DistributeConfig", "check_strategy"]


@dataclasses.dataclass(frozen=True, eq=False)
class DistributeConfig:
    """The strategies of training and of evaluation, and the cluster of a standalone client.

    Args:
        train_distribute: the strategy of training, or a function without arguments that makes it,
            such as its class; None for one device.
        eval_distribute: likewise of evaluation.
        remote_cluster: the servers that this program uses as their client, without being a task of
            the cluster itself: a `ClusterSpec`, or a dict as it takes.

    Raises:
        TypeError: something that is no strategy.
        ValueError: a remote cluster that is no cluster.

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
    """Raises unless an argument is a strategy, a function, or None.

    Args:
        name: the argument.
        strategy: its value.

    Raises:
        TypeError: another type.
    """
    if strategy is not None and not isinstance(strategy, Strategy) and not callable(strategy):
        raise TypeError(
            explain(
                f"{name}={strategy!r} is of type {type(strategy).__name__}.",
                expected="a strategy, a function that makes one, or None for one device.",
                fix=f"pass {name}=sg.MirroredStrategy(), for example.",
            )
        )
