"""Kinds of models, trained on several replicas and on one device: the numbers are the same."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import (
    NUM_EXAMPLES,
    Scope,
    assert_like_plain_keras,
    classification,
    evaluated,
    example_weights,
    fitted,
    mirrored,
    plain_keras,
    regression,
    small_classifier,
    small_regressor,
    with_known_weights,
)


def _reference_problem(scope: Scope) -> dict[str, Any]:
    """10 rows in batches of 4: on three replicas, a full batch already leaves one empty."""
    x, y = regression(num_examples=10)
    with scope():
        layer = keras.layers.Dense(
            1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.1)
        )
        model = keras.Sequential([keras.Input((3,)), layer])
        model.compile(optimizer="sgd", loss="mse", metrics=["mae", "mse"])
    measured = fitted(model, x, y, batch_size=4)
    measured |= evaluated(model, x, y, batch_size=4)
    return {**measured, "predict": model.predict(x, batch_size=4, verbose=0)}


@pytest.mark.slow
def test_reference_problem_on_replicas_is_that_of_one_device() -> None:
    measured = assert_like_plain_keras(_reference_problem, replicas=(1, 2, 3))
    assert measured["fit loss"][1] < measured["fit loss"][0]


def _single_numbers(loss: Any) -> Any:
    """Predictions and targets of one axis: Keras makes one mean of each batch of them."""

    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression(num_examples=21)
        with scope():
            inputs = keras.Input((3,))
            outputs = keras.layers.Reshape(())(keras.layers.Dense(1)(inputs))
            model = with_known_weights(keras.Model(inputs, outputs))
            root = keras.metrics.RootMeanSquaredError()
            model.compile(optimizer="adam", loss=loss, metrics=["mae", "mse", root])
        measured = fitted(model, x, y[:, 0], batch_size=8)
        measured |= evaluated(model, x, y[:, 0], batch_size=8)
        with scope():
            model.compile(optimizer="sgd", loss=loss)
        weights = example_weights(21)
        return measured | {
            f"weighted {name}": value
            for name, value in fitted(
                model, x, y[:, 0], sample_weight=weights, batch_size=8
            ).items()
        }

    return job


def _mean_of_ones_own(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mse", _mean_of_ones_own])
def test_losses_and_metrics_that_are_one_mean_of_a_batch(loss: Any) -> None:
    """The last batch has five rows: replicas have three and two, or two, two and one."""
    assert_like_plain_keras(_single_numbers(loss), replicas=(2, 3))


def test_reference_problem_by_hand_is_that_of_plain_keras() -> None:
    x, y = regression(num_examples=10)
    weights, bias, losses = np.ones((3, 1)), 0.0, []
    for _ in range(2):
        total = 0.0
        for start in range(0, 10, 4):
            rows, targets = x[start : start + 4], y[start : start + 4]
            errors = rows @ weights + bias - targets
            total += len(rows) * (np.mean(errors**2) + 0.1 * np.sum(weights**2))
            weights = weights - 0.01 * (2 * rows.T @ errors / len(rows) + 0.2 * weights)
            bias = bias - 0.01 * 2 * np.mean(errors)
        losses.append(total / 10)
    measured = plain_keras(_reference_problem)
    np.testing.assert_allclose(measured["fit loss"], losses, rtol=1e-5)


def test_reference_problem_is_refused_by_data_parallel_of_keras() -> None:
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1", "cpu:2"])
    with distribution.scope(), pytest.raises(ValueError, match="evenly divide"):
        _reference_problem(contextlib.nullcontext)


@pytest.mark.slow
def test_functional_model_with_many_inputs_and_outputs() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        first, target = regression()
        second, label = classification()
        with scope():
            left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
            both = keras.layers.Concatenate()(
                [keras.layers.Dense(3, "tanh")(left), keras.layers.Dense(2, "tanh")(right)]
            )
            size = keras.layers.Dense(1, name="size")(both)
            kind = keras.layers.Dense(3, "softmax", name="kind")(both)
            model = keras.Model({"left": left, "right": right}, {"size": size, "kind": kind})
            with_known_weights(model)
            model.compile(
                optimizer="sgd",
                loss={"size": "mse", "kind": "sparse_categorical_crossentropy"},
                loss_weights={"size": 0.3, "kind": 2.0},
                metrics={"size": ["mae"], "kind": ["accuracy"]},
            )
        x, y = {"left": first, "right": second}, {"size": target, "kind": label}
        measured = fitted(model, x, y)
        predicted = model.predict(x, batch_size=4, verbose=0)
        return measured | {f"predict {key}": value for key, value in predicted.items()}

    assert_like_plain_keras(job)


class _Subclassed(keras.Model):
    """Makes its layers' variables in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(
            4, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=1)
        )
        self.out = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(seed=2)
        )

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))


def test_subclassed_model_built_by_fit_outside_the_scope() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            model = _Subclassed()
            model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
        measured = fitted(model, x, y)
        return {**measured, "predict": model.predict(x, batch_size=4, verbose=0)}

    assert_like_plain_keras(job)


