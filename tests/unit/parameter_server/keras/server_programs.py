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
from tests.unit.parameter_server.keras.user_kinds import Signs
from validation.third_party.programs.measuring import (
    Measurements,
    Place,
    Program,
    evaluated,
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


def model_of_functional_submodels(place: Place) -> Measurements:
    with place.scope():
        inner = _functional(_StepWithVariables)
        inputs = keras.Input((6,))
        outputs = layers.Add()([inner(inputs), inner(inputs / 2.0), _dense()(inputs)])
        model = _StepWithState(inputs, outputs)
    return _fitted(place, model, keras.optimizers.SGD(0.05, momentum=0.9))


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


def preprocessing(place: Place) -> Measurements:
    with place.scope():
        normalization = layers.Normalization()
        normalization.adapt(X)
        bins = layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0])
        inputs = keras.Input((6,))
        encoded = layers.CategoryEncoding(num_tokens=4, output_mode="multi_hot")(bins(inputs))
        joined = layers.Concatenate()([normalization(inputs), encoded])
        model = keras.Model(inputs, layers.Dense(1)(layers.Rescaling(0.5)(joined)))
    return _fitted(place, model, _adam())


def augmentation(place: Place) -> Measurements:
    """Without randomness, which is each worker's own."""
    with place.scope():
        augmented = keras.Sequential(
            [
                layers.Resizing(7, 7),
                layers.CenterCrop(6, 6),
                layers.RandomTranslation(0.0, 0.0, seed=3),
                layers.RandomZoom(0.0, seed=4),
                layers.RandomContrast(0.0, seed=5),
            ]
        )
        inputs = keras.Input((8, 8, 3))
        features = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(augmented(inputs)))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(features))
        model.compile(_adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return measured(place, model, IMAGES, CLASSES, 4)


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


def optimizer_without_a_config(place: Place) -> Measurements:
    """Of a class with an argument of its own."""
    with place.scope():
        model = _dense()
    return _fitted(place, model, Signs(0.05, power=0.5))


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


def several_outputs(place: Place) -> Measurements:
    with place.scope():
        a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
        joined = layers.Concatenate()([a, b])
        outputs = {"p": layers.Dense(1, name="p")(joined), "q": layers.Dense(2, name="q")(joined)}
        model = keras.Model({"a": a, "b": b}, outputs)
        metrics = {"p": ["mae"], "q": [keras.metrics.MeanSquaredError()]}
        losses = {"p": "mse", "q": keras.losses.Huber()}
        model.compile(_adam(), losses, metrics=metrics, loss_weights={"p": 1.0, "q": 0.3})
    return measured(place, model, {"a": X, "b": X * 2}, {"p": Y, "q": X[:, :2]}, 8)


def weighted_classes(place: Place) -> Measurements:
    y = (Y > 0).astype("float32")
    with place.scope():
        model = _dense(activation="sigmoid")
        metrics = ["accuracy", keras.metrics.AUC(), keras.metrics.Precision()]
        model.compile(_adam(), "binary_crossentropy", metrics=metrics, weighted_metrics=["mse"])
    weights = np.linspace(0, 1, len(X)).astype("float32")
    return {
        **fitted(place, model, X, y, batch_size=8, sample_weight=weights),
        **evaluated(model, X, y, batch_size=8, sample_weight=weights),
    }


def callbacks_that_change_the_rate(place: Place) -> Measurements:
    with place.scope():
        model = _dense()
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10),
    ]
    arguments = {"validation_data": (X[:7], Y[:7]), "callbacks": callbacks, "epochs": 4}
    return _fitted(place, model, keras.optimizers.SGD(0.05), **arguments)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        functional_model_with_a_stateless_step,
        model_of_functional_submodels,
        adversaries,
        combined_adversaries,
        preprocessing,
        augmentation,
        made_outside_and_filled_inside,
        compiled_outside,
        compiled_again_outside,
        moved_by_compile,
        optimizer_without_a_config,
        settings_of_keras,
        layer_with_losses_and_state,
        several_outputs,
        weighted_classes,
        callbacks_that_change_the_rate,
    )
}
