"""Row lookups of embedding layers.

Where `sg.value_and_grad` keeps the gradient of the table as rows, the layer looks them up with
`embedding_lookup`; everything else goes to Keras.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import keras

from stratagem.execution.embeddings.lookups import embedding_lookup, is_recorded, note_table
from stratagem.keras.patches import patches
from stratagem.keras.variables.annotations import making_table

if TYPE_CHECKING:
    import jax


@patches(keras.layers.Embedding, "build", why="strategies recognize a table before it has a value")
def building_table(original: Callable[..., Any]) -> Any:
    """Returns `Embedding.build` that registers the table."""

    @functools.wraps(original)
    def build(self: keras.layers.Embedding, *args: object, **kwargs: object) -> None:
        with making_table():
            original(self, *args, **kwargs)
        if (table := _table(self)) is not None:
            note_table(table)

    return build


@patches(keras.layers.Embedding, "call", why="the gradient of a table is rows")
def looking_up_rows(original: Callable[..., Any]) -> Any:
    """Returns `Embedding.call` that looks up rows of a recorded table."""

    @functools.wraps(original)
    def call(self: keras.layers.Embedding, inputs: jax.Array) -> Any:
        table = _table(self)
        if table is None or not is_recorded(table):
            return original(self, inputs)
        if inputs.dtype not in ("int32", "int64"):
            inputs = cast("jax.Array", keras.ops.cast(inputs, "int32"))
        return keras.ops.cast(embedding_lookup(table, inputs), self.compute_dtype)

    return call


def _table(layer: keras.layers.Embedding) -> Any:
    """Returns the variable with the embeddings in its rows; None if the layer computes them."""
    if layer.lora_enabled or layer.quantization_mode:
        return None
    table = layer.embeddings
    return table if isinstance(table, keras.Variable) else None
