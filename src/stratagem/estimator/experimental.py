"""Early-stopping hooks driven by evaluation metrics: the names of `tf.estimator.experimental`."""

from __future__ import annotations

import dataclasses
import logging
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any

from stratagem.errors import check_type, invalid
from stratagem.estimator.estimator import Estimator
from stratagem.estimator.hooks import (
    Clock,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SynchronizedTimer,
)
from stratagem.estimator.loops import read_eval_metrics
from stratagem.strategies.collectives import host

__all__ = [
    "make_early_stopping_hook",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]

_logger = logging.getLogger(__name__)


class EarlyStoppingHook(SessionRunHook):
    """Stops training on all workers when a function returns True on the chief."""

    def __init__(
        self,
        should_stop_fn: Callable[[], bool],
        run_every_secs: float | None,
        run_every_steps: int | None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        check_type("should_stop_fn", should_stop_fn, callable, "a function that returns a bool")
        self._should_stop = should_stop_fn
        self._timer = SynchronizedTimer(run_every_secs, run_every_steps, clock=clock)

    def begin(self) -> None:
        """Resets the timer."""
        self._timer.reset()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Checks the condition when due and requests a stop."""
        session = run_context.session
        step = session.global_step
        if not self._timer.should_trigger_for_step(step):
            return
        self._timer.update_last_triggered_step(step)
        should_stop = session.is_chief and bool(self._should_stop())
        if host.broadcast_object(should_stop, name="whether to stop early"):
            _logger.info("Stopping training early at step %d.", step)
            run_context.request_stop()


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> EarlyStoppingHook:
    """Returns a hook that stops training when a function returns True.

    With parameter servers, the workers stop when the chief does. A separate evaluator stops by its
    own limits: see `train_and_evaluate`.

    Args:
        estimator: the Estimator to train.
        should_stop_fn: returns True to stop; called on the chief.
        run_every_secs: seconds between calls; None with `run_every_steps`.
        run_every_steps: steps between calls.

    Returns:
        A hook for `train`, on every worker.

    Raises:
        TypeError: if `estimator` is not an Estimator, or `should_stop_fn` is not callable.
        ValueError: unless exactly one of seconds and steps is set.

    Example:
        >>> estimator = sg.estimator.BaselineRegressor()
        >>> data = lambda: ({"x": np.zeros(2)}, np.array([1.0, 3.0]))
        >>> hook = sg.estimator.make_early_stopping_hook(
        ...     estimator, lambda: True, run_every_secs=None, run_every_steps=1)
        >>> _ = estimator.train(data, hooks=[hook], steps=1000)
        >>> int(estimator.get_variable_value("global_step"))
        1

    Source: tensorflow/estimator early_stopping.py, make_early_stopping_hook.
    """
    check_type("estimator", estimator, Estimator, "an Estimator")
    return EarlyStoppingHook(should_stop_fn, run_every_secs, run_every_steps)


def stop_if_higher_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> EarlyStoppingHook:
    """Returns a hook that stops training once a metric exceeds a threshold.

    Args:
        estimator: the Estimator to train.
        metric_name: a metric of the evaluation, for example "accuracy".
        threshold: the value to exceed.
        eval_dir: the folder of evaluations; None for `estimator.eval_dir()`.
        min_steps: ignore evaluations below this global step.
        run_every_secs: seconds between checks; None with `run_every_steps`.
        run_every_steps: steps between checks.

    Returns:
        A hook for `train`, on every worker.

    Raises:
        TypeError: if `estimator` is not an Estimator.
        ValueError: unless exactly one of seconds and steps is set; later, if evaluations lack the
            metric.

    Example:
        >>> estimator = sg.estimator.BaselineClassifier()
        >>> data = lambda: ({"x": np.zeros(2)}, np.array([1, 1]))
        >>> accuracy = estimator.train(data, steps=5).evaluate(data, steps=1)["accuracy"]
        >>> hook = sg.estimator.stop_if_higher_hook(
        ...     estimator, "accuracy", 0.9, run_every_secs=None, run_every_steps=1)
        >>> _ = estimator.train(data, hooks=[hook], steps=1000)
        >>> int(estimator.get_variable_value("global_step"))
        6

    Source: tensorflow/estimator early_stopping.py, stop_if_higher_hook.
    """
    metric = _Metric(estimator, metric_name, eval_dir, min_steps)
    return make_early_stopping_hook(
        estimator, lambda: metric.ever(operator.gt, threshold), run_every_secs, run_every_steps
    )


def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> EarlyStoppingHook:
    """Returns a hook that stops training once a metric falls below a threshold.

    Args:
        estimator: the Estimator to train.
        metric_name: a metric of the evaluation, for example "loss".
        threshold: the value to fall below.
        eval_dir: the folder of evaluations; None for `estimator.eval_dir()`.
        min_steps: ignore evaluations below this global step.
        run_every_secs: seconds between checks; None with `run_every_steps`.
        run_every_steps: steps between checks.

    Returns:
        A hook for `train`, on every worker.

    Raises:
        TypeError: if `estimator` is not an Estimator.
        ValueError: unless exactly one of seconds and steps is set; later, if evaluations lack the
            metric.

    Example:
        >>> estimator = sg.estimator.BaselineRegressor(optimizer="SGD")
        >>> data = lambda: ({"x": np.zeros(2)}, np.array([3.0, 3.0]))
        >>> loss = estimator.train(data, steps=50).evaluate(data, steps=1)["loss"]
        >>> hook = sg.estimator.stop_if_lower_hook(
        ...     estimator, "loss", 0.1, run_every_secs=None, run_every_steps=1)
        >>> _ = estimator.train(data, hooks=[hook], steps=1000)
        >>> int(estimator.get_variable_value("global_step"))
        51

    Source: tensorflow/estimator early_stopping.py, stop_if_lower_hook.
    """
    metric = _Metric(estimator, metric_name, eval_dir, min_steps)
    return make_early_stopping_hook(
        estimator, lambda: metric.ever(operator.lt, threshold), run_every_secs, run_every_steps
    )


def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> EarlyStoppingHook:
    """Returns a hook that stops training when a metric has not increased for a number of steps.

    Args:
        estimator: the Estimator to train.
        metric_name: a metric of the evaluation, for example "accuracy".
        max_steps_without_increase: training steps since the evaluation with the highest value.
        eval_dir: the folder of evaluations; None for `estimator.eval_dir()`.
        min_steps: ignore evaluations below this global step.
        run_every_secs: seconds between checks; None with `run_every_steps`.
        run_every_steps: steps between checks.

    Returns:
        A hook for `train`, on every worker.

    Raises:
        TypeError: if `estimator` is not an Estimator.
        ValueError: unless exactly one of seconds and steps is set; later, if evaluations lack the
            metric.

    Example:
        >>> estimator = sg.estimator.BaselineClassifier()
        >>> hook = sg.estimator.stop_if_no_increase_hook(estimator, "accuracy", 1000)
        >>> isinstance(hook, sg.estimator.SessionRunHook)  # for train(input_fn, hooks=[hook])
        True

    Source: tensorflow/estimator early_stopping.py, stop_if_no_increase_hook.
    """
    metric, limit = _Metric(estimator, metric_name, eval_dir, min_steps), max_steps_without_increase
    return make_early_stopping_hook(
        estimator, lambda: metric.stays(operator.gt, limit), run_every_secs, run_every_steps
    )


def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> EarlyStoppingHook:
    """Returns a hook that stops training when a metric has not decreased for a number of steps.

    Args:
        estimator: the Estimator to train.
        metric_name: a metric of the evaluation, for example "loss".
        max_steps_without_decrease: training steps since the evaluation with the lowest value.
        eval_dir: the folder of evaluations; None for `estimator.eval_dir()`.
        min_steps: ignore evaluations below this global step.
        run_every_secs: seconds between checks; None with `run_every_steps`.
        run_every_steps: steps between checks.

    Returns:
        A hook for `train`, on every worker.

    Raises:
        TypeError: if `estimator` is not an Estimator.
        ValueError: unless exactly one of seconds and steps is set; later, if evaluations lack the
            metric.

    Example:
        >>> estimator = sg.estimator.BaselineRegressor()
        >>> hook = sg.estimator.stop_if_no_decrease_hook(estimator, "loss", 1000)
        >>> isinstance(hook, sg.estimator.SessionRunHook)  # for train(input_fn, hooks=[hook])
        True

    Source: tensorflow/estimator early_stopping.py, stop_if_no_decrease_hook.
    """
    metric, limit = _Metric(estimator, metric_name, eval_dir, min_steps), max_steps_without_decrease
    return make_early_stopping_hook(
        estimator, lambda: metric.stays(operator.lt, limit), run_every_secs, run_every_steps
    )


@dataclasses.dataclass(frozen=True)
class _Metric:
    """A metric of all evaluations so far, from a global step on."""

    estimator: Estimator
    name: str
    eval_dir: str | None
    min_steps: int

    def ever(self, compare: Callable[[Any, Any], bool], threshold: float) -> bool:
        """Returns whether a value was on that side of the threshold."""
        return any(compare(value, threshold) for _, value in self._history())

    def stays(self, is_better: Callable[[Any, Any], bool], max_steps: int) -> bool:
        """Returns whether no value was better than that of so many steps before."""
        best, best_step = None, 0
        for step, value in self._history():
            if best is None or is_better(value, best):
                best, best_step = value, step
            if step - best_step >= max_steps:
                return True
        return False

    def _history(self) -> Iterator[tuple[int, Any]]:
        folder = self.eval_dir or self.estimator.eval_dir()
        for step, metrics in read_eval_metrics(folder).items():
            if step < self.min_steps:
                continue
            if self.name not in metrics:
                raise invalid(
                    f"The evaluation of step {step} has no metric {self.name!r}.",
                    f"one of {sorted(metrics)}, as in {folder}.",
                    "correct metric_name, or return the metric in eval_metric_ops.",
                )
            yield step, metrics[self.name]