def _sentences() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(14)
    tokens = random.randint(1, 9, (NUM_EXAMPLES, 4))
    tokens[np.arange(4)[None, :] >= random.randint(1, 5, NUM_EXAMPLES)[:, None]] = 0
    return tokens.astype("int32"), random.uniform(0, 1, (NUM_EXAMPLES, 4, 1)).astype("float32")


@pytest.mark.slow
def test_keras_masks_of_an_embedding_reach_the_loss() -> None:
    # The mask is that of the targets too: the loss is a mean over true tokens, of which replicas
    # have unequal numbers.
    def job(scope: Scope) -> dict[str, Any]:
        tokens, targets = _sentences()
        with scope():
            model = keras.Sequential(
                [
                    keras.Input((4,), dtype="int32"),
                    keras.layers.Embedding(9, 3, mask_zero=True),
                    keras.layers.SimpleRNN(3, return_sequences=True),
                    keras.layers.Dense(1),
                ]
            )
            with_known_weights(model)
            model.compile(optimizer="sgd", loss="mse", metrics=["mae"], weighted_metrics=["mse"])
        return fitted(model, tokens, targets)

    assert_like_plain_keras(job)


@pytest.mark.slow
def test_masking_layer_before_lstm() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        tokens, targets = _sentences()
        steps = np.where(tokens[..., None] > 0, targets, -1.0).astype("float32")
        with scope():
            model = keras.Sequential(
                [
                    keras.Input((4, 1)),
                    keras.layers.Masking(-1.0),
                    keras.layers.LSTM(2),
                    keras.layers.Dense(1),
                ]
            )
            with_known_weights(model)
            model.compile(optimizer="sgd", loss="mse")
        return fitted(model, steps, targets[:, 0])

    assert_like_plain_keras(job)


class _PenalisedWeights(keras.layers.Dense):
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * keras.ops.sum(keras.ops.abs(self.kernel)))
        return super().call(inputs)


def test_add_loss_of_weights() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            model = keras.Sequential([keras.Input((3,)), _PenalisedWeights(1)])
            with_known_weights(model)
            model.compile(optimizer="sgd", loss="mse")
        return fitted(model, x, y)

    assert_like_plain_keras(job)


class _PenalisedActivity(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


@pytest.mark.parametrize("batch_size", [5, 6])
def test_add_loss_of_a_mean(batch_size: int) -> None:
    # Of five the third replica has one, and the row that pads its part leaves the mean as it is.
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression(num_examples=2 * batch_size)
        with scope():
            model = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.Dense(2),
                    _PenalisedActivity(),
                    keras.layers.Dense(1),
                ]
            )
            with_known_weights(model)
            model.compile(optimizer="sgd", loss="mse")
        return fitted(model, x, y, batch_size=batch_size)

    assert_like_plain_keras(job)


def test_activity_regularizer_with_a_short_batch() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            model = small_regressor(activity_regularizer=keras.regularizers.L2(0.3))
            model.compile(optimizer="sgd", loss="mse")
        return fitted(model, x, y) | evaluated(model, x, y)

    assert_like_plain_keras(job)


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_loss_reductions_with_sample_weights(reduction: str) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        weights = np.linspace(0.1, 2.0, len(x), dtype="float32")
        with scope():
            model = small_regressor()
            model.compile(optimizer="sgd", loss=keras.losses.MeanSquaredError(reduction=reduction))
        return fitted(model, x, y, sample_weight=weights)

    assert_like_plain_keras(job)


def _normalised(*, is_synchronized: bool) -> Any:
    # Plain Keras refuses `synchronized=True` on JAX; there it would mean nothing.
    arguments = {"synchronized": True} if is_synchronized else {}
    return with_known_weights(
        keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(momentum=0.8, **arguments),
                keras.layers.Activation("tanh"),
                keras.layers.Dense(1),
            ]
        )
    )


def test_synchronized_batch_norm_is_that_of_one_device() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            model = _normalised(is_synchronized=sg.has_strategy())
            model.compile(optimizer="sgd", loss="mse")
        measured = fitted(model, x, y) | evaluated(model, x, y)
        return {**measured, "predict": model.predict(x, batch_size=4, verbose=0)}

    assert_like_plain_keras(job)


def test_batch_norm_of_replicas_averages_their_statistics_and_passes_over_an_empty_one() -> None:
    x = np.array([[1.0], [3.0], [10.0], [14.0]], dtype="float32")
    with mirrored(3).scope():
        layer = keras.layers.BatchNormalization(momentum=0.5, trainable=True)
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    model.fit(x, x, epochs=1, shuffle=False, verbose=0)
    # Replicas see [1, 3], [10, 14] and nothing. Moving means become (0 + 2) / 2, (0 + 12) / 2 and
    # stay 0; moving variances (1 + 1) / 2, (1 + 4) / 2 and 1.
    np.testing.assert_allclose(np.asarray(layer.moving_mean.value), [7 / 3], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(layer.moving_variance.value), [4.5 / 3], rtol=1e-6)


def test_layer_frozen_before_compile_keeps_its_weights() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = classification()
        with scope():
            model = small_classifier()
            model.layers[0].trainable = False
            model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
        return fitted(model, x, y)

    assert_like_plain_keras(job)
