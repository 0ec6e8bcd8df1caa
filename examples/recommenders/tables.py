"""Tables of the examples: of a vocabulary, or keyed by 64-bit ids on parameter servers."""

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np

TABLES = ("vocabulary", "keyed")


class Tables:
    """Makes the tables of a model, and the inputs that look their rows up.

    Args:
        kind: one of `TABLES`.
        width: columns of each table.
        eviction: of keyed tables, such as `sg.embedding.NotSeenFor(10_000)`.
        storage_dtype: of the rows of keyed tables on servers.
    """

    def __init__(self, kind, width, *, eviction=None, storage_dtype=None):
        self.is_keyed = kind == "keyed"
        self.width = width
        self._options = {"eviction": eviction, "storage_dtype": storage_dtype}

    def make(self, name, num_ids, deviation=0.1):
        """Returns the layer of a table with normal initial rows.

        Args:
            name: of the layer.
            num_ids: rows; keyed tables have as many as they need.
            deviation: standard deviation of the initial rows.
        """
        start = keras.initializers.RandomNormal(stddev=deviation, seed=1)
        if self.is_keyed:
            return sg.embedding.DynamicEmbedding(
                self.width, initializer=start, name=name, **self._options
            )
        return keras.layers.Embedding(num_ids, self.width, start, name=name)

    def input(self, name, *shape):
        """Returns an input of ids.

        Args:
            name: of the input.
            *shape: of the ids of an example.
        """
        if self.is_keyed:
            return keras.layers.Input((*shape, 2), dtype="uint32", name=name)
        return keras.layers.Input(shape, dtype="int32", name=name)

    def ids(self, ids):
        """Returns ids as the input takes them.

        Args:
            ids: integers of any shape.
        """
        return sg.embedding.keys(ids) if self.is_keyed else np.asarray(ids, np.int32)
