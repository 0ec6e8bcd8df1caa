"""Programs in the manner of keras.io's examples, at small sizes and with numbers for data."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

from validation.third_party.programs.measuring import (
    Measurements,
    Place,
    Program,
    evaluated,
    fitted,
    measured,
)

_BATCH_SIZE = 4


def _adam() -> keras.optimizers.Optimizer:
    """Epsilon is large: where gradients are near 0, Adam would make of rounding a full step."""
    return keras.optimizers.Adam(1e-2, epsilon=1e-3)


class _Transformer(layers.Layer):
    """A block of attention and two dense layers, without dropout."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(num_heads, width // num_heads)
        self.dense = keras.Sequential([layers.Dense(2 * width, "relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]

    def call(self, inputs: Any) -> Any:
        attended = self.norms[0](inputs + self.attention(inputs, inputs))
        return self.norms[1](attended + self.dense(attended))


class _TokensAndPositions(layers.Layer):
    def __init__(self, length: int, vocabulary_size: int, width: int) -> None:
        super().__init__()
        self.tokens = layers.Embedding(vocabulary_size, width)
        self.positions = layers.Embedding(length, width)

    def call(self, inputs: Any) -> Any:
        return self.tokens(inputs) + self.positions(ops.arange(ops.shape(inputs)[-1]))


def transformer_text_classifier(place: Place) -> Measurements:
    random = np.random.default_rng(10)
    tokens = random.integers(0, 13, (11, 6)).astype("int32")
    labels = random.integers(0, 2, 11).astype("int32")
    with place.scope():
        inputs = keras.Input((6,), dtype="int32")
        x = _TokensAndPositions(6, 13, 8)(inputs)
        x = layers.GlobalAveragePooling1D()(_Transformer(8, 2)(x))
        model = keras.Model(inputs, layers.Dense(2, "softmax")(layers.Dense(5, "tanh")(x)))
        model.compile(_adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return measured(place, model, tokens, labels, _BATCH_SIZE, validation_split=0.3)


class _Autoencoder(keras.Model):
    """A variational autoencoder; the noise is an input, because replicas draw numbers of their own.

    Its step is that of the guide "Customizing what happens in `fit()` with JAX".
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(4)])
        self.decoder = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(5)])
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.divergence_tracker = keras.metrics.Mean(name="divergence")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.divergence_tracker]

    def call(self, inputs: Any) -> Any:
        rows, noise = inputs["rows"], inputs["noise"]
        mean, log_variance = ops.split(self.encoder(rows), 2, axis=-1)
        code = mean + ops.exp(0.5 * log_variance) * noise
        return self.decoder(code), mean, log_variance

    def _loss_terms(self, trained: Any, others: Any, data: Any) -> Any:
        (outputs, mean, log_variance), others = self.stateless_call(trained, others, data)
        divergence = -0.5 * ops.mean(1 + log_variance - mean**2 - ops.exp(log_variance))
        loss = ops.mean(ops.square(outputs - data["rows"])) + divergence
        return loss, (divergence, others)

    def _tracked(self, state: list[Any], values: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """The logs and the new state of the two trackers."""
        logs, new_state = {}, []
        for metric, value in zip(self.metrics, values, strict=True):
            count = len(metric.variables)
            own, state = state[:count], state[count:]
            own = metric.stateless_update_state(own, value)
            logs[metric.name] = metric.stateless_result(own)
            new_state += own
        return logs, new_state

    def train_step(self, state: Any, data: Any) -> Any:
        trained, others, optimizer, metrics = state
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self._loss_terms, has_aux=True)
        (loss, (divergence, others)), gradients = gradient(trained, others, inputs)
        trained, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trained)
        logs, metrics = self._tracked(metrics, [loss, divergence])
        return logs, (trained, others, optimizer, metrics)

    def test_step(self, state: Any, data: Any) -> Any:
        trained, others, metrics = state
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss, (divergence, others) = self._loss_terms(trained, others, inputs)
        logs, metrics = self._tracked(metrics, [loss, divergence])
        return logs, (trained, others, metrics)


def variational_autoencoder(place: Place) -> Measurements:
    """A step of one's own in Keras's form for JAX; the last batch has one row."""
    random = np.random.default_rng(11)
    data = {
        "rows": random.standard_normal((9, 5)).astype("float32"),
        "noise": random.standard_normal((9, 2)).astype("float32"),
    }
    with place.scope():
        model = _Autoencoder()
        model(data)
        model.compile(keras.optimizers.SGD(0.1))
    return {
        **fitted(place, model, data, batch_size=_BATCH_SIZE),
        **evaluated(model, data, batch_size=_BATCH_SIZE),
        "decoded": model.predict(data, batch_size=_BATCH_SIZE, verbose=0)[0],
    }


def _contrastive_loss(y_true: Any, distance: Any) -> Any:
    """One number of a batch, as in the example of Siamese networks."""
    y_true = ops.cast(y_true, distance.dtype)
    margin = ops.maximum(1.0 - distance, 0.0)
    return ops.mean((1.0 - y_true) * ops.square(distance) + y_true * ops.square(margin))


def siamese_network(place: Place) -> Measurements:
    """Two inputs share a tower; the loss is of the distance within a pair, not between pairs."""
    random = np.random.default_rng(12)
    left, right = (random.uniform(0, 1, (11, 8, 8, 1)).astype("float32") for _ in range(2))
    is_other = random.integers(0, 2, (11, 1)).astype("float32")
    with place.scope():
        tower = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(3, 3, activation="tanh"),
                layers.AveragePooling2D(2),
                layers.Flatten(),
                layers.Dense(4, "tanh"),
            ]
        )
        inputs = [keras.Input((8, 8, 1)), keras.Input((8, 8, 1))]
        one, other = tower(inputs[0]), tower(inputs[1])
        squares = ops.sum(ops.square(one - other), axis=1, keepdims=True)
        model = keras.Model(inputs, ops.sqrt(ops.maximum(squares, 1e-7)))
        model.compile(keras.optimizers.RMSprop(1e-2, epsilon=1e-3), _contrastive_loss)
    return measured(place, model, [left, right], is_other, _BATCH_SIZE)


def timeseries_lstm(place: Place) -> Measurements:
    """Windows of a series, and a callback that changes the learning rate."""
    series = np.sin(np.arange(40, dtype="float32") / 3)[:, None]
    windows = np.lib.stride_tricks.sliding_window_view(series, 7, axis=0)
    x, y = np.moveaxis(windows, 2, 1)[:-1], series[7:]
    with place.scope():
        model = keras.Sequential(
            [
                keras.Input((7, 1)),
                layers.LSTM(5, return_sequences=True),
                layers.GRU(3),
                layers.Dense(1),
            ]
        )
        model.compile(_adam(), loss="mse", metrics=["mae"])
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=0, min_delta=0.05),
    ]
    arguments = {"validation_data": (x[26:], y[26:]), "callbacks": callbacks, "epochs": 3}
    return measured(place, model, x[:26], y[:26], 8, **arguments)


def unet_segmentation(place: Place) -> Measurements:
    """One class a pixel; the metric is the mean intersection over union."""
    random = np.random.default_rng(13)
    images = random.uniform(0, 1, (7, 8, 8, 3)).astype("float32")
    classes = random.integers(0, 3, (7, 8, 8)).astype("int32")
    with place.scope():
        inputs = keras.Input((8, 8, 3))
        first = layers.Conv2D(4, 3, padding="same", activation="tanh")(inputs)
        down = layers.Conv2D(6, 3, 2, padding="same", activation="tanh")(first)
        up = layers.Conv2DTranspose(4, 3, 2, padding="same", activation="tanh")(down)
        joined = layers.Concatenate()([first, layers.UpSampling2D(2)(down), up])
        model = keras.Model(inputs, layers.Conv2D(3, 1, activation="softmax")(joined))
        iou = keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")
        model.compile(_adam(), "sparse_categorical_crossentropy", metrics=["accuracy", iou])
    return measured(place, model, images, classes, _BATCH_SIZE)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        transformer_text_classifier,
        variational_autoencoder,
        siamese_network,
        timeseries_lstm,
        unet_segmentation,
    )
}
