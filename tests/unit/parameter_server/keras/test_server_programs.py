"""Programs with a worker and a server in processes of their own equal one device."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import stratagem as sg
from tests.unit.parameter_server.keras import user_kinds
from validation.third_party.comparison import assert_like_plain_keras
from validation.third_party.programs.measuring import (
    Measurements,
    Place,
    Program,
    fitted,
    measured,
    run_program,
)

X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = X.sum(1, keepdims=True)


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


def functional_model_with_a_stateless_step(place: Place) -> Measurements:
    with place.scope():
        inputs, shared = keras.Input((6,)), layers.Dense(4, "tanh")
        both = layers.Add()([shared(inputs), shared(inputs * 2.0)])
        model = _StepWithState(inputs, layers.Dense(1)(both))
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
    weights = {f"weight {index}": value for index, value in enumerate(both.get_weights())}
    return {"losses": losses} | weights


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
    normal = layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), normal, layers.Dense(1)])
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


# They equal one device, as does everything that users define.


_QUICK = ("functional_model_with_a_stateless_step",)


@pytest.fixture(scope="module")
def servers() -> Iterator[Any]:
    """One server, and a worker with two devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "2")
        with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
            yield strategy


@pytest.fixture(autouse=True)
def ordinary_process() -> Iterator[None]:
    """Types are promoted as by default: the strict rule of our tests is not that of users."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in PROGRAMS],
)
def test_program_equals_one_device(servers: Any, name: str) -> None:
    one = sg.OneDeviceStrategy("cpu:0")
    expected = run_program(PROGRAMS[name], Place(one.scope, one))
    assert_like_plain_keras(PROGRAMS[name], servers, expected)


@pytest.mark.parametrize("kind", ["metric", "schedule", "optimizer"])
def test_classes_of_no_module_equal_one_device(servers: Any, kind: str) -> None:
    """They are sent by value, as those of a script; all kinds are below."""
    trained = runpy.run_path(user_kinds.__file__)["trained"]
    _, expected = trained(sg.OneDeviceStrategy("cpu:0"), kind)
    _, found = trained(servers, kind)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _measured_by_every_kind(strategy: Any) -> dict[str, float]:
    """Seven rows in batches of four: on two devices, a row of the last batch only pads."""
    x = np.arange(7, dtype="float32")[:, None]
    y = (x > 2).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")]
        )
        metrics = [
            "mae",
            "accuracy",
            keras.metrics.AUC(name="auc"),
            keras.metrics.CosineSimilarity(),
            keras.metrics.F1Score(threshold=0.5),
            keras.metrics.MeanMetricWrapper(keras.losses.mean_absolute_error, name="wrapped"),
            keras.metrics.Recall(name="recall"),
            keras.metrics.RootMeanSquaredError(),
            user_kinds.Rows(2.0),
        ]
        model.compile("sgd", "mse", metrics=metrics, weighted_metrics=["mse"])
    fitted = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    evaluated = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    logs = {name: value[0] for name, value in fitted.items()}
    logs |= {f"evaluated {name}": value for name, value in evaluated.items()}
    return {name: np.ravel(value).tolist() for name, value in logs.items()}


def test_metrics_of_a_worker_with_two_devices_count_no_padding(servers: Any) -> None:
    expected = _measured_by_every_kind(sg.OneDeviceStrategy("cpu:0"))
    assert expected["rows"] == expected["evaluated rows"] == [14.0]
    found = _measured_by_every_kind(servers)
    assert found == {name: pytest.approx(value, rel=1e-5) for name, value in expected.items()}


# Everything that users define, wherever it is defined.

_PROGRAM = Path(__file__).with_name("user_kinds.py")
_IMPORTING = "import sys, own_kinds\nif __name__ == '__main__':\n    own_kinds.main(sys.argv[1:])\n"
_LIMIT_S = 900


def _run(place: str, folder: Path) -> dict[str, Any]:
    """Runs the program as a script, as a module that a script imports, or in a notebook's way."""
    command, source = [sys.executable, str(_PROGRAM)], None
    if place == "module":
        shutil.copy(_PROGRAM, folder / "own_kinds.py")
        (folder / "main.py").write_text(_IMPORTING)
        command = [sys.executable, str(folder / "main.py")]
    if place == "notebook":  # a main module without a file
        command, source = [sys.executable, "-"], _PROGRAM.read_text()
    done = subprocess.run(
        command,
        input=source,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["script", "module", "notebook"])
def test_kinds_of_users_equal_one_device(tmp_path: Path, place: str) -> None:
    numbers = _run(place, tmp_path)
    expected = numbers.pop("one device")
    assert len(expected) > 10
    for where, found in numbers.items():
        assert found.keys() == expected.keys()
        for kind, values in expected.items():
            assert jax.tree.structure(found[kind]) == jax.tree.structure(values), (where, kind)
            one, other = (np.array(jax.tree.leaves(tree)) for tree in (found[kind], values))
            np.testing.assert_allclose(one, other, 1e-5, 1e-6, err_msg=f"{kind}, {where}")
