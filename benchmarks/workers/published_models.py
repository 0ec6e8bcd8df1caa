"""Models of published measurements, with the sizes that their publications state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import stratagem  # noqa: F401  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
from keras import layers, ops

__all__ = ["PUBLISHED_MODELS", "PublishedModel"]

_IMAGE = (224, 224, 3)
_NUM_CLASSES = 1000
# Devlin et al. 2019, section 3: BERT-large, and the vocabulary of the uncased model.
_BERT_WIDTH, _BERT_BLOCKS, _BERT_HEADS, _BERT_TOKENS = 1024, 24, 16, 30522
# llm-foundry, scripts/train/yamls/pretrain/mpt-7b.yaml.
_MPT_WIDTH, _MPT_BLOCKS, _MPT_HEADS, _MPT_TOKENS, _MPT_LENGTH = 4096, 32, 32, 50368, 2048
# MaxText, configs/models/llama2-7b.yml, and configs/a3/llama_2_7b/*.sh.
_LLAMA_WIDTH, _LLAMA_INNER, _LLAMA_BLOCKS, _LLAMA_HEADS = 4096, 11008, 32, 32
_LLAMA_TOKENS, _LLAMA_LENGTH = 32000, 4096


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A model and the shapes of its batch.

    Args:
        build: returns the compiled model.
        shapes: returns the batch of a number of examples.
        shard_state: None, "optimizer" or "all", as in `MirroredStrategy`.
    """

    build: Callable[[], keras.Model]
    shapes: Callable[[int], Any]
    shard_state: str | None = None


