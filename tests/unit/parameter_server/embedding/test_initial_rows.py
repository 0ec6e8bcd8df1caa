"""Keras initializers as distributions that servers have."""

from __future__ import annotations

import keras
import pytest

from stratagem.parameter_server.embedding.layer import row_initializer
from stratagem.parameter_server.server.tables.table_options import RowInitializer

INITIALIZERS = keras.initializers


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [
        (INITIALIZERS.RandomUniform(-1, 2, seed=3), RowInitializer("uniform", -1, 2, 3)),
        (INITIALIZERS.RandomNormal(1, 2, seed=4), RowInitializer("normal", 1, 2, 4)),
        (INITIALIZERS.TruncatedNormal(0, 2, 5), RowInitializer("truncated_normal", 0, 2, 5)),
        (INITIALIZERS.RandomNormal(), RowInitializer("normal", 0.0, 0.05, 9)),  # no seed
        (INITIALIZERS.Constant(1.5), RowInitializer("constant", 1.5)),
        (INITIALIZERS.Zeros(), RowInitializer("constant", 0.0)),
        (INITIALIZERS.Ones(), RowInitializer("constant", 1.0)),
        (
            INITIALIZERS.RandomUniform(seed=keras.random.SeedGenerator(7)),
            RowInitializer("uniform", -0.05, 0.05, 7),
        ),
    ],
)
def test_initializer_is_sent_as_data(initializer, expected) -> None:
    assert row_initializer(initializer, 9) == expected


@pytest.mark.parametrize("name", ["glorot_uniform", "orthogonal"])
def test_initializer_that_needs_the_number_of_rows_is_refused(name) -> None:
    with pytest.raises(ValueError, match="DynamicEmbedding received the initializer"):
        row_initializer(keras.initializers.get(name), 9)
