"""add_metrics: extra evaluation metrics for an existing Estimator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.errors import explain
from stratagem.estimator.estimator import Estimator
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.model_function import arguments_of

_KNOWN = ("features", "labels", "predictions", "config")


class _WithMetrics(Estimator):
    def __init__(self, other: Estimator, model_fn: Callable[..., EstimatorSpec]) -> None:
        super().__init__(model_fn, config=other.config, warm_start_from=other._warm_start)
        self._host_transforms = other._host_transforms


class _ModelFunction:
    """Model function of another Estimator, with extra metrics."""

    def __init__(self, other: Estimator, metric_fn: Callable[..., Mapping[str, Any]]) -> None:
        self._model_fn = other.model_fn
        self._metric_fn = metric_fn
        self._takes = arguments_of(metric_fn)
        self.gives_values = other.gives_values

    def __call__(
        self, features: object, labels: object, mode: str, config: object
    ) -> EstimatorSpec:
        spec = self._model_fn(features, labels, mode, config)
        if mode != ModeKeys.EVAL:
            return spec
        known = {
            "features": features,
            "labels": labels,
            "predictions": spec.predictions,
            "config": config,
        }
        added = self._metric_fn(**{name: known[name] for name in self._takes})
        metrics = {**(spec.eval_metric_ops or {}), **added}
        return dataclasses.replace(spec, eval_metric_ops=metrics)


def add_metrics(estimator: Estimator, metric_fn: Callable[..., Mapping[str, Any]]) -> Estimator:
    """Returns an Estimator that also evaluates the metrics of `metric_fn`.

    It shares the folder and the settings of the original Estimator.

    Args:
        estimator: any Estimator; its model function is reused.
        metric_fn: takes any of `features`, `labels`, `predictions` and `config` by name, as the
            model function sees them. Returns a dict from names to Keras metrics, which it creates
            and updates in each call. A metric replaces an existing one of the same name.

    Returns:
        A new Estimator.

    Raises:
        ValueError: if `metric_fn` takes other arguments.

    Example:
        >>> column = sg.feature_column.numeric_column("x")
        >>> estimator = sg.estimator.LinearRegressor([column])
        >>> def largest(labels, predictions):
        ...     metric = keras.metrics.MeanAbsoluteError()
        ...     metric.update_state(labels, predictions["predictions"])
        ...     return {"error": metric}
        >>> estimator = sg.estimator.add_metrics(estimator, largest)
        >>> batch = {"x": np.ones(4, "float32")}, np.ones((4, 1), "float32")
        >>> "error" in estimator.train(lambda: batch, steps=1).evaluate(lambda: batch)
        True

    Source: tensorflow/estimator extenders.py, add_metrics.
    """
    unknown = [name for name in arguments_of(metric_fn) if name not in _KNOWN]
    if unknown:
        raise ValueError(
            explain(
                f"metric_fn takes the unsupported arguments {unknown}.",
                expected=f"a subset of {list(_KNOWN)}.",
                fix="bind other arguments with functools.partial.",
            )
        )
    return _WithMetrics(estimator, _ModelFunction(estimator, metric_fn))
