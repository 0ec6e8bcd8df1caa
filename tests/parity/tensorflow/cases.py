"""The training runs that TensorFlow and Stratagem both carry out, described without either.

A case holds everything that decides a run: the model as a function of a `keras` module, weights,
data, optimizer, loss, metrics, batch size. Weights and data come from NumPy's legacy generator,
whose streams are frozen for good, so that both sides start from the same numbers on any machine.
Nothing is shuffled and no layer draws random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

NUM_REPLICAS = 2
NUM_HELD_OUT = 21
_TOKENS_PER_ROW = 4
_ROWS_PER_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Inputs and targets of a run, shape (examples, ...)."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run.

    Args:
        name: key of the case in the reference file.
        build: makes the uncompiled model with the `keras` module it is given.
        draw: makes examples, from a random state and their number.
        loss: Keras name of the loss.
        optimizer: makes the optimizer with the `keras` module it is given.
        metrics: Keras names of the metrics.
        weighted_metrics: Keras names of the metrics that see sample weights.
        num_examples: examples in the training set.
        batch_size: global batch size.
        epochs: passes over the training set.
        is_weighted: whether each example has a weight of its own.
        class_weight: weight of each class, or None.
        has_batch_norm: whether a layer keeps moving statistics.
        squares_repeated_rows: whether an optimizer with a second moment trains an embedding of
            which one batch looks up a row more than once.
    """

    name: str
    build: Callable[[ModuleType], Any]
    draw: Callable[[np.random.RandomState, int], Arrays]
    loss: str
    optimizer: Callable[[ModuleType], Any]
    num_examples: int
    batch_size: int = _ROWS_PER_BATCH
    epochs: int = 2
    metrics: tuple[str, ...] = ()
    weighted_metrics: tuple[str, ...] = ()
    is_weighted: bool = False
    class_weight: dict[int, float] | None = None
    has_batch_norm: bool = False
    squares_repeated_rows: bool = False

    @property
    def num_in_short_batch(self) -> int:
        """Number of examples in the last batch, 0 when all batches are full."""
        return self.num_examples % self.batch_size

    def training_data(self) -> Arrays:
        """Returns the examples to train on."""
        return self.draw(np.random.RandomState(1), self.num_examples)

    def held_out_data(self) -> Arrays:
        """Returns the examples for `evaluate` and `predict`, which end in a short batch."""
        return self.draw(np.random.RandomState(2), NUM_HELD_OUT)

    def sample_weight(self) -> np.ndarray | None:
        """Returns the weight of each training example, shape (examples,), or None."""
        if not self.is_weighted:
            return None
        weights = np.random.RandomState(3).uniform(0.2, 2.0, self.num_examples)
        return weights.astype("float32")


def _sgd(keras: ModuleType) -> Any:
    return keras.optimizers.SGD(learning_rate=0.05, momentum=0.9)


def _adam(keras: ModuleType) -> Any:
    return keras.optimizers.Adam(learning_rate=0.01)


def _points(random: np.random.RandomState, num_examples: int) -> Arrays:
    x = random.standard_normal((num_examples, 5))
    y = (x @ random.standard_normal((5, 3))).argmax(axis=1)
    return Arrays(x=x.astype("float32"), y=y.astype("int32"))


def _curve(random: np.random.RandomState, num_examples: int) -> Arrays:
    x = random.standard_normal((num_examples, 4))
    y = np.sin(x[:, :1]) + 0.5 * x[:, 1:2]
    return Arrays(x=x.astype("float32"), y=y.astype("float32"))


def _images(random: np.random.RandomState, num_examples: int) -> Arrays:
    y = random.randint(0, 3, num_examples)
    x = 0.3 * random.standard_normal((num_examples, 8, 8, 1))
    for row, label in enumerate(y):
        x[row, 2 * label : 2 * label + 3] += 1.0
    return Arrays(x=x.astype("float32"), y=y.astype("int32"))


def _sentences(random: np.random.RandomState, num_examples: int) -> Arrays:
    """Draws token ids of which a batch has many twice; 0 fills up short sentences."""
    x = random.randint(1, 20, (num_examples, 6))
    x[np.arange(6)[None, :] >= random.randint(2, 7, num_examples)[:, None]] = 0
    y = (x > 10).sum(axis=1) > (x > 0).sum(axis=1) / 2
    return Arrays(x=x.astype("int32"), y=y.astype("float32")[:, None])


