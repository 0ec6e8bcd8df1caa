"""Hooks that end training when evaluations say so."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from stratagem.collectives import host
from stratagem.estimator.estimator_protocol import EstimatorProtocol, check_estimator
from stratagem.estimator.hooks import (
    AgreedTimer,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.hooks.timers import Clock
from stratagem.estimator.loops.evaluation_record import read_eval_metrics
from stratagem.messages import explain

__all__ = [
    "EarlyStoppingHook",
    "make_early_stopping_hook",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]

_logger = logging.getLogger(__name__)


class EarlyStoppingHook(SessionRunHook):
    """Ends training when a function says so: the chief asks it, and all workers follow.

    Workers in lockstep end after the same step.

    Args:
        should_stop_fn: returns whether to end; called on the chief.
        run_every_secs: seconds between two calls, by the chief's clock.
        run_every_steps: steps between two calls.
        clock: tells the time in seconds.

    Raises:
        TypeError: a function that cannot be called.
        ValueError: not one of seconds and steps.
    """

    def __init__(
        self,
        should_stop_fn: Callable[[], bool],
        run_every_secs: float | None,
        run_every_steps: int | None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        if not callable(should_stop_fn):
            raise TypeError(
                explain(
                    f"should_stop_fn={should_stop_fn!r} cannot be called.",
                    expected="a function without arguments that returns a bool.",
                    fix="pass lambda: condition.",
                )
            )
        self._should_stop = should_stop_fn
        self._timer = AgreedTimer(run_every_secs, run_every_steps, clock=clock)

    def begin(self) -> None:
        """Counts anew."""
        self._timer.reset()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Asks, where it is time, and ends training.

        Args:
            run_context: the step.
            run_values: not used.
        """
        session = run_context.session
        step = session.global_step
        if not self._timer.should_trigger_for_step(step):
            return
        self._timer.update_last_triggered_step(step)
        own = session.is_chief and bool(self._should_stop())
        if host.broadcast_object(own, name="whether to stop early"):
            _logger.info("Training is stopped early, at step %d.", step)
            run_context.request_stop()


