"""A small model of equal blocks that write state, add losses and take static arguments."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

_RANDOM = np.random.default_rng(0)
_X = _RANDOM.normal(size=(7, 4)).astype("float32")
_Y = _RANDOM.normal(size=(7, 1)).astype("float32")


class Block(keras.layers.Layer):
    """Two products with dropout and batch normalization between; counts its calls."""

    def __init__(self, index: int, **arguments: Any) -> None:
        super().__init__(name=f"block_{index}", **arguments)
        self.inner = keras.layers.Dense(8, activation="gelu", name=f"inner_{index}")
        self.dropout = keras.layers.Dropout(0.5, seed=index)
        self.outer = keras.layers.Dense(4)
        self.norm = keras.layers.BatchNormalization()

    def build(self, input_shape: Any) -> None:
        self.inner.build(input_shape)
        self.outer.build((None, 8))
        self.norm.build(input_shape)
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="only_first_replica"
        )

    @property
    def seed_state(self) -> Any:
        return self.dropout.seed_generator.state.value

    def call(self, x: Any, training: bool | None = None, kind: str = "residual") -> Any:
        y: Any = self.outer(self.dropout(self.inner(x), training=training))
        if training:
            self.calls.assign_add(1.0)
        self.add_loss(jnp.mean(y**2) * 0.01)
        return self.norm(x + y if kind == "residual" else y, training=training)


def decoder() -> keras.Model:
    """Returns two blocks and a layer that has one result."""
    x = inputs = keras.Input((4,))
    for index in range(2):
        x = Block(index)(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def fitted(scope: Any, prepare: Any = lambda model: None) -> tuple[Any, list[Any]]:
    """Returns losses and weights after two steps of `fit`."""
    keras.utils.set_random_seed(0)
    with scope:
        model: Any = decoder()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    prepare(model)
    history = model.fit(_X, _Y, batch_size=4, shuffle=False, verbose=0)
    return history.history["loss"], [np.asarray(one.value) for one in model.weights]


def equations(jaxpr: Jaxpr, name: str) -> list[Any]:
    """Returns the equations of a primitive in a jaxpr, at any depth."""
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        found += [eqn] * (eqn.primitive.name == name)
        for value in eqn.params.values():
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, ClosedJaxpr | Jaxpr):
                    found += equations(one.jaxpr if isinstance(one, ClosedJaxpr) else one, name)
    return found
