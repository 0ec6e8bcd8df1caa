"""The models in Keras, for every side that uses Keras, on whichever backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
from keras import layers

from benchmarks.workloads import MLP_SIZES, WORKLOADS, Workload, mlp_weights

__all__ = ["build_model", "compile_model", "fit_arguments"]


@dataclasses.dataclass(frozen=True)
class _TransformerSizes:
    width: int
    num_heads: int
    feed_forward_width: int
    num_blocks: int


_SMALL_TRANSFORMER = _TransformerSizes(64, 4, 128, 2)
# Those of BERT-base: Devlin et al. 2019, section 3.
_LARGE_TRANSFORMER = _TransformerSizes(768, 12, 3072, 12)

# About those of GPT-2's successors with a billion parameters: 21 blocks of 50 million.
_BILLION_TRANSFORMER = _TransformerSizes(2048, 16, 8192, 21)
# As many blocks as BERT-base and GPT-2 have, a third as wide: for a step that is cheap beside the
# compilation of its program.
_NARROW_TRANSFORMER = _TransformerSizes(256, 4, 1024, 12)


def build_model(name: str) -> keras.Model:
    """Returns the model of a workload, with the same weights in every process."""
    keras.utils.set_random_seed(0)
    workload = WORKLOADS[name]
    make = {
        "mlp": _mlp,
        "small_mlp": _small_mlp,
        "cnn": _cnn,
        "transformer": _small_transformer,
        "large_transformer": _large_transformer,
        "billion_transformer": _billion_transformer,
        "resnet50": _resnet50,
        "bert": _bert,
        "gpt2": _gpt2,
        "small_resnet50": _small_resnet50,
    }
    return make[name](workload)


def compile_model(model: keras.Model, *, steps_per_call: int, **options: Any) -> None:
    """Compiles with Adam, cross entropy of logits, and accuracy."""
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_call,
        **options,
    )


def fit_arguments() -> dict[str, Any]:
    """How every side calls `fit`: silently, and without shuffling, which is no framework's own."""
    return {"verbose": 0, "shuffle": False}


def _mlp(workload: Workload) -> keras.Model:
    hidden = [layers.Dense(size, activation="relu") for size in MLP_SIZES[1:-1]]
    model = keras.Sequential(
        [layers.Input(workload.input_shape), *hidden, layers.Dense(MLP_SIZES[-1])]
    )
    model.set_weights(mlp_weights())
    return model


def _small_mlp(workload: Workload) -> keras.Model:
    """What one trains on scikit-learn's digits: a step whose price is that of starting it."""
    hidden = layers.Dense(64, activation="relu")
    return keras.Sequential(
        [layers.Input(workload.input_shape), hidden, layers.Dense(workload.num_classes)]
    )


def _cnn(workload: Workload) -> keras.Model:
    """Keras's MNIST example."""
    return keras.Sequential(
        [
            layers.Input(workload.input_shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(workload.num_classes),
        ]
    )


def _small_transformer(workload: Workload) -> keras.Model:
    return _transformer(workload, _SMALL_TRANSFORMER)


def _large_transformer(workload: Workload) -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return _transformer(workload, _LARGE_TRANSFORMER)


def _billion_transformer(workload: Workload) -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return _transformer(workload, _BILLION_TRANSFORMER)


def _transformer(workload: Workload, sizes: _TransformerSizes) -> keras.Model:
    tokens = layers.Input(workload.input_shape, dtype="int32")
    x = layers.Embedding(workload.num_tokens, sizes.width)(tokens)
    for _ in range(sizes.num_blocks):
        attention = layers.MultiHeadAttention(sizes.num_heads, sizes.width // sizes.num_heads)
        x = layers.LayerNormalization()(x + attention(x, x))
        inner = layers.Dense(sizes.feed_forward_width, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(sizes.width)(inner))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(workload.num_classes)(x))


def _resnet50(workload: Workload) -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    pixels = layers.Input(workload.input_shape, dtype="uint8")
    network = keras.applications.ResNet50(
        weights=None, classes=workload.num_classes, classifier_activation=None
    )
    return keras.Model(pixels, network(layers.Rescaling(1 / 255)(pixels)))


def _small_resnet50(workload: Workload) -> keras.Model:
    return keras.applications.ResNet50(
        weights=None,
        input_shape=workload.input_shape,
        classes=workload.num_classes,
        classifier_activation=None,
    )


def _bert(workload: Workload) -> keras.Model:
    """BERT: an encoder with post-normalization, and a class from the first token."""
    sizes = _NARROW_TRANSFORMER
    tokens = layers.Input(workload.input_shape, dtype="int32")
    x = layers.LayerNormalization()(_embed(tokens, workload, sizes))
    for _ in range(sizes.num_blocks):
        attention = layers.MultiHeadAttention(sizes.num_heads, sizes.width // sizes.num_heads)
        x = layers.LayerNormalization()(x + attention(x, x))
        x = layers.LayerNormalization()(x + _feed_forward(x, sizes))
    pooled = layers.Dense(sizes.width, activation="tanh")(x[:, 0])
    return keras.Model(tokens, layers.Dense(workload.num_classes)(pooled))


def _gpt2(workload: Workload) -> keras.Model:
    """GPT-2: a causal decoder with pre-normalization, and logits of the next token."""
    sizes = _NARROW_TRANSFORMER
    tokens = layers.Input(workload.input_shape, dtype="int32")
    x = _embed(tokens, workload, sizes)
    for _ in range(sizes.num_blocks):
        attention = layers.MultiHeadAttention(sizes.num_heads, sizes.width // sizes.num_heads)
        normalized = layers.LayerNormalization()(x)
        x = x + attention(normalized, normalized, use_causal_mask=True)
        x = x + _feed_forward(layers.LayerNormalization()(x), sizes)
    logits = layers.Dense(workload.num_classes, use_bias=False)
    return keras.Model(tokens, logits(layers.LayerNormalization()(x)))


class _PositionEmbedding(layers.Layer):
    """Adds a vector for each position."""

    def build(self, input_shape: Any) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="uniform")

    def call(self, x: Any) -> Any:
        return x + self.vectors


def _embed(tokens: Any, workload: Workload, sizes: _TransformerSizes) -> Any:
    return _PositionEmbedding()(layers.Embedding(workload.num_tokens, sizes.width)(tokens))


def _feed_forward(x: Any, sizes: _TransformerSizes) -> Any:
    inner = layers.Dense(sizes.feed_forward_width, activation="gelu")(x)
    return layers.Dense(sizes.width)(inner)
