"""Training strategy of an Estimator, created in the process that uses it."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from typing import Any

from stratagem import environment
from stratagem.errors import explain
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.launch.remote.jobs.lockstep import JOB_VARIABLE
from stratagem.parameter_server.strategy.parameter_server_strategy import ParameterServerStrategy
from stratagem.resources import Closing
from stratagem.strategies.base.strategy import Strategy

# TensorFlow's default in a cluster with parameter servers.
_INDEPENDENT_WORKERS = functools.partial(ParameterServerStrategy, independent=True)

# All Estimators of this process that name the same factory share its strategy.
_strategies: dict[Callable[[], Any], Strategy] = {}


def training_strategy(config: RunConfig) -> Strategy | None:
    """Returns this process's training strategy, creating it if necessary; None for one device."""
    strategy = config.train_distribute
    if strategy is None and config.num_ps_replicas:
        # A job sent by a client runs once in such a cluster, not in each worker.
        is_sent = environment.lookup(JOB_VARIABLE) is not None
        strategy = ParameterServerStrategy if is_sent else _INDEPENDENT_WORKERS
    if strategy is None and config.num_worker_replicas > 1:
        raise ValueError(
            explain(
                f"{config.num_worker_replicas} tasks of {config.cluster_spec!r} cannot train "
                "together without a strategy or parameter servers.",
                expected="a multi-worker strategy, or parameter servers in TF_CONFIG.",
                fix="pass RunConfig(train_distribute=sg.MultiWorkerMirroredStrategy), or add ps "
                "tasks to TF_CONFIG.",
                code="SG902",
            )
        )
    return resolve_strategy(strategy)


def resolve_strategy(factory: Strategy | Callable[[], Any] | None) -> Strategy | None:
    """Returns a strategy; a factory is called once per process, and None stays None."""
    if factory is None or isinstance(factory, Strategy):
        return factory
    if factory not in _strategies:
        strategy = factory()
        if not isinstance(strategy, Strategy):
            raise TypeError(
                explain(
                    f"{factory!r} returned {strategy!r} of type {type(strategy).__name__}.",
                    expected="a strategy.",
                    fix="pass a strategy class, or lambda: sg.MirroredStrategy().",
                )
            )
        _strategies[factory] = strategy
        atexit.unregister(_close_at_exit)
        atexit.register(_close_at_exit)  # runs before the strategy's own exit handlers
    return _strategies[factory]


def close_strategies() -> None:
    """Closes all strategies created by factories; parameter servers end with their leader."""
    while _strategies:
        _, strategy = _strategies.popitem()
        if isinstance(strategy, Closing):
            strategy.close()


def _close_at_exit() -> None:
    """Closes strategies, waiting for other workers, unless this program failed."""
    if getattr(sys, "last_value", None) is None:
        close_strategies()
