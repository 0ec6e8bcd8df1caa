"""The models in Keras, for every side that uses Keras, on whichever backend."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from benchmarks.workloads import MLP_SIZES, WORKLOADS, Workload, mlp_weights

__all__ = ["build_model", "compile_model", "fit_arguments"]

_MODEL_WIDTH = 64
_NUM_HEADS = 4
_FEED_FORWARD_WIDTH = 128
_NUM_BLOCKS = 2


def build_model(name: str) -> keras.Model:
    """Returns the model of a workload, with the same weights in every process."""
    keras.utils.set_random_seed(0)
    workload = WORKLOADS[name]
    make = {
        "mlp": _mlp,
        "small_mlp": _small_mlp,
        "cnn": _cnn,
        "transformer": _transformer,
        "resnet50": _resnet50,
    }
    return make[name](workload)


def compile_model(model: keras.Model, *, steps_per_call: int, **options: Any) -> None:
    """Compiles with Adam, cross entropy of logits, and accuracy."""
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_call,
        **options,
    )


def fit_arguments() -> dict[str, Any]:
    """How every side calls `fit`: silently, and without shuffling, which is no framework's own."""
    return {"verbose": 0, "shuffle": False}


def _mlp(workload: Workload) -> keras.Model:
    hidden = [layers.Dense(size, activation="relu") for size in MLP_SIZES[1:-1]]
    model = keras.Sequential(
        [layers.Input(workload.input_shape), *hidden, layers.Dense(MLP_SIZES[-1])]
    )
    model.set_weights(mlp_weights())
    return model


def _small_mlp(workload: Workload) -> keras.Model:
    """What one trains on scikit-learn's digits: a step whose price is that of starting it."""
    hidden = layers.Dense(64, activation="relu")
    return keras.Sequential(
        [layers.Input(workload.input_shape), hidden, layers.Dense(workload.num_classes)]
    )


def _cnn(workload: Workload) -> keras.Model:
    """Keras's MNIST example."""
    return keras.Sequential(
        [
            layers.Input(workload.input_shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(workload.num_classes),
        ]
    )


def _transformer(workload: Workload) -> keras.Model:
    tokens = layers.Input(workload.input_shape, dtype="int32")
    x = layers.Embedding(workload.num_tokens, _MODEL_WIDTH)(tokens)
    for _ in range(_NUM_BLOCKS):
        attention = layers.MultiHeadAttention(_NUM_HEADS, _MODEL_WIDTH // _NUM_HEADS)
        x = layers.LayerNormalization()(x + attention(x, x))
        inner = layers.Dense(_FEED_FORWARD_WIDTH, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(_MODEL_WIDTH)(inner))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(workload.num_classes)(x))


def _resnet50(workload: Workload) -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    pixels = layers.Input(workload.input_shape, dtype="uint8")
    network = keras.applications.ResNet50(
        weights=None, classes=workload.num_classes, classifier_activation=None
    )
    return keras.Model(pixels, network(layers.Rescaling(1 / 255)(pixels)))
