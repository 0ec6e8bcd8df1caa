"""Replica step of a model function: tracing, running and values for hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.named_values import naming_values
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.model_function import ModelFunction
from stratagem.estimator.steps.variable_store import VariableStore
from stratagem.execution.context.replica import ReplicaContext, get_replica_context
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.keras.numerics.step_mode import StepMode, example_fraction, record_loss, step_mode
from stratagem.keras.training.metric_logs import MetricLogs

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


def spec_hooks(spec: EstimatorSpec, mode: str) -> tuple[SessionRunHook, ...]:
    """Returns a spec's hooks for a mode, the chief's hooks last."""
    groups: dict[str, Sequence[Any] | None] = {"eval": spec.evaluation_hooks}
    groups["infer"] = spec.prediction_hooks
    groups["train"] = (*(spec.training_hooks or ()), *(spec.training_chief_hooks or ()))
    return tuple(groups[mode] or ())


@dataclasses.dataclass(frozen=True)
class _ModelCall:
    """Result of one call of the model function."""

    spec: EstimatorSpec
    values: dict[str, Any]
    extra: Any


class ModelStep:
    """Step of a model function in one mode; `spec` is its result from the last trace."""

    mode: str

    def __init__(self, function: ModelFunction, store: VariableStore, strategy: Strategy) -> None:
        self._function = function
        self.store = store
        self.strategy = strategy
        self.spec: EstimatorSpec | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the spec, which holds tracers."""
        return {**vars(self), "spec": None}

    def step(self, features: object, labels: object) -> Any:
        """Runs in replica context; `labels` is None if there are none."""
        raise NotImplementedError

    def prepare(self, batch: tuple[Any, Any]) -> EstimatorSpec:
        """Traces the step, which creates its variables, without running it."""
        arguments = flatten_arguments(batch, {}, num_replicas=self.strategy.num_replicas_in_sync)
        with self.strategy.scope():
            executor: Any = self.strategy.executor
            executor.program(self.step, arguments)
        assert self.spec is not None
        return self.spec

    def reset(self) -> None:
        """Resets what the steps of a loop accumulate. Call after `prepare`."""

    def run(self, batch: tuple[Any, Any]) -> Any:
        """Runs the step on all replicas."""
        return self.strategy.run(self.step, args=batch)

    def call(
        self,
        features: object,
        labels: object,
        extra: Callable[[EstimatorSpec], Any] = lambda spec: None,
    ) -> _ModelCall:
        """Calls the model function once, then `extra` with its spec."""
        with self.store.call(self.mode), naming_values() as named:
            spec = self._function(features, labels, self.mode)
            computed = extra(spec)
        self.spec = spec
        tensors = [dict(getattr(hook, "tensors", {}) or {}) for hook in spec_hooks(spec, self.mode)]
        values = {
            "loss": spec.loss,
            "named": dict(named),
            # Tensors given as names are looked up when they are fetched.
            "held": [
                {name: value for name, value in one.items() if isinstance(value, jax.Array)}
                for one in tensors
            ],
        }
        return _ModelCall(spec, values, computed)


def reported(values: object) -> Any:
    """Averages floating-point scalars over replicas, as hooks see them. Call in replica context."""
    context = get_replica_context()
    assert context is not None
    return jax.tree.map(lambda value: _average(value, context), values)


def _average(value: object, context: ReplicaContext) -> Any:
    value = jnp.asarray(value)
    is_average = value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.floating)
    if not is_average or context.num_replicas_in_sync == 1:
        return value
    return context.all_reduce("sum", value * example_fraction(context, value.dtype))


# Prediction step: predictions as rows in input order.


class PredictionStep(ModelStep):
    """Computes `spec.predictions` on each replica."""

    mode = ModeKeys.PREDICT

    def step(self, features: object, labels: object) -> Any:
        """Returns this replica's predictions and values for hooks."""
        with step_mode(StepMode.MEAN):
            call = self.call(features, None)
            named = {key: call.values[key] for key in ("named", "held")}
            return {**reported(named), "predictions": call.spec.predictions}


def select_keys(predictions: object, keys: str | Sequence[str] | None) -> list[str] | None:
    """Returns the names of the predictions to return; None if they are not a dict."""
    if keys is None:
        return list(predictions) if isinstance(predictions, Mapping) else None
    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not isinstance(predictions, Mapping):
        raise ValueError(
            explain(
                f"predict_keys={wanted} cannot select from predictions without names.",
                expected="an EstimatorSpec whose predictions are a dict, or no predict_keys.",
                fix="omit predict_keys.",
            )
        )
    unknown = [key for key in wanted if key not in predictions]
    if unknown or not wanted:
        raise ValueError(
            explain(
                f"predict_keys={wanted} is empty or contains unknown names: {unknown}.",
                expected=f"one or more of {sorted(predictions)}.",
                fix="correct the names, or omit predict_keys for all predictions.",
            )
        )
    return [key for key in predictions if key in wanted]


def prediction_batches(
    strategy: Strategy, predictions: Any, keys: list[str] | None
) -> Iterator[Any]:
    """Yields each replica's predictions as NumPy arrays, without padding rows."""
    wanted = predictions if keys is None else {key: predictions[key] for key in keys}
    leaves, structure = jax.tree.flatten(wanted, is_leaf=lambda leaf: hasattr(leaf, "components"))
    for parts in zip(*map(strategy.local_results, leaves), strict=True):
        batch = [np.asarray(part) for part in parts]
        if any(part.ndim == 0 or len(part) for part in batch):  # skips replicas without examples
            yield jax.tree.unflatten(structure, batch)


def split_examples(batch: object) -> Iterator[Any]:
    """Yields the rows of a batch."""
    leaves = jax.tree.leaves(batch)
    lengths = {len(leaf) if leaf.ndim else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            explain(
                f"Predictions of a batch have the shapes {[leaf.shape for leaf in leaves]}.",
                expected="the same number of rows in each, one per example.",
                fix="pass yield_single_examples=False to get whole batches.",
            )
        )
    for row in range(len(leaves[0])):
        yield jax.tree.map(lambda leaf, row=row: leaf[row], batch)


# Evaluation step: metrics and average loss over a dataset.


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
