"""Models that are filled in a scope and built, compiled and trained outside of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg

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
