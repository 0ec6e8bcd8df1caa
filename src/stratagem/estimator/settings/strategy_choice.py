"""The strategy that an Estimator trains with, made in the process that needs it."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from typing import Any

from stratagem import environment
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.messages import explain
from stratagem.remote.jobs.job_plan import JOB_VARIABLE
from stratagem.servers.closing import Closing
from stratagem.strategies import ParameterServerStrategy, Strategy

__all__ = ["close_made", "made_strategy", "strategy_of_training"]

# What TensorFlow did in a cluster with parameter servers where nobody asked for a strategy.
_ON_PARAMETER_SERVERS = functools.partial(ParameterServerStrategy, independent=True)

# What was made by a function is the strategy of all Estimators of this process that name it.
_made: dict[Callable[[], Any], Strategy] = {}


def strategy_of_training(config: RunConfig) -> Strategy | None:
    """Returns the strategy that this process trains with; makes it, if need be.

    Args:
        config: names it. Without one a cluster with parameter servers trains on these.

    Returns:
        The strategy; None for one device.

    Raises:
        TypeError: what was to make it has made something else.
        ValueError: several workers, and nothing by which they train one model.
    """
    given = config.train_distribute
    if given is None and config.num_ps_replicas:
        # What a client has sent runs once in such a cluster, and not in each worker.
        is_sent = environment.lookup(JOB_VARIABLE) is not None
        given = ParameterServerStrategy if is_sent else _ON_PARAMETER_SERVERS
    if given is None and config.num_worker_replicas > 1:
        raise ValueError(
            explain(
                f"{config.num_worker_replicas} tasks of {config.cluster_spec!r} are to train, "
                "without a strategy and without parameter servers.",
                expected="something by which they train one model.",
                fix="pass RunConfig(train_distribute=sg.MultiWorkerMirroredStrategy), or name ps "
                "tasks in TF_CONFIG.",
            )
        )
    return made_strategy(given)


def made_strategy(given: Strategy | Callable[[], Any] | None) -> Strategy | None:
    """Returns a strategy; calls what makes it, the first time.

    Args:
        given: the strategy, a function without arguments that makes it, or None.

    Returns:
        The strategy; the same one for the same function. None for None.

    Raises:
        TypeError: the function has made something else.
    """
    if given is None or isinstance(given, Strategy):
        return given
    if given not in _made:
        strategy = given()
        if not isinstance(strategy, Strategy):
            raise TypeError(
                explain(
                    f"{given!r} has made {strategy!r} of type {type(strategy).__name__}.",
                    expected="a strategy.",
                    fix="pass a strategy's class, or lambda: sg.MirroredStrategy().",
                )
            )
        _made[given] = strategy
        atexit.unregister(_close_at_the_end)
        atexit.register(_close_at_the_end)  # runs before what the strategy has registered
    return _made[given]


def close_made() -> None:
    """Closes the strategies that functions have made: parameter servers end with their leader."""
    while _made:
        _, strategy = _made.popitem()
        if isinstance(strategy, Closing):
            strategy.close()


def _close_at_the_end() -> None:
    """Waits for the other workers, unless this program has failed: then all of them end."""
    if getattr(sys, "last_value", None) is None:
        close_made()
