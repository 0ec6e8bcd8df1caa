"""Row lookups of embedding layers.

`build` and `call` of `keras.layers.Embedding` are replaced (Keras 3.12 to 3.15). If
`sg.value_and_grad` represents the gradient of the table as rows, the layer uses `embedding_lookup`;
otherwise Keras's own code runs.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from stratagem.execution import embedding_lookup, is_recorded, note_table
from stratagem.keras.variables.annotations import making_table

__all__ = ["install"]


def install() -> None:
    """Makes embedding layers use row lookups. Called once, on import."""
    _wrap_build(keras.layers.Embedding)
    _wrap_call(keras.layers.Embedding)


def _wrap_build(cls: Any) -> None:
    original = cls.build

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        with making_table():
            original(self, *args, **kwargs)
        if (table := _table(self)) is not None:
            note_table(table)

    cls.build = build


def _wrap_call(cls: Any) -> None:
    original = cls.call

    @functools.wraps(original)
    def call(self: Any, inputs: Any) -> Any:
        table = _table(self)
        if table is None or not is_recorded(table):
            return original(self, inputs)
        if inputs.dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        return keras.ops.cast(embedding_lookup(table, inputs), self.compute_dtype)

    cls.call = call


def _table(layer: Any) -> Any:
    """Returns the variable with the embeddings in its rows; None if the layer computes them."""
    if layer.lora_enabled or layer.quantization_mode:
        return None
    table = layer.embeddings
    return table if isinstance(table, keras.Variable) else None
