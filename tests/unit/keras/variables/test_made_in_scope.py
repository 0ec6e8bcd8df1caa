"""Models that are filled in a scope and built, compiled and trained outside of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import (
    Scope,
    assert_like_plain_keras,
    fitted,
    regression,
    small_regressor,
    state_of,
)

_X = np.ones((6, 3), "float32")
_Y = np.ones((6, 2), "float32")


def _layers() -> list[Any]:
    return [keras.layers.Dense(4), keras.layers.Dropout(0.2), keras.layers.Dense(2)]


def _filled_inside(strategy: sg.Strategy) -> Any:
    with strategy.scope():
        return keras.Sequential(_layers())


def _made_before_filled_inside(strategy: sg.Strategy) -> Any:
    model = keras.Sequential()
    with strategy.scope():
        for layer in _layers():
            model.add(layer)
    return model


class _Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def _subclassed(strategy: sg.Strategy) -> Any:
    with strategy.scope():
        return _Subclassed()


_FIRST_USES: dict[str, Callable[[Any], Any]] = {
    "fit": lambda model: None,
    "build": lambda model: model.build((None, 3)),
    "call": lambda model: model(_X),
}


@pytest.mark.parametrize(
    ("make", "use"),
    [
        *itertools.product((_filled_inside, _made_before_filled_inside), _FIRST_USES),
        (_subclassed, "fit"),
        (_subclassed, "call"),
    ],
)
def test_model_belongs_to_the_scope_that_it_was_filled_in(make, use) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = make(strategy)
    _FIRST_USES[use](model)
    model.compile("rmsprop", "mse", metrics=["mae"])
    model.fit(_X, _Y, batch_size=4, verbose=0)
    assert model.distribute_strategy is strategy
    for variable in [*model.variables, *model.optimizer.variables]:
        assert strategy.extended.variable_created_in_scope(variable)


def test_model_of_no_scope_belongs_to_none() -> None:
    model = keras.Sequential(_layers())
    model.compile("rmsprop", "mse")
    model.fit(_X, _Y, batch_size=4, verbose=0)
    assert model.distribute_strategy is sg.get_strategy()


def _quantized(model: Any) -> None:
    model.quantize("int8")


def _quantized_layer_without_bias(model: Any) -> None:
    model.layers[0].quantize("int8")


def _with_lora(model: Any) -> None:
    model.layers[0].enable_lora(2, a_initializer="ones", b_initializer="ones")


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_quantized, marks=pytest.mark.slow),
        pytest.param(_quantized_layer_without_bias, marks=pytest.mark.slow),
        _with_lora,
    ],
)
def test_weights_that_a_layer_adds_later_belong_to_its_strategy(change) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            model = small_regressor(use_bias=change is not _quantized_layer_without_bias)
            model.compile(optimizer="sgd", loss="mse")
        model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
        change(model)
        predictions = model.predict(x, batch_size=5, verbose=0)
        result = {"predictions": predictions} | state_of(model)
        if change is not _with_lora:
            return result
        model.compile(optimizer="sgd", loss="mse")
        return result | fitted(model, x, y)

    assert_like_plain_keras(job, replicas=(3,))


@pytest.mark.parametrize("name", ["Adam", "LossScaleOptimizer"])
def test_optimizer_belongs_to_the_strategy_of_the_variables_it_is_built_for(name) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = small_regressor()
    optimizer = keras.optimizers.Adam()
    if name == "LossScaleOptimizer":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    for variable in optimizer.variables:
        assert strategy.extended.variable_created_in_scope(variable)