def _distinct_sentences(random: np.random.RandomState, num_examples: int) -> Arrays:
    """Draws token ids of which no batch has one twice, but for the 0 of short sentences."""
    first = 1 + _TOKENS_PER_ROW * (np.arange(num_examples) % _ROWS_PER_BATCH)
    x = first[:, None] + np.arange(_TOKENS_PER_ROW)[None, :]
    x[::3, -1] = 0
    y = random.randint(0, 2, (num_examples, 1))
    return Arrays(x=x.astype("int32"), y=y.astype("float32"))


def _dense(keras: ModuleType) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "relu"), layers.Dense(3, "softmax")]
    )


def _regularised(keras: ModuleType) -> Any:
    layers, penalty = keras.layers, keras.regularizers.L2(0.02)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, "tanh", kernel_regularizer=penalty),
            layers.Dense(1, kernel_regularizer=penalty, bias_regularizer=penalty),
        ]
    )


def _convolutional(keras: ModuleType) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(6, 2, activation="relu"),
            layers.Flatten(),
            layers.Dense(3, "softmax"),
        ]
    )


def _normalised(keras: ModuleType) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8),
            layers.BatchNormalization(momentum=0.8),
            layers.Activation("relu"),
            layers.Dense(3, "softmax"),
        ]
    )


def _normalised_convolutional(keras: ModuleType) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.Activation("relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, "softmax"),
        ]
    )


def _embedding(keras: ModuleType) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(1 + _TOKENS_PER_ROW * _ROWS_PER_BATCH, 4, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, "sigmoid"),
        ]
    )


def _recurrent(keras: ModuleType) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(20, 4, mask_zero=True),
            layers.LSTM(3),
            layers.Dense(1, "sigmoid"),
        ]
    )


_CLASSES: dict[str, Any] = {"loss": "sparse_categorical_crossentropy", "metrics": ("accuracy",)}
_BINARY: dict[str, Any] = {"loss": "binary_crossentropy", "metrics": ("accuracy", "auc")}
_DENSE: dict[str, Any] = {"build": _dense, "draw": _points, **_CLASSES}
_CURVE: dict[str, Any] = {
    "build": _regularised,
    "draw": _curve,
    "loss": "mean_squared_error",
    "metrics": ("mean_absolute_error", "root_mean_squared_error"),
}
_IMAGES: dict[str, Any] = {"build": _convolutional, "draw": _images, **_CLASSES}
_NORMALISED: dict[str, Any] = {**_DENSE, "build": _normalised, "has_batch_norm": True}
_NORMALISED_IMAGES: dict[str, Any] = {
    **_IMAGES,
    "build": _normalised_convolutional,
    "has_batch_norm": True,
}
_SENTENCES: dict[str, Any] = {"build": _embedding, "draw": _sentences, **_BINARY}
_DISTINCT: dict[str, Any] = {**_SENTENCES, "draw": _distinct_sentences}

# `full`, `even` and `odd` tell the last batch: TensorFlow gives an even number of examples to two
# replicas in equal parts, and an odd number in unequal parts.
CASES: tuple[Case, ...] = (
    Case(name="dense_sgd_full", optimizer=_sgd, num_examples=48, **_DENSE),
    Case(name="dense_adam_even", optimizer=_adam, num_examples=38, **_DENSE),
    Case(name="dense_sgd_odd", optimizer=_sgd, num_examples=37, **_DENSE),
    Case(name="dense_sgd_odd_one_left", optimizer=_sgd, num_examples=33, **_DENSE),
    Case(
        name="dense_sample_weight_even",
        optimizer=_sgd,
        num_examples=38,
        is_weighted=True,
        weighted_metrics=("accuracy",),
        **_DENSE,
    ),
    Case(
        name="dense_class_weight_full",
        optimizer=_sgd,
        num_examples=32,
        class_weight={0: 0.5, 1: 1.0, 2: 3.0},
        **_DENSE,
    ),
    Case(name="regularised_sgd_full", optimizer=_sgd, num_examples=48, **_CURVE),
    Case(name="regularised_adam_even", optimizer=_adam, num_examples=42, **_CURVE),
    Case(name="regularised_adam_odd", optimizer=_adam, num_examples=41, **_CURVE),
    Case(name="convolution_sgd_full", optimizer=_sgd, num_examples=32, **_IMAGES),
    Case(name="convolution_adam_even", optimizer=_adam, num_examples=36, **_IMAGES),
    Case(name="batch_norm_sgd_full", optimizer=_sgd, num_examples=48, **_NORMALISED),
    Case(name="batch_norm_sgd_even", optimizer=_sgd, num_examples=44, **_NORMALISED),
    Case(name="batch_norm_sgd_odd", optimizer=_sgd, num_examples=41, **_NORMALISED),
    Case(name="batch_norm_images_full", optimizer=_adam, num_examples=32, **_NORMALISED_IMAGES),
    Case(name="embedding_sgd_even", optimizer=_sgd, num_examples=42, **_SENTENCES),
    Case(name="embedding_adam_even", optimizer=_adam, num_examples=42, **_DISTINCT),
    Case(
        name="embedding_adam_repeated_even",
        optimizer=_adam,
        num_examples=42,
        squares_repeated_rows=True,
        **_SENTENCES,
    ),
    Case(
        name="recurrent_sgd_even",
        optimizer=_sgd,
        num_examples=40,
        **{**_SENTENCES, "build": _recurrent},
    ),
)


