"""Models with steps, losses and metrics of their own, trained by replicas as by one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import (
    Scope,
    differences,
    evaluated,
    fitted,
    mirrored,
    plain_keras,
    regression,
)

# The second is no mean over replicas of what they have counted.
_METRICS = ("mean_absolute_error", "RootMeanSquaredError")


def every_method(
    model_class: Callable[..., Any],
    num_examples: int = 10,
    metrics: tuple[str, ...] = ("mae",),
    steps_per_execution: int = 1,
) -> Callable[[Scope], dict[str, Any]]:
    """Ten rows in batches of 4, 4 and 2; seven to validate; single batches of five."""

    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression(num_examples)
        with scope():
            inputs = keras.Input((3,))
            outputs = keras.layers.Dense(1, kernel_initializer="ones")(inputs)
            model = model_class(inputs, outputs)
            model.compile(
                optimizer=keras.optimizers.SGD(0.05, momentum=0.5),
                loss="mse",
                metrics=[keras.metrics.get(name) for name in metrics],
                steps_per_execution=steps_per_execution,
            )
        held_out: Any = {"validation_data": (x[:7], y[:7]), "validation_batch_size": 4}
        measured = fitted(model, x, y, batch_size=4, **held_out)
        measured |= evaluated(model, x[:7], y[:7], batch_size=4)
        if steps_per_execution == 1:
            for name in ("train_on_batch", "test_on_batch"):
                logs = getattr(model, name)(x[:5], y[:5], return_dict=True)
                measured |= {f"{name} {key}": value for key, value in logs.items()}
        measured["predict"] = model.predict(x, batch_size=4, verbose=0)
        # Keras 3.12 has the results of compiled metrics in a dict within.
        leaves = jax.tree_util.tree_leaves_with_path(measured)
        return {jax.tree_util.keystr(path, simple=True): value for path, value in leaves}

    return job


class _AddsToLogs(keras.Model):
    """Keras's own steps, with something more in what they return."""

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        x = data[0]
        return {**logs, "mean_input": keras.ops.mean(x), "version": 3}, state

    def test_step(self, state: Any, data: Any) -> Any:
        logs, state = super().test_step(state, data)
        return {**logs, "tested": keras.ops.ones(())}, state

    def predict_step(self, state: Any, data: Any) -> Any:
        outputs, non_trainable = super().predict_step(state, data)
        return {"twice": outputs * 2.0, "input": data}, non_trainable


@pytest.mark.slow
def test_steps_that_add_to_those_of_keras() -> None:
    # The short batch has three rows: a mean of inputs is the user's own and counts padding.
    job = every_method(_AddsToLogs, num_examples=11, metrics=_METRICS)
    expected = plain_keras(job)
    with pytest.warns(UserWarning, match=r"combines the rows .* at test_own_steps.py:\d+, and a"):
        measured = plain_keras(lambda _: job(mirrored(2).scope))
    both = ({k: v for k, v in one.items() if "mean_input" not in k} for one in (measured, expected))
    assert differences(*both) == []
    x, _ = regression(11)
    inputs = [one for key, one in measured.items() if "predict" in key and "input" in key]
    np.testing.assert_allclose(inputs, [x])
    versions = [one for key, one in measured.items() if "fit" in key and "version" in key]
    assert np.ravel(versions).tolist() == [3, 3]


class _OwnMetrics(keras.Model):
    """`compute_metrics` with a metric of the model and a number made of others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.largest = keras.metrics.Sum(name="largest")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.largest.update_state(keras.ops.max(keras.ops.abs(y_pred), axis=-1))
        return super().compute_metrics(x, y, y_pred, sample_weight)


class _DerivedMetrics(keras.Model):
    """`compute_metrics` with more entries, made of the others."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        squared = results["root_mean_squared_error"] ** 2  # not a mean of what replicas have
        return {**results, "twice": 2.0 * results["mean_absolute_error"], "squared": squared}


