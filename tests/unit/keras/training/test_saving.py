"""Files of models: saved under a strategy, opened anywhere, and the other way round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from stratagem.variables.registry import VariableKind
from tests.fresh_process import run_fresh
from tests.parity.comparison import mirrored, regression
from tests.unit.keras.replicas import copies_of, kind_of, values_of


def _trained(scope: Callable[[], Any] = contextlib.nullcontext) -> Any:
    """A model with every kind of state: weights, moving statistics, seeds, slots, a loss scale."""
    x, y = regression()
    with scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dropout(0.3, seed=2),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"])
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return model


def _state(model: Any) -> list[np.ndarray]:
    return values_of([*model.weights, *model.optimizer.variables])


@pytest.fixture(scope="module")
def distributed() -> Any:
    """A model trained by two replicas."""
    return _trained(lambda: mirrored(2).scope())


_PLAIN_KERAS = """
import sys
import keras, numpy
model = keras.models.load_model("model.keras")
assert not [name for name in sys.modules if name.partition(".")[0] == "stratagem"]
assert all(type(v) is keras.Variable for v in [*model.variables, *model.optimizer.variables])
variables = [*model.weights, *model.optimizer.variables]
arrays = {"variable" + str(i): numpy.asarray(v.value) for i, v in enumerate(variables)}
weights = keras.models.clone_model(model)
weights.load_weights("model.weights.h5")
for v, w in zip(model.weights, weights.weights, strict=True):
    numpy.testing.assert_array_equal(numpy.asarray(v.value), numpy.asarray(w.value))
x = numpy.load("x.npy")
numpy.savez("read.npz", predicted=model.predict(x, verbose=0), **arrays)
"""


@pytest.mark.slow
def test_file_saved_under_a_strategy_opens_in_plain_keras(distributed: Any, tmp_path: Path) -> None:
    x, _ = regression()
    distributed.save(tmp_path / "model.keras")
    distributed.save_weights(tmp_path / "model.weights.h5")
    np.save(tmp_path / "x.npy", x)
    run_fresh(_PLAIN_KERAS, folder=tmp_path, KERAS_BACKEND="jax")
    expected = _state(distributed)
    with np.load(tmp_path / "read.npz") as read:
        assert len(read.files) == len(expected) + 1
        for index, value in enumerate(expected):
            np.testing.assert_array_equal(read[f"variable{index}"], value)
        alone = keras.models.clone_model(distributed)
        for variable, value in zip(alone.weights, values_of(distributed.weights), strict=True):
            variable.assign(value)
        np.testing.assert_allclose(read["predicted"], np.asarray(alone(x)), rtol=1e-5, atol=1e-6)


@pytest.mark.compatibility
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_file_opens_in_the_scope_of_any_strategy(
    num_replicas: int, distributed: Any, tmp_path: Path
) -> None:
    distributed.save(tmp_path / "model.keras")
    strategy = mirrored(num_replicas)
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.distribute_strategy is strategy
    for value, wanted in zip(_state(loaded), _state(distributed), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
    kinds = {variable.name: kind_of(variable) for variable in loaded.weights}
    assert kinds["kernel"] is VariableKind.MIRRORED
    assert kinds["moving_mean"] is VariableKind.ON_READ
    assert len(copies_of(loaded.optimizer.variables[-1])) == num_replicas


@pytest.mark.compatibility
def test_file_of_plain_keras_opens_in_a_scope(tmp_path: Path) -> None:
    plain = _trained()
    plain.save(tmp_path / "model.keras")
    with mirrored(2).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    for value, wanted in zip(_state(loaded), _state(plain), strict=True):
        np.testing.assert_array_equal(value, wanted)
    x, _ = regression()
    np.testing.assert_allclose(
        loaded.predict(x, batch_size=4, verbose=0), np.asarray(plain(x)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.compatibility
def test_moving_statistics_are_saved_as_the_mean_of_the_components(
    distributed: Any, tmp_path: Path
) -> None:
    distributed.save_weights(tmp_path / "model.weights.h5")
    plain = keras.models.clone_model(distributed)
    plain.load_weights(tmp_path / "model.weights.h5")
    components = np.asarray(distributed.layers[1].moving_mean.storage)
    assert (components[0] != components[1]).any()
    np.testing.assert_allclose(
        np.asarray(plain.layers[1].moving_mean.value), components.mean(0), rtol=1e-6
    )


@pytest.mark.compatibility
def test_weights_loaded_in_place_reach_every_copy_and_component(
    distributed: Any, tmp_path: Path
) -> None:
    distributed.save_weights(tmp_path / "model.weights.h5")
    with mirrored(2).scope():
        other = keras.models.clone_model(distributed)
    other.load_weights(tmp_path / "model.weights.h5")
    for variable, wanted in zip(other.weights, values_of(distributed.weights), strict=True):
        for copy in copies_of(variable):
            np.testing.assert_allclose(copy.reshape(wanted.shape), wanted, rtol=1e-6)


@pytest.mark.compatibility
def test_weights_set_and_got_are_those_of_one_device(distributed: Any) -> None:
    with mirrored(2).scope():
        other = keras.models.clone_model(distributed)
    other.set_weights(values_of(distributed.weights))
    for value, wanted in zip(other.get_weights(), distributed.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6)


@pytest.mark.slow
def test_training_that_goes_on_from_a_file_is_training_that_never_stopped(tmp_path: Path) -> None:
    x, y = regression()
    strategy = mirrored(2)
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((3,)), dense])
        model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for value, wanted in zip(_state(loaded), _state(model), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6)


def test_variable_of_a_strategy_cannot_be_copied_into_another_by_accident(distributed: Any) -> None:
    plain = keras.models.clone_model(distributed)
    assert all(kind_of(variable) is None for variable in plain.variables)
    with mirrored(3).scope():
        cloned = keras.models.clone_model(distributed)
    assert cloned.distribute_strategy.num_replicas_in_sync == 3
