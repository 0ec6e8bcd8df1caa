"""Model functions for tests, and the equivalent plain Keras models."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import stratagem as sg

NUM_CLASSES = 3


def cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense_layers() -> list[Any]:
    initializer = keras.initializers.GlorotUniform
    return [
        keras.layers.Dense(8, activation="relu", kernel_initializer=initializer(seed=1)),
        keras.layers.Dense(NUM_CLASSES, kernel_initializer=initializer(seed=2)),
    ]


def convolutional_layers(*, synchronized: bool, dropout: float) -> list[Any]:
    initializer = keras.initializers.GlorotUniform
    return [
        keras.layers.Conv2D(4, 3, kernel_initializer=initializer(seed=1)),
        keras.layers.BatchNormalization(synchronized=synchronized),
        keras.layers.ReLU(),
        keras.layers.Flatten(),
        keras.layers.Dropout(dropout, seed=7),
        keras.layers.Dense(NUM_CLASSES, kernel_initializer=initializer(seed=2)),
    ]


def classifier(make_layers: Any, make_optimizer: Any) -> Any:
    """Returns a model function for a network of layers."""

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        logits = keras.Sequential(make_layers())(features, training=mode == "train")
        if mode == sg.estimator.ModeKeys.PREDICT:
            predictions = {"logits": logits, "classes": keras.ops.argmax(logits, axis=-1)}
            return sg.estimator.EstimatorSpec(mode, predictions=predictions)
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        accuracy.update_state(labels, logits)
        loss = cross_entropy()(labels, logits)
        return sg.estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=sg.estimator.minimize(make_optimizer(), loss),
            eval_metric_ops={"accuracy": accuracy},
        )

    return model_fn


dense_classifier = classifier(dense_layers, lambda: keras.optimizers.Adam(0.01))


def plain_model(layers: list[Any], optimizer: Any, shape: tuple[int, ...]) -> keras.Model:
    """Returns the equivalent plain Keras model."""
    model = keras.Sequential([keras.layers.Input(shape), *layers])
    model.compile(optimizer, cross_entropy(), metrics=["accuracy"])
    return model


def examples(count: int, shape: tuple[int, ...] = (5,)) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, *shape)).astype("float32")
    return x, rng.integers(0, NUM_CLASSES, count).astype("int32")


def dataset_of(x: Any, y: Any, batch_size: int) -> Any:
    """Returns an input function; `batch_size` is per replica."""
    return lambda: sg.input.Dataset((x, y), batch_size=batch_size)


def estimator_of(model_fn: Any, model_dir: Any = None, strategy: Any = None, **config: Any) -> Any:
    settings = {"save_checkpoints_steps": 1000, "log_step_count_steps": None, **config}
    return sg.estimator.Estimator(
        model_fn,
        model_dir=model_dir,
        config=sg.estimator.RunConfig(train_distribute=strategy, **settings),
    )


def weights_of(estimator: Any) -> dict[str, Any]:
    """Returns trained weights of the latest checkpoint by the last two parts of their names."""
    return {
        "/".join(name.split("/")[-2:]): estimator.get_variable_value(name)
        for name in estimator.get_variable_names()
        if name.startswith("sequential/")
    }


def weights_of_model(model: keras.Model) -> dict[str, Any]:
    """Returns a Keras model's weights by the names that its layers have in a fresh process."""
    found: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for layer in model.layers:
        kind = keras.src.utils.naming.to_snake_case(type(layer).__name__)
        number = counts.get(kind, 0)
        counts[kind] = number + 1
        name = kind if number == 0 else f"{kind}_{number}"
        for variable in layer.weights:
            found[f"{name}/{variable.name}"] = np.asarray(variable.value)
    return found
