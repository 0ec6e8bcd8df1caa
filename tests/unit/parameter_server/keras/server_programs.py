"""Programs as users write them, which one worker and one server compute as one device does.

Each is of a kind that came back from the worker as something else, or was refused.
"""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

import stratagem as sg
from validation.third_party.programs.measuring import (
    Measurements,
    Place,
    Program,
    fitted,
    measured,
)

X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = X.sum(1, keepdims=True)
IMAGES = np.random.default_rng(1).uniform(0, 1, (11, 8, 8, 3)).astype("float32")
CLASSES = np.random.default_rng(2).integers(0, 3, 11).astype("int32")


def _adam() -> keras.optimizers.Optimizer:
    """Epsilon is large: where gradients are near 0, Adam would make of rounding a full step."""
    return keras.optimizers.Adam(1e-2, epsilon=1e-3)


def _dense(**last: Any) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1, **last)])


def _fitted(place: Place, model: Any, optimizer: Any, **arguments: Any) -> Measurements:
    with place.scope():
        model.compile(optimizer, "mse", metrics=["mae"])
    return measured(place, model, X, Y, 8, **arguments)


class _StepWithState(keras.Model):
    """A step in Keras's form for JAX."""

    def train_step(self, state: Any, data: Any) -> Any:
        trained, others, optimizer, metrics = state
        x, y = data

        def loss_of(trained: Any, others: Any) -> Any:
            outputs, others = self.stateless_call(trained, others, x, training=True)
            return ops.mean(ops.square(outputs - y)), others

        (loss, others), grads = jax.value_and_grad(loss_of, has_aux=True)(trained, others)
        trained, optimizer = self.optimizer.stateless_apply(optimizer, grads, trained)
        return {"loss": loss}, (trained, others, optimizer, metrics)


class _StepWithVariables(keras.Model):
    """A step in TensorFlow's form."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        loss, grads = sg.value_and_grad(
            lambda: ops.mean(ops.square(self(x, training=True) - y)), self.trainable_variables
        )
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


def _functional(kind: Any, shared: Any = None) -> Any:
    inputs = keras.Input((6,))
    shared = shared or layers.Dense(4, "tanh")
    return kind(inputs, layers.Dense(1)(layers.Add()([shared(inputs), shared(inputs * 2.0)])))


def functional_model_with_a_stateless_step(place: Place) -> Measurements:
    with place.scope():
        model = _functional(_StepWithState)
    return _fitted(place, model, _adam())


class _Adversaries(keras.Model):
    """A step that trains two submodels against each other."""

    def __init__(self, generator: Any, discriminator: Any) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.real = keras.metrics.Mean(name="real")
        self.built = True

    @property
    def metrics(self) -> list[Any]:
        return [self.real]

    def train_step(self, data: Any) -> Any:
        rows, noise = data

        def loss_of() -> Any:
            fake = self.discriminator(self.generator(noise))
            return ops.mean(ops.square(self.discriminator(rows) - 1.0) + ops.square(fake))

        loss, grads = sg.value_and_grad(loss_of, self.trainable_variables)
        self.real.update_state(ops.mean(self.discriminator(rows)))
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss, "real": self.real.result()}


def adversaries(place: Place) -> Measurements:
    with place.scope():
        generator = keras.Sequential([keras.Input((3,)), layers.Dense(5, "tanh"), layers.Dense(6)])
        model = _Adversaries(generator, _dense())
        model.compile(optimizer=_adam())
    return fitted(place, model, X, X[:, :3], batch_size=8)


def combined_adversaries(place: Place) -> Measurements:
    """Two compiled models that share a submodel, trained by `train_on_batch`."""
    with place.scope():
        generator = keras.Sequential([keras.Input((3,)), layers.Dense(6)])
        discriminator = _dense(activation="sigmoid")
        discriminator.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
        discriminator.trainable = False
        noise = keras.Input((3,))
        both = keras.Model(noise, discriminator(generator(noise)))
        both.compile(_adam(), "binary_crossentropy")
    ones = np.ones((6, 1), "float32")
    losses = [
        (discriminator.train_on_batch(rows, ones), both.train_on_batch(rows[:, :3], ones))
        for rows in (X[:6], X[6:12], X[12:18])
    ]
    return {"losses": losses} | {
        f"weight {index}": value for index, value in enumerate(both.get_weights())
    }


def made_outside_and_filled_inside(place: Place) -> Measurements:
    model = keras.Sequential([layers.Dense(4, "tanh")])
    with place.scope():
        model.add(layers.BatchNormalization(synchronized=True))
        model.add(layers.Dense(1))
    return _fitted(place, model, "adam")


def compiled_outside(place: Place) -> Measurements:
    """With objects that have made their variables."""
    with place.scope():
        model = _dense()
    metrics = [keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()]
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=metrics)
    return measured(place, model, X, Y, 8)


def compiled_again_outside(place: Place) -> Measurements:
    """Fine tuning: layers thaw, and the optimizer is another."""
    with place.scope():
        model = _dense()
        model.layers[0].trainable = False
    before = dict(_fitted(place, model, _adam()))
    model.layers[0].trainable = True
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return {f"before {key}": value for key, value in before.items()} | measured(
        place, model, X, Y, 8
    )


def moved_by_compile(place: Place) -> Measurements:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(1),
        ]
    )
    sg.compile(model, distribute=place.strategy, optimizer=_adam(), loss="mse", metrics=["mae"])
    return measured(place, model, X, Y, 8)


def settings_of_keras(place: Place) -> Measurements:
    before = keras.config.epsilon()
    keras.config.set_epsilon(1e-2)
    try:
        with place.scope():
            model = _dense(activation="sigmoid")
            model.compile(keras.optimizers.SGD(2.0), "binary_crossentropy", metrics=["mae"])
        return measured(place, model, X, (Y > 0).astype("float32"), 8)
    finally:
        keras.config.set_epsilon(before)


class _Codebook(layers.Layer):
    """A loss of its own, state that a call assigns, and a metric inside."""

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(shape=(shape[-1], 5), initializer="glorot_uniform")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.sizes = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        nearest = ops.argmax(ops.matmul(x, self.codes), axis=1)
        codes = ops.take(ops.transpose(self.codes), nearest, axis=0)
        self.add_loss(ops.mean(ops.square(codes - ops.stop_gradient(x))))
        self.calls.assign_add(1.0)
        self.sizes.update_state(ops.sum(ops.square(x), axis=1))
        return x + ops.stop_gradient(codes - x)


def layer_with_losses_and_state(place: Place) -> Measurements:
    with place.scope():
        model = keras.Sequential([layers.Dense(4, "tanh"), _Codebook(), layers.Dense(1)])
    return _fitted(place, model, _adam())


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        functional_model_with_a_stateless_step,
        adversaries,
        combined_adversaries,
        made_outside_and_filled_inside,
        compiled_outside,
        compiled_again_outside,
        moved_by_compile,
        settings_of_keras,
        layer_with_losses_and_state,
    )
}
