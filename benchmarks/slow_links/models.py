"""The models that are trained, each with its examples and what all methods train it with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from benchmarks.slow_links.data import (
    CONTEXT,
    NUM_CHARACTERS,
    NUM_ITEMS,
    NUM_USERS,
    Examples,
    clicks,
    digits,
    text,
)

__all__ = ["TASKS", "Task"]

_WARMUP_STEPS = 50
_WIDTH, _HEADS, _BLOCKS = 256, 4, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model and its training, the same for all methods.

    Args:
        make_model: makes the model.
        examples: makes the examples.
        batch_size: of both workers together.
        learning_rate: of AdamW at its highest, after a warm-up; from there it falls as a cosine.
        loss: of Keras.
    """

    make_model: Callable[[], keras.Model]
    examples: Callable[[], Examples]
    batch_size: int
    learning_rate: float
    loss: Callable[[], Any]

    def compiled_model(self, num_steps: int) -> keras.Model:
        """Returns a new model, compiled. Call in the scope of a strategy."""
        keras.utils.set_random_seed(0)
        model = self.make_model()
        schedule: Any = keras.optimizers.schedules.CosineDecay(
            0.0,
            max(1, num_steps - _WARMUP_STEPS),
            alpha=0.1,
            warmup_target=self.learning_rate,
            warmup_steps=_WARMUP_STEPS,
        )
        model.compile(keras.optimizers.AdamW(schedule, weight_decay=0.01), self.loss())
        return model


class _Positions(keras.layers.Layer):
    """Adds a trained vector for each place."""

    def build(self, input_shape: Any) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="random_normal")

    def call(self, inputs: Any) -> Any:
        return inputs + self.vectors


def _transformer() -> keras.Model:
    inputs = keras.layers.Input((CONTEXT,), dtype="int32")
    x = _Positions()(keras.layers.Embedding(NUM_CHARACTERS, _WIDTH)(inputs))
    for _ in range(_BLOCKS):
        normal = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS, use_bias=False)
        x = x + attention(normal, normal, use_causal_mask=True)
        hidden = keras.layers.Dense(4 * _WIDTH, "gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(_WIDTH)(hidden)
    outputs = keras.layers.Dense(NUM_CHARACTERS)(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, outputs)


def _convolutional() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(128, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(512, "relu"),
            layers.Dense(10),
        ]
    )


def _recommender() -> keras.Model:
    inputs: Any = keras.layers.Input((2,), dtype="int32")
    user = keras.layers.Embedding(NUM_USERS, 32)(inputs[:, 0])
    item = keras.layers.Embedding(NUM_ITEMS, 32)(inputs[:, 1])
    product = keras.layers.Multiply()([user, item])
    x = keras.layers.Concatenate()([user, item, product])
    x = keras.layers.Dense(128, "relu")(x)
    x = keras.layers.Dense(64, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def _of_classes() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _of_clicks() -> Any:
    return keras.losses.BinaryCrossentropy(from_logits=True)


TASKS = {
    "transformer": Task(
        make_model=_transformer,
        examples=text,
        batch_size=4,
        learning_rate=1e-3,
        loss=_of_classes,
    ),
    "convolutional": Task(
        make_model=_convolutional,
        examples=digits,
        batch_size=32,
        learning_rate=1e-3,
        loss=_of_classes,
    ),
    "recommender": Task(
        make_model=_recommender,
        examples=clicks,
        batch_size=512,
        learning_rate=3e-3,
        loss=_of_clicks,
    ),
}
