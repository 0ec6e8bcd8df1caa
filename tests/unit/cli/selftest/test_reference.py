"""The reference, against the closed form of the first step and the solution that it approaches."""

from __future__ import annotations

import keras
import numpy as np

from stratagem.cli.selftest import cases as reference


def test_batches_are_uneven() -> None:
    features, labels = reference.data()
    assert len(features) == len(labels)
    assert len(features) % reference.BATCH_SIZE == 3


def test_training_goes_toward_the_weights_that_made_the_labels() -> None:
    true_weights = np.array([1.0, -2.0, 0.5, 0.25])
    features, labels = reference.data()
    inputs = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    np.testing.assert_allclose(inputs @ true_weights, labels[:, 0], atol=1e-6)
    error = np.mean((inputs @ reference.trained_weights() - labels[:, 0]) ** 2)
    assert error < 0.5 * np.mean(labels**2)


def test_keras_alone_reaches_the_same_weights() -> None:
    features, labels = reference.data()
    model = keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(reference.LEARNING_RATE), "mse")
    model.fit(
        features,
        labels,
        batch_size=reference.BATCH_SIZE,
        epochs=reference.EPOCHS,
        shuffle=False,
        verbose=0,
    )
    kernel, bias = model.get_weights()
    np.testing.assert_allclose(
        np.concatenate([kernel[:, 0], bias]), reference.trained_weights(), atol=1e-6
    )