def make_early_stopping_hook(
    estimator: EstimatorProtocol,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> EarlyStoppingHook:
    """Returns a hook that ends training when a function says so.

    With parameter servers the workers end when the chief does. An evaluator beside training ends
    by its own limits: see `train_and_evaluate`.

    Args:
        estimator: the one that is trained.
        should_stop_fn: returns whether to end; called on the chief.
        run_every_secs: seconds between two calls; None with `run_every_steps`.
        run_every_steps: steps between two calls.

    Returns:
        A hook for `train`, on every worker.

    Raises:
        TypeError: no Estimator, or a function that cannot be called.
        ValueError: not one of seconds and steps.

    Example::

        hook = sg.estimator.make_early_stopping_hook(
            estimator, lambda: stop_file.exists(), run_every_secs=None, run_every_steps=100
        )
        estimator.train(input_fn, hooks=[hook])

    Source: tensorflow/estimator early_stopping.py, make_early_stopping_hook.
    """
    check_estimator(estimator)
    if (run_every_secs is None) == (run_every_steps is None):
        raise ValueError(
            explain(
                f"Early stopping got run_every_secs={run_every_secs} and "
                f"run_every_steps={run_every_steps}.",
                expected="one of the two.",
                fix="pass run_every_secs=None together with run_every_steps.",
            )
        )
    return EarlyStoppingHook(should_stop_fn, run_every_secs, run_every_steps)


def stop_if_higher_hook(
    estimator: EstimatorProtocol,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> EarlyStoppingHook:
    """Returns a hook that ends training when a metric was above a threshold.

    Args:
        estimator: the one that is trained.
        metric_name: "accuracy", for example.
        threshold: the number.
        eval_dir: the folder of evaluations; None for `estimator.eval_dir()`.
        min_steps: evaluations below this global step do not count.
        run_every_secs: seconds between two looks; None with `run_every_steps`.
        run_every_steps: steps between two looks.

    Returns:
        A hook for `train`, on every worker.

    Raises:
        TypeError: no Estimator.
        ValueError: not one of seconds and steps; later, a metric that evaluations do not have.

    Example::

        hook = sg.estimator.stop_if_higher_hook(estimator, "accuracy", 0.9)
        train_spec = sg.estimator.TrainSpec(input_fn, max_steps=10_000, hooks=[hook])

    Source: tensorflow/estimator early_stopping.py, stop_if_higher_hook.
    """
    check_estimator(estimator)
    history = _History(eval_dir or estimator.eval_dir(), metric_name, min_steps)
    return make_early_stopping_hook(
        estimator,
        lambda: any(value > threshold for _, value in history.read()),
        run_every_secs,
        run_every_steps,
    )


def stop_if_lower_hook(
    estimator: EstimatorProtocol,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> EarlyStoppingHook:
    """Returns a hook that ends training when a metric was below a threshold.

    Args:
        estimator: the one that is trained.
        metric_name: "loss", for example.
        threshold: the number.
        eval_dir: the folder of evaluations; None for `estimator.eval_dir()`.
        min_steps: evaluations below this global step do not count.
        run_every_secs: seconds between two looks; None with `run_every_steps`.
        run_every_steps: steps between two looks.

    Returns:
        A hook for `train`, on every worker.

    Raises:
        TypeError: no Estimator.
        ValueError: not one of seconds and steps; later, a metric that evaluations do not have.

    Example::

        hook = sg.estimator.stop_if_lower_hook(estimator, "loss", 0.1)

    Source: tensorflow/estimator early_stopping.py, stop_if_lower_hook.
    """
    check_estimator(estimator)
    history = _History(eval_dir or estimator.eval_dir(), metric_name, min_steps)
    return make_early_stopping_hook(
        estimator,
        lambda: any(value < threshold for _, value in history.read()),
        run_every_secs,
        run_every_steps,
    )


def stop_if_no_increase_hook(
    estimator: EstimatorProtocol,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> EarlyStoppingHook:
    """Returns a hook that ends training when a metric has not grown for so many steps.

    Args:
        estimator: the one that is trained.
        metric_name: "accuracy", for example.
        max_steps_without_increase: steps of training since the evaluation with the highest value.
        eval_dir: the folder of evaluations; None for `estimator.eval_dir()`.
        min_steps: evaluations below this global step do not count.
        run_every_secs: seconds between two looks; None with `run_every_steps`.
        run_every_steps: steps between two looks.

    Returns:
        A hook for `train`, on every worker.

    Raises:
        TypeError: no Estimator.
        ValueError: not one of seconds and steps; later, a metric that evaluations do not have.

    Example::

        hook = sg.estimator.stop_if_no_increase_hook(estimator, "accuracy", 1000)

    Source: tensorflow/estimator early_stopping.py, stop_if_no_increase_hook.
    """
    check_estimator(estimator)
    history = _History(eval_dir or estimator.eval_dir(), metric_name, min_steps)
    return make_early_stopping_hook(
        estimator,
        lambda: history.has_stood_still(max_steps_without_increase, sign=1),
        run_every_secs,
        run_every_steps,
    )


def stop_if_no_decrease_hook(
    estimator: EstimatorProtocol,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> EarlyStoppingHook:
    """Returns a hook that ends training when a metric has not fallen for so many steps.

    Args:
        estimator: the one that is trained.
        metric_name: "loss", for example.
        max_steps_without_decrease: steps of training since the evaluation with the lowest value.
        eval_dir: the folder of evaluations; None for `estimator.eval_dir()`.
        min_steps: evaluations below this global step do not count.
        run_every_secs: seconds between two looks; None with `run_every_steps`.
        run_every_steps: steps between two looks.

    Returns:
        A hook for `train`, on every worker.

    Raises:
        TypeError: no Estimator.
        ValueError: not one of seconds and steps; later, a metric that evaluations do not have.

    Example::

        hook = sg.estimator.stop_if_no_decrease_hook(estimator, "loss", 1000)

    Source: tensorflow/estimator early_stopping.py, stop_if_no_decrease_hook.
    """
    check_estimator(estimator)
    history = _History(eval_dir or estimator.eval_dir(), metric_name, min_steps)
    return make_early_stopping_hook(
        estimator,
        lambda: history.has_stood_still(max_steps_without_decrease, sign=-1),
        run_every_secs,
        run_every_steps,
    )


class _History:
    """The values that a metric had in the evaluations of a folder."""

    def __init__(self, eval_dir: str, metric_name: str, min_steps: int) -> None:
        self._eval_dir = eval_dir
        self._metric_name = metric_name
        self._min_steps = min_steps

    def read(self) -> list[tuple[int, Any]]:
        """Steps and values so far."""
        found: list[tuple[int, Any]] = []
        for step, metrics in read_eval_metrics(self._eval_dir).items():
            if step < self._min_steps:
                continue
            if self._metric_name not in metrics:
                raise ValueError(
                    explain(
                        f"The evaluation of step {step} has no metric {self._metric_name!r}.",
                        expected=f"one of {sorted(metrics)}, as in {self._eval_dir}.",
                        fix="correct metric_name, or return the metric in eval_metric_ops.",
                    )
                )
            found.append((step, metrics[self._metric_name]))
        return found

    def has_stood_still(self, max_steps: int, *, sign: int) -> bool:
        """Whether after the best value, with sign 1 the highest, none was better for so long."""
        best, best_step = None, 0
        for step, value in self.read():
            if best is None or sign * value > sign * best:
                best, best_step = value, step
            if step - best_step >= max_steps:
                return True
        return False
