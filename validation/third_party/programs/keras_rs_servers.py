"""`DistributedEmbedding` with a table that is large enough for rows to move alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import keras_rs
import numpy as np

from validation.third_party.programs.measuring import Measurements, Place, Program, measured

_NUM_EXAMPLES, _BATCH_SIZE = 22, 8
_SIZES = {"films": (9000, 8), "users": (7, 8)}


def _table(name: str, combiner: str) -> Any:
    """A table with a seed: KerasRS draws that of its defaults when it is imported."""
    num_rows, row_size = _SIZES[name]
    return keras_rs.layers.TableConfig(
        name=name,
        vocabulary_size=num_rows,
        embedding_dim=row_size,
        combiner=combiner,
        initializer=keras.initializers.RandomUniform(-0.5, 0.5, seed=num_rows),
    )


def _model(place: Place, optimizer: Callable[[float], Any]) -> Any:
    films, users = _table("films", "mean"), _table("users", "sum")
    feature = functools.partial(keras_rs.layers.FeatureConfig, output_shape=(None, 8))
    features = {
        "film": feature(name="film", table=films, input_shape=(None, 1)),
        "seen": feature(name="seen", table=films, input_shape=(None, 3)),
        "user": feature(name="user", table=users, input_shape=(None, 1)),
    }
    with place.scope():
        inputs = {
            name: keras.Input((one.input_shape[1],), dtype="int32", name=name)
            for name, one in features.items()
        }
        embedded = keras_rs.layers.DistributedEmbedding(features)(inputs)
        dotted = keras_rs.layers.DotInteraction()(list(embedded.values()))
        both = keras.layers.Concatenate()([embedded["film"], dotted])
        model = keras.Model(inputs, keras.layers.Dense(1)(both))
        model.compile(optimizer=optimizer(0.1), loss="mse", metrics=["mae"])
    return model


def _trained(place: Place, optimizer: Callable[[float], Any]) -> Measurements:
    random = np.random.default_rng(3)
    rows = {
        name: random.integers(0, size, (_NUM_EXAMPLES, count)).astype("int32")
        for name, size, count in (("film", 9000, 1), ("seen", 40, 3), ("user", 7, 1))
    }
    ratings = random.uniform(1, 5, (_NUM_EXAMPLES, 1)).astype("float32")
    return measured(place, _model(place, optimizer), rows, ratings, _BATCH_SIZE)


def with_sgd(place: Place) -> Measurements:
    return _trained(place, keras.optimizers.SGD)


def with_adagrad(place: Place) -> Measurements:
    return _trained(place, keras.optimizers.Adagrad)


PROGRAMS: dict[str, Program] = {program.__name__: program for program in (with_sgd, with_adagrad)}
