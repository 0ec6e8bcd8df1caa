"""Keras initializers as initial rows by key, which servers compute without code of a client."""

from __future__ import annotations

from typing import Any

import keras

from stratagem.messages import explain
from stratagem.parameter_server.server.tables.row_initializer import RowInitializer

__all__ = ["row_initializer"]


def row_initializer(initializer: Any) -> RowInitializer:
    """Returns the distribution of a Keras initializer, with its seed.

    Raises:
        ValueError: an initializer of another kind.
    """
    kinds = keras.initializers
    if isinstance(initializer, kinds.RandomUniform):
        return RowInitializer("uniform", initializer.minval, initializer.maxval, _seed(initializer))
    if isinstance(initializer, kinds.TruncatedNormal):
        mean, deviation = initializer.mean, initializer.stddev
        return RowInitializer("truncated_normal", mean, deviation, _seed(initializer))
    if isinstance(initializer, kinds.RandomNormal):
        return RowInitializer("normal", initializer.mean, initializer.stddev, _seed(initializer))
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


def _seed(initializer: Any) -> int:
    seed = initializer.seed
    return int(seed.initial_seed if isinstance(seed, keras.random.SeedGenerator) else seed)
