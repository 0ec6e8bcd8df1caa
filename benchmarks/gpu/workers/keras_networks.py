"""The models in Keras, for every side that uses Keras, on whichever backend."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.gpu.models import (
    BOTTOM_WIDTHS,
    NUM_DENSE,
    NUM_TABLES,
    ROW_SIZE,
    TOP_WIDTHS,
    GpuModel,
    TransformerSizes,
)
from benchmarks.workers.keras_models import build_model as build_benchmark_model
from benchmarks.workloads import MLP_SIZES

__all__ = ["TABLE", "build_model", "compile_model"]

TABLE = "tables"  # the layer whose memory a placement chooses
_EPSILON = 1e-5


def build_model(model: GpuModel, *, is_mixed: bool = True) -> keras.Model:
    """Returns a model, with the same weights in every process of one backend.

    With `is_mixed`, the large models compute in bfloat16.
    """
    keras.utils.set_random_seed(0)
    if is_mixed and model.kind in ("resnet50", "bert", "gpt"):
        keras.config.set_dtype_policy("mixed_bfloat16")
    if model.kind == "mlp":
        assert MLP_SIZES[-1] == model.num_classes
        return build_benchmark_model("mlp")
    make = {"resnet50": _resnet50, "bert": _bert, "gpt": _gpt, "dlrm": _dlrm}
    return make[model.kind](model)


def compile_model(network: keras.Model, model: GpuModel, *, steps_per_call: int) -> None:
    """Compiles with Adam and cross entropy of logits, or as DLRM is trained; without metrics."""
    if model.kind == "dlrm":
        optimizer: Any = keras.optimizers.Adagrad(model.learning_rate)
        loss: Any = keras.losses.BinaryCrossentropy(from_logits=True)
    else:
        optimizer = keras.optimizers.Adam(model.learning_rate)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer=optimizer, loss=loss, steps_per_execution=steps_per_call)


def _resnet50(model: GpuModel) -> keras.Model:
    shape = (model.image_size, model.image_size, 3)
    pixels = layers.Input(shape, dtype="uint8")
    network = keras.applications.ResNet50(
        weights=None,
        input_shape=shape,
        classes=model.num_classes,
        classifier_activation=None,
    )
    return keras.Model(pixels, network(layers.Rescaling(1 / 255)(pixels)))


def _bert(model: GpuModel) -> keras.Model:
    """BERT with post-normalization, and a class from the first token."""
    sizes = _sizes(model)
    tokens = layers.Input((sizes.length,), dtype="int32")
    embedded = layers.Embedding(sizes.num_tokens, sizes.width, name="tokens")(tokens)
    x = _norm("norm")(_Positions(name="positions")(embedded))
    for index in range(sizes.num_blocks):
        attention = _Attention(sizes, is_causal=False, name=f"attention_{index}")
        x = _norm(f"first_norm_{index}")(x + attention(x))
        x = _norm(f"second_norm_{index}")(x + _feed_forward(x, sizes, index))
    pooled = layers.Dense(sizes.width, activation="tanh", name="pooler")(x[:, 0])
    return keras.Model(tokens, layers.Dense(model.num_classes, name="head")(pooled))


def _gpt(model: GpuModel) -> keras.Model:
    """GPT-2: a causal decoder with pre-normalization; its logits use the token embedding."""
    sizes = _sizes(model)
    tokens = layers.Input((sizes.length,), dtype="int32")
    embedding = layers.ReversibleEmbedding(sizes.num_tokens, sizes.width, name="tokens")
    x = _Positions(name="positions")(embedding(tokens))
    for index in range(sizes.num_blocks):
        attention = _Attention(sizes, is_causal=True, name=f"attention_{index}")
        x = x + attention(_norm(f"first_norm_{index}")(x))
        x = x + _feed_forward(_norm(f"second_norm_{index}")(x), sizes, index)
    return keras.Model(tokens, embedding(_norm("norm")(x), reverse=True))


class _Positions(layers.Layer):
    """Adds a vector for each position."""

    def build(self, input_shape: Any) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="uniform", name="vectors")

    def call(self, x: Any) -> Any:
        return x + self.vectors


class _Attention(layers.Layer):
    """Self-attention with one matrix for queries, keys and values, and the fused kernel."""

    def __init__(self, sizes: TransformerSizes, *, is_causal: bool, **options: Any) -> None:
        super().__init__(**options)
        self.num_heads, self.is_causal = sizes.num_heads, is_causal
        self.inner = layers.Dense(3 * sizes.width, name="inner")
        self.outer = layers.Dense(sizes.width, name="outer")

    def build(self, input_shape: Any) -> None:
        self.inner.build(input_shape)
        self.outer.build(input_shape)

    def call(self, x: Any) -> Any:
        length, width = x.shape[1:]
        heads = (-1, length, 3, self.num_heads, width // self.num_heads)
        parts = ops.reshape(self.inner(x), heads)
        attended = _attend(parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], self.is_causal)
        return self.outer(ops.reshape(attended, (-1, length, width)))


def _attend(query: Any, key: Any, value: Any, is_causal: bool) -> Any:
    """Attends with the fused kernel if it is not disabled, or says on stderr why not."""
    if keras.config.is_flash_attention_enabled() is False:
        return ops.dot_product_attention(query, key, value, is_causal=is_causal)
    try:
        return ops.dot_product_attention(
            query, key, value, is_causal=is_causal, flash_attention=True
        )
    except Exception as error:  # noqa: BLE001 - as many kinds as there are reasons
        print(f"No fused attention: {error!r}", file=sys.stderr)
        return ops.dot_product_attention(query, key, value, is_causal=is_causal)


def _feed_forward(x: Any, sizes: TransformerSizes, index: int) -> Any:
    inner = layers.Dense(4 * sizes.width, activation="gelu", name=f"expand_{index}")(x)
    return layers.Dense(sizes.width, name=f"contract_{index}")(inner)


def _norm(name: str) -> layers.Layer:
    return layers.LayerNormalization(epsilon=_EPSILON, name=name)


def _sizes(model: GpuModel) -> TransformerSizes:
    assert model.transformer is not None
    return model.transformer


def _dlrm(model: GpuModel) -> keras.Model:
    """DLRM: products of all pairs of 26 looked-up rows and of what the dense features become."""
    dense = layers.Input((NUM_DENSE,))
    ids = layers.Input((NUM_TABLES,), dtype="int32")
    # Constant, because random numbers for gigabytes take longer than the measurement.
    first = keras.initializers.Constant(0.01)
    rows = layers.Embedding(model.table_rows, ROW_SIZE, embeddings_initializer=first, name=TABLE)
    x = dense
    for index, width in enumerate(BOTTOM_WIDTHS):
        x = layers.Dense(width, activation="relu", name=f"bottom_{index}")(x)
    products = _Products(name="products")([rows(ids), x])
    x = layers.Concatenate()([x, products])
    for index, width in enumerate(TOP_WIDTHS):
        x = layers.Dense(width, activation="relu", name=f"top_{index}")(x)
    return keras.Model([dense, ids], layers.Dense(1, name="head")(x))


class _Products(layers.Layer):
    """Inner products of all pairs of vectors."""

    def call(self, inputs: Any) -> Any:
        rows, x = inputs
        vectors = ops.concatenate([x[:, None], rows], axis=1)
        products = ops.matmul(vectors, ops.transpose(vectors, (0, 2, 1)))
        count = NUM_TABLES + 1
        first, second = np.tril_indices(count, -1)
        flat = ops.reshape(products, (-1, count * count))
        return ops.take(flat, (first * count + second).astype("int32"), axis=1)
