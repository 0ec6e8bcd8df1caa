"""Small models and their data, and what one CPU device makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["IDS", "digits", "reference", "train", "weights_of"]

IDS = 500
_MAKERS = ("mlp", "conv", "table")


def digits(kind: str) -> tuple[Any, Any]:
    """Inputs and labels of 100 examples: three batches of 32, and a short one."""
    draw = np.random.default_rng(7)
    y = draw.integers(0, 10, 100).astype("int32")
    if kind == "table":
        return draw.integers(0, IDS, (100, 4)).astype("int32"), y
    shape = (100, 64) if kind == "mlp" else (100, 8, 8, 1)
    return draw.random(shape).astype("float32"), y


def _layers(kind: str) -> list[Any]:
    import keras

    if kind == "mlp":
        return [keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    if kind == "conv":
        return [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.Conv2D(32, 3, strides=2),
            keras.layers.Activation("relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    return [
        keras.Input((4,), dtype="int32"),
        keras.layers.Embedding(IDS, 32, name="table"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, "relu", name="kernel_of_head"),
        keras.layers.Dense(10),
    ]


def train(strategy: Any, kind: str, *, epochs: int = 2, optimizer: str = "momentum") -> Any:
    """Returns a model that was trained by `fit` under a strategy; its losses in `losses`."""
    import keras

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(_layers(kind), name=f"{kind}_model")
        # Adam divides by small numbers, which amplifies rounding.
        made = (
            keras.optimizers.SGD(0.05, momentum=0.9)
            if optimizer == "momentum"
            else keras.optimizers.Adam(1e-3)
        )
        model.compile(
            made,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
        )
    x, y = digits(kind)
    history = model.fit(x, y, batch_size=32, epochs=epochs, shuffle=False, verbose=0)
    model.losses_of_fit = [float(loss) for loss in history.history.get("loss", [])]
    return model


def weights_of(model: Any) -> list[np.ndarray[Any, Any]]:
    """The weights on the host."""
    return [np.asarray(weight, np.float64) for weight in model.get_weights()]


def reference(kind: str) -> Any:
    """The model that one CPU device trains."""
    import stratagem as sg

    return train(sg.OneDeviceStrategy("cpu:0"), kind)


def difference(model: Any, other: Any) -> float:
    """The largest difference between the weights of two models."""
    pairs = zip(weights_of(model), weights_of(other), strict=True)
    return max(float(np.abs(one - two).max()) for one, two in pairs)
