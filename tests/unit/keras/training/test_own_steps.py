"""Models with steps, losses and metrics of their own, trained by replicas as by one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import (
    Scope,
    assert_like_plain_keras,
    differences,
    evaluated,
    fitted,
    mirrored,
    plain_keras,
    regression,
)

# The second is no mean over replicas of what they have counted.
_METRICS = ("mean_absolute_error", "RootMeanSquaredError")


def _job(
    model_class: Callable[..., Any],
    num_examples: int = 12,
    metrics: tuple[str, ...] = ("mae",),
    **compile_arguments: Any,
) -> Callable[[Scope], dict[str, Any]]:
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
                **compile_arguments,
            )
        measured = fitted(model, x, y, batch_size=4) | evaluated(model, x, y, batch_size=4)
        return {**measured, "predict": model.predict(x, batch_size=4, verbose=0)}

    return job


_assert_like_one_device = functools.partial(assert_like_plain_keras, replicas=(2,))


class _AddsToLogs(keras.Model):
    """Keras's own steps, with something more in what they return."""

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        x, _ = data
        return {**logs, "mean_input": keras.ops.mean(x), "version": 3}, state

    def test_step(self, state: Any, data: Any) -> Any:
        logs, state = super().test_step(state, data)
        return {**logs, "tested": keras.ops.ones(())}, state

    def predict_step(self, state: Any, data: Any) -> Any:
        outputs, non_trainable = super().predict_step(state, data)
        return {"twice": outputs * 2.0, "input": data}, non_trainable


@pytest.mark.slow
def test_steps_that_add_to_those_of_keras() -> None:
    measured = _assert_like_one_device(
        lambda scope: _flat(_job(_AddsToLogs, metrics=_METRICS)(scope))
    )
    x, _ = regression(12)
    np.testing.assert_allclose(measured["fit mean_input"], [x[8:].mean()] * 2, rtol=1e-5)
    assert measured["fit version"].tolist() == [3, 3]
    np.testing.assert_allclose(measured["predict input"], x)
    # The short batch has three rows: a mean of inputs is the user's own and counts padding.
    job = _job(_AddsToLogs, num_examples=11, metrics=_METRICS)
    with pytest.warns(UserWarning, match=r"combines the rows .* at test_own_steps.py:\d+, and a"):
        _assert_like_one_device(
            lambda scope: {k: v for k, v in _flat(job(scope)).items() if "mean_input" not in k}
        )


def _flat(measured: dict[str, Any]) -> dict[str, Any]:
    predicted = measured.pop("predict")
    return measured | {f"predict {key}": value for key, value in predicted.items()}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "metrics", "options"),
    [
        (_OwnMetrics, ("mae",), {}),
        (_DerivedMetrics, _METRICS, {"steps_per_execution": 3}),
    ],
)
def test_metrics_of_ones_own(model_class, metrics, options) -> None:
    job = _job(model_class, num_examples=11, metrics=metrics)
    expected = plain_keras(job)
    assert ("fit largest" if model_class is _OwnMetrics else "fit twice") in expected
    distributed = _job(model_class, num_examples=11, metrics=metrics, **options)
    assert differences(plain_keras(lambda _: distributed(mirrored(2).scope)), expected) == []


@pytest.mark.compatibility
def test_step_of_ones_own_runs_in_replica_context() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []

    class Looks(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            context = sg.get_replica_context()
            seen.append((context.num_replicas_in_sync, data[0].shape))
            return super().train_step(state, data)

    _job(Looks)(mirrored(2).scope)
    # Traced twice to see what grows with the rows, and once to run.
    assert seen == [(2, (2, 3)), (2, (4, 3)), (2, (2, 3))]


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


class _PlainLogs(_GuideStep):
    """Returns the loss of the batch as it is, by the name of a metric that it never updates."""

    def _measure(self, metrics_variables: Any, loss: Any, y: Any, y_pred: Any) -> Any:
        return {"loss": loss}, metrics_variables


class _Squares(_GuideStep):
    """Returns a number made of results, which are of all replicas."""

    def _measure(self, metrics_variables: Any, loss: Any, y: Any, y_pred: Any) -> Any:
        logs, new = super()._measure(metrics_variables, loss, y, y_pred)
        return logs | {"squared": logs["compile_metrics"]["mae"] ** 2}, new


class _StepWithVariables(keras.Model):
    """The same with the variables themselves, as on Keras's other backends."""

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]

        def loss_of() -> Any:
            return self.compute_loss(x, y, self(x, training=True))

        loss, grads = sg.value_and_grad(loss_of, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data: Any) -> Any:
        x, y = data[:2]
        return {"loss": self.compute_loss(x, y, self(x, training=False))}

    def predict_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self(x, training=False)


def _logs_job(model_class: Any, steps_per_execution: int = 1) -> Callable[[Scope], dict[str, Any]]:
    """Ten rows in batches of 4, 4 and 2; seven to validate; single batches of five."""

    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression(10)
        with scope():
            inputs = keras.Input((3,))
            outputs = keras.layers.Dense(1, kernel_initializer="ones")(inputs)
            model = model_class(inputs, outputs)
            model.compile(
                keras.optimizers.SGD(0.05),
                "mse",
                metrics=["mae"],
                steps_per_execution=steps_per_execution,
            )
        measured = fitted(
            model, x, y, batch_size=4, validation_data=(x[:7], y[:7]), validation_batch_size=4
        )
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "num_replicas", "steps_per_execution"),
    [
        (_Squares, 2, 1),
        (_PlainLogs, 1, 1),
        (_GuideStep, 2, 2),
        (_PlainLogs, 3, 1),
    ],
)
def test_logs_of_a_step_of_ones_own_are_those_of_plain_keras(
    model_class: Any, num_replicas: int, steps_per_execution: int
) -> None:
    job = _logs_job(model_class, steps_per_execution)
    expected = plain_keras(job)
    assert min(expected[key] for key in expected if key.startswith("fit loss")) > 0.0
    assert differences(plain_keras(lambda _: job(mirrored(num_replicas).scope)), expected) == []


@pytest.mark.compatibility
@pytest.mark.parametrize("num_replicas", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_step_with_variables_is_that_with_the_state(num_replicas: int) -> None:
    expected = plain_keras(_logs_job(_PlainLogs))
    job = _logs_job(_StepWithVariables)
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
