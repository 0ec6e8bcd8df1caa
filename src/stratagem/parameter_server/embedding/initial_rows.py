"""Keras initializers as initial rows by key, which servers compute without code of a client."""

from __future__ import annotations

from typing import Any

import keras

from stratagem.messages import explain
from stratagem.parameter_server.server.tables.row_initializer import RowInitializer


def row_initializer(initializer: Any, default_seed: int) -> RowInitializer:
    """Returns the distribution of a Keras initializer, with its seed.

    `default_seed` is for an initializer without one.

    Raises:
        ValueError: an initializer of another kind.
    """
    kinds, seed = keras.initializers, _seed(initializer, default_seed)
    if isinstance(initializer, kinds.RandomUniform):
        return RowInitializer("uniform", initializer.minval, initializer.maxval, seed)
    if isinstance(initializer, kinds.TruncatedNormal):
        mean, deviation = initializer.mean, initializer.stddev
        return RowInitializer("truncated_normal", mean, deviation, seed)
    if isinstance(initializer, kinds.RandomNormal):
        return RowInitializer("normal", initializer.mean, initializer.stddev, seed)
    if isinstance(initializer, kinds.Zeros):
        return RowInitializer("constant", 0.0)
    if isinstance(initializer, kinds.Ones):
        return RowInitializer("constant", 1.0)
    if isinstance(initializer, kinds.Constant):
        return RowInitializer("constant", float(initializer.value))
    name = getattr(type(initializer), "__name__", repr(initializer))
    raise ValueError(
        explain(
            f"DynamicEmbedding received the initializer {name}.",
            expected="RandomUniform, RandomNormal, TruncatedNormal, Constant, Zeros or Ones: "
            "servers compute a row from its key, and no table has a known number of rows.",
            fix="choose the scale yourself: keras.initializers.RandomUniform(-0.05, 0.05).",
        )
    )


def _seed(initializer: Any, default: int) -> int:
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    if config.get("seed") is None:  # Keras draws another one in each run
        return default
    seed: Any = initializer.seed
    is_generator = isinstance(seed, keras.random.SeedGenerator)
    own: Any = seed.get_config()["seed"] if is_generator else seed
    return int(own)
