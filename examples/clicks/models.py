"""Two models of clicks: a factorisation machine, and a wide and deep one.

Both look each id up once, in one table: column 0 of its row is the weight of the id by itself, the
others are its vector. They return logits.
"""

import stratagem as sg  # noqa: F401  isort: skip - before keras, because it selects the JAX backend
import keras
from keras import layers, ops

# Of Adagrad, whose slots begin at 0.01.
LEARNING_RATES = {"factorisation": 0.3, "wide_and_deep": 0.15}
MODELS = tuple(LEARNING_RATES)


def build(name, num_ids, num_fields, num_numbers, *, width=32):
    """Returns a model of dicts of `ids` and `numbers`.

    Args:
        name: one of `MODELS`.
        num_ids: rows of the table.
        num_fields: ids of an example.
        num_numbers: numbers of an example.
        width: columns of the table.
    """
    ids = layers.Input((num_fields,), dtype="int32", name="ids")
    numbers = layers.Input((num_numbers,), name="numbers")
    small = keras.initializers.RandomUniform(-0.1, 0.1, seed=1)
    rows = layers.Embedding(num_ids, width, embeddings_initializer=small, name="table")(ids)
    weights, vectors = ops.sum(rows[..., 0], axis=1), rows[..., 1:]
    if name == "factorisation":
        by_itself = layers.Dense(1, name="numbers_and_bias")(numbers)[..., 0]
        logits = weights + by_itself + sum_over_pairs(vectors)
    else:
        deep = layers.Concatenate()([layers.Flatten()(vectors), numbers])
        for units in (64, 32):
            deep = layers.Dense(units, "relu")(deep)
        logits = weights + layers.Dense(1, name="bias")(deep)[..., 0]
    return keras.Model({"ids": ids, "numbers": numbers}, logits, name=name)


def sum_over_pairs(vectors):
    """Returns the sum of the inner products of all pairs of an example's vectors.

    Args:
        vectors: of shape (examples, fields, columns).
    """
    total = ops.sum(vectors, axis=1)
    return ops.sum(ops.square(total) - ops.sum(ops.square(vectors), axis=1), axis=1) / 2
