"""Models that are profiled and planned on one GPU, with the batches that they are trained with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import stratagem  # noqa: F401  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
import numpy as np
from keras import layers, ops

__all__ = ["CASES", "Case"]

_CLASSES = 1000


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its batch.

    Args:
        build: returns the compiled model; "fused" asks for attention in one kernel.
        shape: of an example.
        dtype: of the examples; integers are tokens.
        num_labels: labels of an example; 0 for one label.
        batch_size: examples of a step.
        num_steps: steps of a timed epoch.
    """

    build: Callable[[bool], keras.Model]
    shape: tuple[int, ...]
    dtype: str
    num_labels: int
    batch_size: int
    num_steps: int

    def shapes(self, num_devices: int = 1) -> tuple[Any, ...]:
        """Returns the shapes of a batch of all devices."""
        rows = self.batch_size * num_devices
        labels = (rows, self.num_labels) if self.num_labels else (rows,)
        return (
            jax.ShapeDtypeStruct((rows, *self.shape), self.dtype),
            jax.ShapeDtypeStruct(labels, "int32"),
        )

    def arrays(self, num_batches: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns examples and labels of some batches, all batches alike."""
        random = np.random.default_rng(0)
        examples, labels = self.shapes()
        if self.dtype == "float32":
            x = random.standard_normal(examples.shape, "float32")
        else:
            x = random.integers(0, 250, examples.shape, self.dtype)
        y = random.integers(0, 10, labels.shape, "int32")
        return np.concatenate([x] * num_batches), np.concatenate([y] * num_batches)


def _compiled(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _mlp(width: int, depth: int) -> keras.Model:
    keras.config.set_dtype_policy("float32")
    hidden = [layers.Dense(width, activation="relu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10)])
    return _compiled(model, keras.optimizers.Adam())


def _resnet(size: int) -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    pixels = keras.Input((size, size, 3), dtype="uint8")
    options: dict[str, Any] = {"weights": None, "classifier_activation": None}
    network = keras.applications.ResNet50(input_shape=(size, size, 3), classes=_CLASSES, **options)
    model = keras.Model(pixels, network(layers.Rescaling(1 / 255)(pixels)))
    return _compiled(model, keras.optimizers.SGD(0.1, momentum=0.9))


class _Embedding(layers.Layer):
    """Vectors of tokens and of positions."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = layers.Embedding(num_tokens, width)
        self.width = width

    def build(self, input_shape: Any) -> None:
        self.tokens.build(input_shape)
        self.positions = self.add_weight(shape=(input_shape[1], self.width), name="positions")

    def call(self, tokens: Any) -> Any:
        return self.tokens(tokens) + ops.cast(self.positions, self.compute_dtype)


class _Logits(layers.Layer):
    """Logits of the next token, by the vectors of the tokens themselves."""

    def __init__(self, embedding: layers.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        vectors = ops.cast(self.embedding.embeddings, self.compute_dtype)
        return ops.matmul(x, ops.transpose(vectors))


class _Block(layers.Layer):
    """A block of GPT, causal and normalized before, or of BERT, normalized after."""

    def __init__(self, width: int, heads: int, *, is_causal: bool, is_fused: bool) -> None:
        super().__init__()
        self.heads, self.is_causal, self.is_fused = heads, is_causal, is_fused
        self.width = width
        self.projection = layers.Dense(3 * width)
        self.output_projection = layers.Dense(width)
        self.inner = layers.Dense(4 * width, activation="gelu")
        self.outer = layers.Dense(width)
        self.norms = [layers.LayerNormalization() for _ in range(2)]

    def build(self, input_shape: Any) -> None:
        for layer in (self.projection, self.output_projection, self.inner, *self.norms):
            layer.build(input_shape)
        self.outer.build((*input_shape[:-1], 4 * self.width))

    def _attend(self, x: Any) -> Any:
        _, length, _ = x.shape
        shape = (-1, length, self.heads, self.width // self.heads)
        found: Any = ops.split(self.projection(x), 3, axis=-1)
        parts = [ops.reshape(one, shape) for one in found]
        # None lets Keras choose, which takes the fused kernel of cuDNN where it runs.
        flash = None if self.is_fused else False
        found = ops.dot_product_attention(*parts, is_causal=self.is_causal, flash_attention=flash)
        return self.output_projection(ops.reshape(found, (-1, length, self.width)))

    def call(self, x: Any) -> Any:
        if self.is_causal:
            x = x + self._attend(self.norms[0](x))
            return x + self.outer(self.inner(self.norms[1](x)))
        x = self.norms[0](x + self._attend(x))
        return self.norms[1](x + self.outer(self.inner(x)))


def _gpt(blocks: int, width: int, heads: int, length: int, words: int, is_fused: bool) -> Any:
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.Input((length,), dtype="int32")
    embedding = _Embedding(words, width)
    x = embedding(tokens)
    for _ in range(blocks):
        x = _Block(width, heads, is_causal=True, is_fused=is_fused)(x)
    logits = _Logits(embedding.tokens)(layers.LayerNormalization()(x))
    return _compiled(keras.Model(tokens, logits), keras.optimizers.AdamW(1e-4))


def _bert(blocks: int, width: int, heads: int, length: int, words: int, is_fused: bool) -> Any:
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.Input((length,), dtype="int32")
    x = layers.LayerNormalization()(_Embedding(words, width)(tokens))
    for _ in range(blocks):
        x = _Block(width, heads, is_causal=False, is_fused=is_fused)(x)
    pooled = layers.Dense(width, activation="tanh")(x[:, 0])
    return _compiled(keras.Model(tokens, layers.Dense(2)(pooled)), keras.optimizers.AdamW(2e-5))


def _resnet_case(batch_size: int, size: int = 224, num_steps: int = 20) -> Case:
    return Case(lambda _: _resnet(size), (size, size, 3), "uint8", 0, batch_size, num_steps)


def _made(is_tiny: bool) -> dict[str, Case]:
    if is_tiny:
        return {
            "mlp": Case(lambda _: _mlp(32, 2), (784,), "float32", 0, 8, 4),
            "resnet50_64": _resnet_case(2, 32, 2),
            "resnet50_256": _resnet_case(4, 32, 2),
            "bert_base": Case(
                lambda fused: _bert(2, 32, 4, 16, 256, fused), (16,), "int32", 0, 4, 3
            ),
            "gpt_350m": Case(
                lambda fused: _gpt(2, 32, 4, 16, 256, fused), (16,), "int32", 16, 2, 3
            ),
        }
    return {
        "mlp": Case(lambda _: _mlp(2048, 4), (784,), "float32", 0, 1024, 500),
        "resnet50_64": _resnet_case(64),
        "resnet50_256": _resnet_case(256, num_steps=12),
        # Devlin et al. 2019, section 3.
        "bert_base": Case(
            lambda fused: _bert(12, 768, 12, 128, 30522, fused), (128,), "int32", 0, 64, 30
        ),
        # Brown et al. 2020, table 2.1, "GPT-3 Medium", with half its length.
        "gpt_350m": Case(
            lambda fused: _gpt(24, 1024, 16, 1024, 50304, fused), (1024,), "int32", 1024, 8, 15
        ),
    }


CASES: dict[bool, dict[str, Case]] = {is_tiny: _made(is_tiny) for is_tiny in (False, True)}
