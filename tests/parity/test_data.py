"""What `fit` can be given: weights, validation data, generators; on replicas and on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

from tests.parity.comparison import (
    Scope,
    assert_like_plain_keras,
    classification,
    evaluated,
    example_weights,
    fitted,
    regression,
    small_classifier,
    small_regressor,
    state_of,
)


def _compiled_classifier(scope: Scope) -> Any:
    with scope():
        model = small_classifier()
        model.compile(
            optimizer=keras.optimizers.SGD(0.1),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
        )
    return model


def _compiled_regressor(scope: Scope) -> Any:
    with scope():
        model = small_regressor()
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return model


@pytest.mark.slow
def test_class_weight() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _compiled_classifier(scope), classification()
        return fitted(model, x, y, class_weight={0: 0.5, 1: 1.0, 2: 4.0})

    assert_like_plain_keras(job)


@pytest.mark.slow
def test_validation_split_with_sample_weight() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _compiled_classifier(scope), classification(15)
        weights = example_weights(len(x))
        return fitted(model, x, y, sample_weight=weights, validation_split=1 / 3)

    assert "fit val_weighted_accuracy" in assert_like_plain_keras(job)


@pytest.mark.slow
def test_validation_data_with_weights_and_a_batch_size_of_its_own() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _compiled_classifier(scope), classification()
        held_out = (x[:6], y[:6], example_weights(6))
        return fitted(
            model,
            x,
            y,
            validation_data=held_out,
            validation_batch_size=3,
            validation_freq=2,
            epochs=3,
        )

    assert len(assert_like_plain_keras(job)["fit val_loss"]) == 1


@pytest.mark.slow
def test_shuffled_training_from_one_seed() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _compiled_regressor(scope), regression(15)
        keras.utils.set_random_seed(3)
        return fitted(model, x, y, shuffle=True)

    assert_like_plain_keras(job)


@pytest.mark.parametrize("num_examples", [1, 2])
@pytest.mark.slow
def test_fewer_examples_than_replicas(num_examples: int) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _compiled_regressor(scope), regression(num_examples)
        measured = fitted(model, x, y, batch_size=32)
        return {**measured, "predict": model.predict(x, verbose=0)}

    assert_like_plain_keras(job)


class _Slices(keras.utils.PyDataset):
    """Batches of 4, 1 and 5 examples, with weights."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = (slice(0, 4), slice(4, 5), slice(5, 10))[index]
        x, y = regression()
        return x[rows], y[rows], example_weights(len(x))[rows]


@pytest.mark.slow
def test_py_dataset_with_batches_of_many_sizes() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, data = _compiled_regressor(scope), _Slices()
        return {**fitted(model, data), "predict": model.predict(data, verbose=0)}

    assert_like_plain_keras(job)


def _endless() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    x, y = regression()
    while True:
        yield x[:4], y[:4]
        yield x[4:], y[4:]


@pytest.mark.slow
def test_generator_with_steps() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model = _compiled_regressor(scope)
        measured = fitted(model, _endless(), steps_per_epoch=3)
        return measured | evaluated(model, _endless(), steps=1)

    assert_like_plain_keras(job)


def test_evaluate_and_predict_stop_after_the_steps_asked_for() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _compiled_regressor(scope), regression()
        measured = evaluated(model, x, y, batch_size=3, steps=2)
        return {**measured, "predict": model.predict(x, batch_size=3, steps=2, verbose=0)}

    assert len(assert_like_plain_keras(job, replicas=(2,))["predict"]) == 6


@pytest.mark.slow
def test_methods_of_one_batch() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model, (x, y) = _compiled_classifier(scope), classification()
        weights = example_weights(5)
        measured: dict[str, Any] = {
            "train": model.train_on_batch(x[:5], y[:5], sample_weight=weights),
            "train again": model.train_on_batch(
                x[5:], y[5:], class_weight={0: 1.0, 1: 2.0, 2: 3.0}
            ),
            "test": model.test_on_batch(x[:3], y[:3]),
            "predict": model.predict_on_batch(x[:4]),
        }
        logs = model.test_on_batch(x, y, return_dict=True)
        return measured | {f"test {key}": value for key, value in logs.items()} | state_of(model)

    assert_like_plain_keras(job)


def test_targets_inside_the_inputs() -> None:
    # No target at all: the loss comes from `add_loss`.
    class Distance(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(keras.ops.sum(keras.ops.square(self.weight)))
            return inputs * self.weight

        def build(self, shape: Any) -> None:
            self.weight = self.add_weight(shape=(shape[-1],), initializer="ones")

    def job(scope: Scope) -> dict[str, Any]:
        x, _ = regression()
        with scope():
            model = keras.Sequential([keras.Input((3,)), Distance()])
            model.compile(optimizer=keras.optimizers.SGD(0.1))
        return fitted(model, x)

    assert_like_plain_keras(job)
