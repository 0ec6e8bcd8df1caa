"""Models whose table is by key, and the same in plain Keras with a dictionary as vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import stratagem as sg

RNG = np.random.default_rng(0)
NUM_KEYS, NUM_EXAMPLES, WIDTH = 13, 48, 3
# Each batch of 24 has every key, and most more than once, so that dense Adam changes the same rows.
KEYS = RNG.integers(-(2**63), 2**63, NUM_KEYS)
PLACES = np.concatenate([RNG.permutation(np.arange(72) % NUM_KEYS) for _ in range(2)]).reshape(
    NUM_EXAMPLES, WIDTH
)
IDS = KEYS[PLACES]
Y = RNG.normal(size=(NUM_EXAMPLES, 1)).astype("float32")
FIT: dict[str, Any] = {"batch_size": 24, "epochs": 3, "shuffle": False, "verbose": 0}


def model_of(table: Any, inputs: Any, optimizer: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [inputs, table, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer() if callable(optimizer) else optimizer, "mse", **options)
    return model


def keyed_model(
    strategy: sg.Strategy, optimizer: Any, layer: dict[str, Any] | None = None, **options: Any
) -> keras.Model:
    with strategy.scope():
        keras.utils.set_random_seed(3)
        table = sg.embedding.DynamicEmbedding(4, name="table", **(layer or {}))
        return model_of(table, keras.Input((WIDTH, 2), dtype="uint32"), optimizer, **options)


def plain_model(like: keras.Model, optimizer: Any, **options: Any) -> keras.Model:
    """The same model in plain Keras, with the rows and weights that `like` has now."""
    table = keras.layers.Embedding(NUM_KEYS, 4, name="table")
    model = model_of(table, keras.Input((WIDTH,), dtype="int32"), optimizer, **options)
    table.set_weights([rows_of(like)])
    model.layers[-1].set_weights([np.asarray(one) for one in like.layers[-1].weights])
    return model


def rows_of(model: keras.Model) -> np.ndarray:
    """The rows of all keys, in the order of `KEYS`."""
    table = model.get_layer("table")
    if isinstance(table, sg.embedding.DynamicEmbedding):
        return np.asarray(table(sg.embedding.keys(KEYS)))
    return np.asarray(table.embeddings)


def compare(strategy: sg.Strategy, optimizer: Callable[[], Any], **options: Any) -> keras.Model:
    """Fits both, and requires equal losses, rows and predictions. Returns the keyed one."""
    keyed = keyed_model(strategy, optimizer, **options)
    plain = plain_model(keyed, optimizer)
    x = sg.embedding.keys(IDS)
    losses = keyed.fit(x, Y, **FIT).history["loss"]
    expected = plain.fit(PLACES, Y, **FIT).history["loss"]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(rows_of(keyed), rows_of(plain), rtol=1e-5, atol=1e-6)
    found = keyed.evaluate(x, Y, verbose=0), keyed.predict(x, verbose=0)
    for one, other in zip(
        found, (plain.evaluate(PLACES, Y, verbose=0), plain(PLACES)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    return keyed