@pytest.mark.compatibility
def test_step_of_ones_own_runs_in_replica_context() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []

    class Looks(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            context = sg.get_replica_context()
            seen.append((context.num_replicas_in_sync, data[0].shape))
            return super().train_step(state, data)

    every_method(Looks)(mirrored(2).scope)
    # Traced twice to see what grows with the rows, and once to run.
    assert seen[:3] == [(2, (2, 3)), (2, (4, 3)), (2, (2, 3))]


class _GuideStep(keras.Model):
    """The steps of Keras's guide for JAX: `fit` with a loop over metrics, one of them the loss."""

    def _measure(self, metrics_variables: Any, loss: Any, y: Any, y_pred: Any) -> Any:
        logs, new = {}, []
        for metric in self.metrics:
            these = metrics_variables[len(new) : len(new) + len(metric.variables)]
            arguments = (loss,) if metric.name == "loss" else (y, y_pred)
            these = metric.stateless_update_state(these, *arguments)
            logs[metric.name] = metric.stateless_result(these)
            new += these
        return logs, new

    def _loss(self, trainable: Any, non_trainable: Any, x: Any, y: Any) -> Any:
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x)
        return self.compute_loss(x, y, y_pred), (y_pred, non_trainable)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer_state, metrics = state
        x, y = data[:2]
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        (loss, (y_pred, non_trainable)), grads = gradient(trainable, non_trainable, x, y)
        trainable, optimizer_state = self.optimizer.stateless_apply(
            optimizer_state, grads, trainable
        )
        logs, metrics = self._measure(metrics, loss, y, y_pred)
        return logs, (trainable, non_trainable, optimizer_state, metrics)

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, metrics = state
        x, y = data[:2]
        loss, (y_pred, non_trainable) = self._loss(trainable, non_trainable, x, y)
        logs, metrics = self._measure(metrics, loss, y, y_pred)
        return logs, (trainable, non_trainable, metrics)


class _Squares(_GuideStep):
    """Returns a number made of results, which are of all replicas."""

    def _measure(self, metrics_variables: Any, loss: Any, y: Any, y_pred: Any) -> Any:
        logs, new = super()._measure(metrics_variables, loss, y, y_pred)
        return logs | {"squared": logs["compile_metrics"]["mean_absolute_error"] ** 2}, new


class _PredictsWithVariables(keras.Model):
    """The form of a step on Keras's other backends; other steps are in the parity suite."""

    def predict_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return 2 * self(x, training=False)


@pytest.mark.compatibility
def test_predict_step_with_variables() -> None:
    x, y = regression(10)
    outputs = []
    for kind in (_PredictsWithVariables, keras.Model):
        with mirrored(2).scope():
            inputs = keras.Input((3,))
            model = kind(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
            model.compile("sgd", "mse")
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        outputs.append(model.predict(x, batch_size=4, verbose=0))
    np.testing.assert_allclose(outputs[0], 2 * outputs[1], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "metrics", "log", "num_replicas", "steps_per_execution"),
    [
        (_OwnMetrics, ("mae",), "largest", 2, 1),
        (_DerivedMetrics, _METRICS, "twice", 2, 3),
        (_Squares, ("mae",), "squared", 2, 1),
        (_GuideStep, ("mae",), "mean_absolute_error", 3, 2),
    ],
)
def test_logs_of_a_step_of_ones_own_are_those_of_plain_keras(
    model_class, metrics, log, num_replicas, steps_per_execution
) -> None:
    job = every_method(model_class, metrics=metrics, steps_per_execution=steps_per_execution)
    expected = plain_keras(job)
    assert any(log in name for name in expected)
    assert differences(plain_keras(lambda _: job(mirrored(num_replicas).scope)), expected) == []


class _AnyId(set[int]):
    """Ids of losses of an earlier trace, one of which is that of each new loss."""

    def __init__(self) -> None:
        super().__init__()
        self._is_old = True

    def __contains__(self, key: object) -> bool:
        return self._is_old or super().__contains__(key)

    def clear(self) -> None:
        self._is_old = False
        super().clear()


class _AddsOne(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.ones(()))
        return x


class _AddedLosses(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _AddsOne(), _AddsOne()

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, metrics = state
        outputs, non_trainable, losses = self.stateless_call(
            trainable, non_trainable, data[0], return_losses=True
        )
        total = sum(losses) + 0 * keras.ops.sum(outputs)
        return {"total": total}, (trainable, non_trainable, metrics)


def test_added_losses_with_the_ids_of_earlier_ones_count() -> None:
    x = np.ones((4, 1), "float32")
    with mirrored(1).scope():
        model = _AddedLosses()
        model.built = True  # no layer has weights
        model.compile("sgd", "mse")
    model.evaluate(x, x, batch_size=4, verbose=0)
    vars(model.second)["_loss_ids"] = _AnyId()  # assigned, Keras would store a copy
    logs = model.evaluate(x, x, batch_size=2, verbose=0, return_dict=True)  # another trace
    assert logs["total"] == 2.0
