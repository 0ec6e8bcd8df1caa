"""A decoder like Llama of Keras's layers: grouped queries, rotary positions, a gated layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.large_models.cases import Decoder

__all__ = ["build_decoder", "compiled", "rotations"]


def rotations(length: int, head_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines of the rotary positions."""
    frequencies = 10_000.0 ** -(np.arange(0, head_size, 2) / head_size)
    angles = np.arange(length)[:, None, None] * frequencies
    return np.cos(angles).astype("float32"), np.sin(angles).astype("float32")


class Block(layers.Layer):
    """Attention and a gated layer, each after a normalization."""

    def __init__(self, sizes: Decoder, *, recomputes: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sizes, self.recomputes = sizes, recomputes

        def dense(name: str, width: int, activation: str | None = None) -> Any:
            return layers.Dense(width, activation=activation, use_bias=False, name=name)

        self.query = dense("query", sizes.num_heads * sizes.head_size)
        self.key = dense("key", sizes.num_kv_heads * sizes.head_size)
        self.value = dense("value", sizes.num_kv_heads * sizes.head_size)
        self.output_projection = dense("output", sizes.width)
        self.gate = dense("gate", sizes.inner_width, "silu")
        self.inner = dense("inner", sizes.inner_width)
        self.outer = dense("outer", sizes.width)
        self.norms = [layers.RMSNormalization(name=f"norm_{number}") for number in range(2)]

    def build(self, input_shape: Any) -> None:
        sizes = self.sizes
        for layer in (self.query, self.key, self.value, self.gate, self.inner, *self.norms):
            layer.build(input_shape)
        self.output_projection.build((*input_shape[:-1], sizes.num_heads * sizes.head_size))
        self.outer.build((*input_shape[:-1], sizes.inner_width))

    def call(self, x: Any) -> Any:
        return keras.remat(self._compute)(x) if self.recomputes else self._compute(x)

    def _compute(self, x: Any) -> Any:
        x = x + self._attend(self.norms[0](x))
        normalized = self.norms[1](x)
        return x + self.outer(self.gate(normalized) * self.inner(normalized))

    def _attend(self, x: Any) -> Any:
        batch, length, _ = ops.shape(x)

        def heads(projection: Callable[[Any], Any]) -> Any:
            return ops.reshape(projection(x), (batch, length, -1, self.sizes.head_size))

        query, key = (_rotated(heads(one)) for one in (self.query, self.key))
        attended = ops.dot_product_attention(query, key, heads(self.value), is_causal=True)
        return self.output_projection(ops.reshape(attended, (batch, length, -1)))


def _rotated(x: Any) -> Any:
    cosines, sines = (ops.cast(one, x.dtype) for one in rotations(x.shape[1], x.shape[-1]))
    first, second = ops.split(x, 2, axis=-1)
    return ops.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )


def build_decoder(sizes: Decoder, length: int, *, recomputes: bool) -> keras.Model:
    """Returns a decoder that predicts the next token of sequences of one length."""
    tokens = layers.Input((length,), dtype="int32")
    x = layers.Embedding(sizes.vocabulary, sizes.width, name="embedding")(tokens)
    for number in range(sizes.num_layers):
        x = Block(sizes, recomputes=recomputes, name=f"block_{number}")(x)
    x = layers.RMSNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(sizes.vocabulary, use_bias=False, name="logits")(x))


def compiled(model: keras.Model) -> keras.Model:
    """Returns the decoder with Adam and the loss of the next token."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    return model