class _Block(layers.Layer):
    """A transformer's block; "pre" normalizes the input of each part, "post" its sum."""

    def __init__(self, width: int, num_heads: int, *, is_causal: bool, recomputes: bool) -> None:
        super().__init__()
        self.is_causal, self.recomputes = is_causal, recomputes
        use_bias = not is_causal
        self.attention = layers.MultiHeadAttention(num_heads, width // num_heads, use_bias=use_bias)
        self.inner = layers.Dense(4 * width, activation="gelu", use_bias=use_bias)
        self.outer = layers.Dense(width, use_bias=use_bias)
        self.norms = [layers.LayerNormalization() for _ in range(2)]

    def build(self, input_shape: Any) -> None:
        self.attention.build(input_shape, input_shape)
        self.inner.build(input_shape)
        self.outer.build((*input_shape[:-1], 4 * input_shape[-1]))
        for norm in self.norms:
            norm.build(input_shape)

    def call(self, x: Any) -> Any:
        compute = self._decode if self.is_causal else self._encode
        return keras.remat(compute)(x) if self.recomputes else compute(x)

    def _encode(self, x: Any) -> Any:
        x = self.norms[0](x + self.attention(x, x))
        return self.norms[1](x + self.outer(self.inner(x)))

    def _decode(self, x: Any) -> Any:
        normalized = self.norms[0](x)
        x = x + self.attention(normalized, normalized, use_causal_mask=True)
        return x + self.outer(self.inner(self.norms[1](x)))


class _GatedBlock(layers.Layer):
    """A block of Llama; without rotary positions, which cost little."""

    def __init__(self) -> None:
        super().__init__()
        size = _LLAMA_WIDTH // _LLAMA_HEADS
        self.attention = layers.MultiHeadAttention(_LLAMA_HEADS, size, use_bias=False)
        self.gate = layers.Dense(_LLAMA_INNER, activation="silu", use_bias=False)
        self.inner = layers.Dense(_LLAMA_INNER, use_bias=False)
        self.outer = layers.Dense(_LLAMA_WIDTH, use_bias=False)
        self.norms = [layers.RMSNormalization() for _ in range(2)]

    def build(self, input_shape: Any) -> None:
        self.attention.build(input_shape, input_shape)
        self.outer.build((*input_shape[:-1], _LLAMA_INNER))
        for layer in (self.gate, self.inner, *self.norms):
            layer.build(input_shape)

    def call(self, x: Any) -> Any:
        normalized = self.norms[0](x)
        x = x + self.attention(normalized, normalized, use_causal_mask=True)
        normalized = self.norms[1](x)
        return x + self.outer(self.gate(normalized) * self.inner(normalized))


class _Embedding(layers.Layer):
    """Tokens and positions as vectors."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = layers.Embedding(num_tokens, width)
        self.width = width

    def build(self, input_shape: Any) -> None:
        self.tokens.build(input_shape)
        shape = (input_shape[-1], self.width)
        self.positions = self.add_weight(shape=shape, initializer="uniform")

    def call(self, tokens: Any) -> Any:
        return self.tokens(tokens) + ops.cast(self.positions, self.compute_dtype)


def _compiled(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    return model


def _resnet50() -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    network = keras.applications.ResNet50(
        weights=None, classes=_NUM_CLASSES, classifier_activation=None
    )
    return _compiled(network, keras.optimizers.SGD(0.1, momentum=0.9))


def _image_shapes(num_examples: int) -> Any:
    return (
        jax.ShapeDtypeStruct((num_examples, *_IMAGE), "bfloat16"),
        jax.ShapeDtypeStruct((num_examples,), "int32"),
    )


def _bert_large(length: int, num_predictions: int) -> keras.Model:
    """Returns BERT-large that predicts the tokens at given positions."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = layers.Input((length,), dtype="int32")
    positions = layers.Input((num_predictions,), dtype="int32")
    x = layers.LayerNormalization()(_Embedding(_BERT_TOKENS, _BERT_WIDTH)(tokens))
    for _ in range(_BERT_BLOCKS):
        x = _Block(_BERT_WIDTH, _BERT_HEADS, is_causal=False, recomputes=False)(x)
    masked = ops.take_along_axis(x, positions[:, :, None], axis=1)
    hidden = layers.LayerNormalization()(layers.Dense(_BERT_WIDTH, activation="gelu")(masked))
    model = keras.Model([tokens, positions], layers.Dense(_BERT_TOKENS)(hidden))
    return _compiled(model, keras.optimizers.Adam())


def _bert_shapes(length: int, num_predictions: int) -> Callable[[int], Any]:
    def shapes(num_examples: int) -> Any:
        tokens = jax.ShapeDtypeStruct((num_examples, length), "int32")
        positions = jax.ShapeDtypeStruct((num_examples, num_predictions), "int32")
        return (tokens, positions), positions

    return shapes


def _mpt_7b(*, recomputes: bool) -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = layers.Input((_MPT_LENGTH,), dtype="int32")
    x = _Embedding(_MPT_TOKENS, _MPT_WIDTH)(tokens)
    for _ in range(_MPT_BLOCKS):
        x = _Block(_MPT_WIDTH, _MPT_HEADS, is_causal=True, recomputes=recomputes)(x)
    logits = layers.Dense(_MPT_TOKENS, use_bias=False)(layers.LayerNormalization()(x))
    return _compiled(keras.Model(tokens, logits), keras.optimizers.Adam())


def _llama2_7b() -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = layers.Input((_LLAMA_LENGTH,), dtype="int32")
    x = layers.Embedding(_LLAMA_TOKENS, _LLAMA_WIDTH)(tokens)
    for _ in range(_LLAMA_BLOCKS):
        x = _GatedBlock()(x)
    logits = layers.Dense(_LLAMA_TOKENS, use_bias=False)(layers.RMSNormalization()(x))
    return _compiled(keras.Model(tokens, logits), keras.optimizers.Adam())


def _token_shapes(length: int) -> Callable[[int], Any]:
    def shapes(num_examples: int) -> Any:
        tokens = jax.ShapeDtypeStruct((num_examples, length), "int32")
        return tokens, tokens

    return shapes


PUBLISHED_MODELS = {
    "resnet50": PublishedModel(_resnet50, _image_shapes),
    # DeepLearningExamples, PyTorch/LanguageModeling/BERT: 20 and 80 predictions a sequence.
    "bert_large_128": PublishedModel(lambda: _bert_large(128, 20), _bert_shapes(128, 20)),
    "bert_large_512": PublishedModel(lambda: _bert_large(512, 80), _bert_shapes(512, 80)),
    "mpt_7b": PublishedModel(lambda: _mpt_7b(recomputes=False), _token_shapes(_MPT_LENGTH), "all"),
    "mpt_7b_recomputed": PublishedModel(
        lambda: _mpt_7b(recomputes=True), _token_shapes(_MPT_LENGTH), "all"
    ),
    "llama2_7b": PublishedModel(_llama2_7b, _token_shapes(_LLAMA_LENGTH), "all"),
}
