"""`sg.compile(model, distribute=...)`: a model made outside every scope moves to a strategy."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.abstract_devices import planning_for
from stratagem.keras.variables.variable_creation import adopt
from stratagem.planning.targets import parse_target
from stratagem.variables.registry import VariableKind
from tests.parity.comparison import (
    Scope,
    assert_like_plain_keras,
    fitted,
    mirrored,
    regression,
    small_regressor,
)
from tests.unit.keras.replicas import copies_of, kind_of, values_of


def test_moved_model_trains_as_one_device_does() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        model = small_regressor()
        arguments = {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"]}
        with scope():
            strategy = sg.get_strategy() if sg.has_strategy() else None
        sg.compile(model, distribute=strategy, **arguments)
        assert model.distribute_strategy is (strategy or sg.get_strategy())
        return fitted(model, x, y, batch_size=4)

    assert_like_plain_keras(job, replicas=(3,))


def test_moved_variables_keep_their_identity_and_values() -> None:
    model = small_regressor()
    variables, values = list(model.weights), values_of(model.weights)
    strategy = mirrored(2)
    sg.compile(model, distribute=strategy, optimizer="sgd", loss="mse")
    for variable, same, value in zip(model.weights, variables, values, strict=True):
        assert variable is same
        assert kind_of(variable) is VariableKind.MIRRORED
        for copy in copies_of(variable):
            np.testing.assert_array_equal(copy, value)


def test_moved_batch_norm_and_dropout_get_the_kinds_of_a_model_made_in_the_scope() -> None:
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dropout(0.5)])
    sg.compile(model, distribute=mirrored(2), loss="mse")
    kinds = {variable.name: kind_of(variable) for variable in model.variables}
    assert kinds["gamma"] is VariableKind.MIRRORED
    assert kinds["moving_mean"] is kinds["moving_variance"] is VariableKind.ON_READ
    assert kinds["seed_generator_state"] is VariableKind.MIRRORED
    np.testing.assert_allclose(values_of(model.weights)[3], np.ones(3))


def test_optimizer_and_metric_objects_made_outside_move_too() -> None:
    # Arguments are made before sg.compile is called, so outside the scope.
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        model = small_regressor()
        with scope():
            strategy = sg.get_strategy() if sg.has_strategy() else None
        sg.compile(
            model,
            distribute=strategy,
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss="mse",
            metrics=[keras.metrics.MeanAbsoluteError()],
        )
        return fitted(model, x, y, batch_size=4)

    assert_like_plain_keras(job, replicas=(2,))


def test_without_a_strategy_the_model_is_compiled_where_it_is() -> None:
    model = small_regressor()
    sg.compile(model, optimizer="sgd", loss="mse")
    assert kind_of(model.weights[0]) is None
    assert isinstance(model.optimizer, keras.optimizers.SGD)


def test_model_of_the_strategy_may_be_compiled_again() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = small_regressor()
    sg.compile(model, distribute=strategy, optimizer="sgd", loss="mse")
    sg.compile(model, distribute=strategy, optimizer="adam", loss="mae")
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    assert model.distribute_strategy is strategy


def test_model_of_another_strategy_cannot_be_moved() -> None:
    with mirrored(2).scope():
        model = small_regressor()
    with pytest.raises(ValueError, match=r"was created under MirroredStrategy.*model runs under"):
        sg.compile(model, distribute=mirrored(3), optimizer="sgd", loss="mse")


@pytest.mark.parametrize("optimizer", ["sgd", {"class_name": "SGD", "config": {}}])
def test_model_of_a_strategy_may_be_compiled_by_names_outside_its_scope(optimizer: Any) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            model = small_regressor()
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
        return fitted(model, x, y, batch_size=4)

    assert_like_plain_keras(job, replicas=(2,))


@pytest.mark.slow
def test_optimizer_and_metric_objects_given_to_compile_move_to_the_strategy_of_the_model() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        before = keras.optimizers.Adam(0.1), keras.metrics.MeanAbsoluteError()
        with scope():
            model = small_regressor()
            model.compile(optimizer=before[0], loss="mse", metrics=[before[1]])
        first = fitted(model, x, y)
        after = keras.optimizers.SGD(0.1, momentum=0.9), keras.metrics.MeanSquaredError()
        model.compile(optimizer=after[0], loss="mae", metrics=[after[1]])
        return {f"first {key}": value for key, value in first.items()} | fitted(model, x, y)

    assert_like_plain_keras(job, replicas=(1, 3))


def test_optimizer_that_is_set_behind_compile_is_named() -> None:
    with mirrored(2).scope():
        model = small_regressor()
        model.compile(optimizer="sgd", loss="mse")
    model.optimizer = keras.optimizers.Adam(name="late")
    with pytest.raises(ValueError, match="Fix: create the optimizer 'late' in `with strategy"):
        model.fit(*regression(), verbose=0)


def test_layer_that_was_built_outside_is_named() -> None:
    outside = keras.layers.Dense(1, name="stray")
    outside.build((None, 4))
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), outside])
        model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="create or build 'stray' in `with"):
        model.fit(*regression(), verbose=0)


@pytest.mark.parametrize("shard_state", [None, "all"])
def test_no_value_is_drawn_for_abstract_devices(shard_state: str | None) -> None:
    """Also if the variable moves to other abstract devices. A read draws it."""
    drawn: list[Any] = []

    def ones(shape: Any, dtype: Any = None) -> Any:
        drawn.append(shape)
        return keras.ops.ones(shape, dtype)

    with planning_for(parse_target("1xH100").topology):
        first = sg.OneDeviceStrategy("gpu:0")
    with planning_for(parse_target("4xH100").topology):
        second = sg.MirroredStrategy(shard_state=shard_state)
    with first.scope():
        variable = keras.Variable(ones, shape=(64, 32), dtype="bfloat16")
    adopt(variable, second)
    assert not drawn
    assert variable.distribute_strategy is second
    value = np.asarray(variable.value)
    assert drawn == [(64, 32)]
    np.testing.assert_array_equal(value, np.ones((64, 32), value.dtype))
    assert value.dtype == "bfloat16"
