"""Evaluation step: metrics and average loss over a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.model_step import ModelStep, reported
from stratagem.execution.context.replica import get_replica_context
from stratagem.keras.numerics.step_mode import StepMode, record_loss, step_mode
from stratagem.keras.training.metric_logs import MetricLogs
from stratagem.messages import explain

if TYPE_CHECKING:
    from stratagem.estimator.steps.model_function import ModelFunction
    from stratagem.estimator.steps.variable_store import VariableStore
    from stratagem.strategies.base.strategy import Strategy


class EvaluationStep(ModelStep):
    """Updates a model function's metrics on each replica and averages the loss over examples."""

    mode = ModeKeys.EVAL

    def __init__(self, function: ModelFunction, store: VariableStore, strategy: Strategy) -> None:
        super().__init__(function, store, strategy)
        self._metrics: dict[str, keras.metrics.Metric] = {}
        self._logs = MetricLogs(self, self.strategy)

    def step(self, features: object, labels: object) -> Any:
        """Updates the metrics and returns values for hooks."""
        with step_mode(StepMode.MEAN):
            call = self.call(features, labels, _record_loss)
            metrics = dict(call.spec.eval_metric_ops or {})
            if "loss" in metrics:
                raise _reserved_name()
            self._metrics = {**metrics, "loss": call.extra}
            return reported(call.values)

    def reset(self) -> None:
        """Resets all metrics."""
        with self.strategy.scope():
            for metric in self._metrics.values():
                metric.reset_state()

    def results(self) -> dict[str, Any]:
        """Returns the current metrics over all replicas."""
        return self._logs.so_far()

    # `MetricLogs` reads these two members of a model.

    @property
    def metrics_variables(self) -> list[Any]:
        """Variables of all metrics."""
        return [variable for metric in self._metrics.values() for variable in metric.variables]

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the results of all metrics; a metric with several results adds each of them."""
        results: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            result = metric.result()
            results |= result if isinstance(result, dict) else {name: result}
        return results


def _record_loss(spec: EstimatorSpec) -> keras.metrics.Mean:
    tracker = keras.metrics.Mean(name="loss")
    context = get_replica_context()
    assert context is not None
    if context.num_examples is None:
        tracker.update_state(spec.loss)
    else:
        record_loss(tracker, spec.loss, context)
    return tracker


def _reserved_name() -> ValueError:
    return ValueError(
        explain(
            'eval_metric_ops contains a metric named "loss".',
            expected='any other name: "loss" is the average of the spec\'s loss.',
            fix="rename the metric.",
        )
    )