def initial_weights(model: Any) -> list[np.ndarray]:
    """Draws weights of the shapes that a model has, in the order of `model.weights`.

    Args:
        model: a built Keras model.

    Returns:
        float32 arrays. Scales and moving variances lie around 1, all others around 0.
    """
    random = np.random.RandomState(0)
    drawn = []
    for variable in model.weights:
        values = random.standard_normal(tuple(variable.shape))
        if variable.path.endswith(("gamma", "moving_variance")):
            values = 1.0 + 0.2 * np.abs(values)
        else:
            values = values / np.sqrt(max(2.0, float(np.prod(variable.shape[:-1]))))
        drawn.append(values.astype("float32"))
    return drawn


def compiled_model(case: Case, keras: ModuleType, **compile_arguments: Any) -> Any:
    """Builds a case's model with its first weights and compiles it.

    Args:
        case: which run.
        keras: the `keras` module, on whatever backend it was loaded.
        **compile_arguments: passed on to `compile`.

    Returns:
        The model. Called in a strategy's scope, it belongs to that strategy. Call
        `keras.backend.clear_session()` before the scope, so that metrics are named alike.
    """
    model = case.build(keras)
    model.set_weights(initial_weights(model))
    model.compile(
        optimizer=case.optimizer(keras),
        loss=case.loss,
        metrics=list(case.metrics),
        weighted_metrics=list(case.weighted_metrics) or None,
        **compile_arguments,
    )
    return model


def measure(case: Case, model: Any, sample_weight: np.ndarray | None) -> dict[str, np.ndarray]:
    """Trains, evaluates and predicts, and returns every number that came out.

    Args:
        case: which run.
        model: what `compiled_model` returned.
        sample_weight: weight of each training example, shape (examples,), or None.

    Returns:
        float32 arrays under "fit/METRIC" (one number an epoch), "evaluate/METRIC", "predict" and
        "weights/INDEX/NAME", the index being that of `model.weights`.
    """
    train, held_out = case.training_data(), case.held_out_data()
    history = model.fit(
        train.x,
        train.y,
        batch_size=case.batch_size,
        epochs=case.epochs,
        shuffle=False,
        verbose=0,
        sample_weight=sample_weight,
        class_weight=case.class_weight,
    )
    evaluated = model.evaluate(
        held_out.x, held_out.y, batch_size=case.batch_size, verbose=0, return_dict=True
    )
    predicted = model.predict(held_out.x, batch_size=case.batch_size, verbose=0)
    measured = {f"fit/{key}": values for key, values in history.history.items()}
    measured |= {f"evaluate/{key}": value for key, value in evaluated.items()}
    measured["predict"] = predicted
    for index, variable in enumerate(model.weights):
        measured[f"weights/{index}/{variable.name}"] = np.asarray(variable.value)
    return {key: np.asarray(value, dtype="float32") for key, value in measured.items()}


def fingerprint(case: Case, model: Any) -> str:
    """Returns a digest of a case's weights and data, to tell a reference that is out of date."""
    digest = hashlib.sha256()
    settings = (case.batch_size, case.epochs, case.loss, case.metrics, case.class_weight)
    digest.update(repr(settings).encode())
    train, held_out, weights = case.training_data(), case.held_out_data(), case.sample_weight()
    arrays = [train.x, train.y, held_out.x, held_out.y, *initial_weights(model)]
    for array in arrays if weights is None else [*arrays, weights]:
        digest.update(repr((array.shape, array.dtype.str)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
